"""The reader of binaries that `check_resources` stands on: it tells paths that leave a register unset from those that
do not."""

from __future__ import annotations

import pytest
from sass import unset_uniform_registers

# Two ways to one product, as ptxas 12.8 left them: {} is what one of them does about the descriptor.
TWO_PATHS = """
        /*0000*/                   S2UR UR4, SR_CgaCtaId ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   UIADD3 UR6, UP0, UR4, 0x2, URZ ;
        /*0030*/                   UIADD3.X UR7, URZ, 0x40000040, URZ, UP0, !UPT ;
        /*0040*/                   BRA `(.L_x_2) ;
.L_x_1:
{}
.L_x_2:
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R56, R124, gdesc[UR4], R56 ;
        /*00a0*/              @P1  BRA `(.L_x_2) ;
        /*00b0*/                   EXIT ;
"""
SET = {
    "two halves": ["UIADD3 UR6, UP0, UR4, 0x2, URZ", "UIADD3.X UR7, URZ, URZ, URZ, UP0, !UPT"],
    "both at once": ["UIADD3.64 UR6, UR4, 0x2, URZ"],
    "a wide product": ["UIMAD.WIDE UR6, UR4, 0x8, URZ"],
    "from registers": ["R2UR UR6, R2", "R2UR UR7, R3"],
}
UNSET = {
    "nothing": [],
    "one half": ["UIADD3 UR6, UP0, UR4, 0x2, URZ"],
    "another": ["UIADD3 UR6, UP0, UR4, 0x2, URZ", "UIADD3.X UR9, URZ, URZ, URZ, UP0, !UPT"],
}


def on_the_other_path(instructions: list[str]) -> str:
    lines = [f"        /*{0x50 + 0x10 * i:04x}*/                   {one} ;" for i, one in enumerate(instructions)]
    return TWO_PATHS.format("\n".join(lines))


@pytest.mark.parametrize("what", SET)
def test_a_register_that_all_paths_set_is_none(what: str) -> None:
    # UR5 is half of a pair that is read at once only where the pair was written at once.
    found = unset_uniform_registers(on_the_other_path(SET[what]))
    assert [one for one in found if "GMMA" in one] == []


@pytest.mark.parametrize("what", UNSET)
def test_a_register_that_one_path_leaves_is_found_where_it_is_read(what: str) -> None:
    found = unset_uniform_registers(on_the_other_path(UNSET[what]))
    assert found == ["0x90 HGMMA.64x64x16.F32.BF16 R56, R124, gdesc[UR4], R56"]


def test_an_operand_in_shared_memory_is_read_too() -> None:
    sass = on_the_other_path(SET["two halves"]).replace("R56, R124, gdesc", "R56, gdesc")
    assert len(unset_uniform_registers(sass)) == 1  # UR5
    assert unset_uniform_registers(sass.replace("S2UR UR4", "UIADD3.64 UR4, URZ, 0x1, URZ ;\n /*0008*/ S2UR UR4")) == []
