"""What an sm_90 binary does with its uniform registers, on every path.

ptxas 12.8 (of Triton 3.6) was seen to compute half of a shared-memory descriptor on one path of a kernel and to use it
on another: the matrix unit then read where nothing was. Nothing tells of it but the binary itself.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_NO_RESULT = ("USETMAXREG", "UTMA", "UBLK", "UCGABAR", "UISETP", "UPLOP3", "UFENCE", "UP2UR")


class _Instruction(NamedTuple):
    address: int
    guard: str | None
    name: str
    operands: str

    @property
    def text(self) -> str:
        return f"{self.address:#x} {self.name} {self.operands}"


def unset_uniform_registers(sass: str) -> list[str]:
    """The instructions that read a uniform register which some path to them has not written.

    Args:
        sass: one kernel, as `cuobjdump -sass` prints it. An instruction that a predicate guards counts as executed.
    """
    instructions, labels = _parsed(sass)
    followers = [_followers(i, instructions, labels) for i in range(len(instructions))]
    access = [_written_and_read(one) for one in instructions]
    set_before: list[frozenset[int] | None] = [None] * len(instructions)
    set_before[0] = frozenset()
    waiting = [0]
    while waiting:
        i = waiting.pop()
        after = (set_before[i] or frozenset()) | access[i][0]
        for j in followers[i]:
            before = set_before[j]
            now = after if before is None else before & after
            if now != before:
                set_before[j] = now
                waiting.append(j)
    return [
        one.text
        for one, before, (_, read) in zip(instructions, set_before, access, strict=True)
        if before is not None and not read <= before
    ]


def _parsed(sass: str) -> tuple[list[_Instruction], dict[str, int]]:
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            instructions.append(_Instruction(int(found[1], 16), *found.groups()[1:]))
    at = {one.address: i for i, one in enumerate(instructions)}
    return instructions, labels | {f"{address:#x}": i for address, i in at.items()}


def _followers(i: int, instructions: list[_Instruction], labels: dict[str, int]) -> list[int]:
    one = instructions[i]
    next_one = [i + 1] if i + 1 < len(instructions) else []
    guarded = one.guard not in (None, "PT", "UPT")
    if one.name.startswith("BRA"):
        to = re.search(r"`\((\.L_x_\d+)\)|(0x[0-9a-f]+)\s*$", one.operands)
        assert to is not None, one.text
        guarded |= re.match(r"!?U?P\d", one.operands) is not None
        return [labels[to[1] or to[2]], *(next_one if guarded else [])]
    if one.name.startswith(("EXIT", "RET", "BRX")):
        return next_one if guarded else []
    return next_one


def _written_and_read(one: _Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of uniform registers."""
    operands = [operand.strip() for operand in re.split(r",(?![^\[]*\])", one.operands)]
    pairs = ".64" in one.name or ".WIDE" in one.name
    has_result = one.name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX")) and not one.name.startswith(_NO_RESULT)
    written: set[int] = set()
    read: set[int] = set()
    for operand in operands:
        numbers = [int(n) for n in _UNIFORM.findall(operand)]
        if has_result and not written and re.fullmatch(r"UR\d+", operand):
            width = 4 if ".128" in one.name else 2 if pairs else 1
            written |= {numbers[0] + i for i in range(width)}
        elif operand.startswith("gdesc["):  # descriptors of both operands; one in registers has none
            first = 2 if one.name.startswith("HGMMA") and re.match(r"R\d+, R\d+, gdesc", one.operands) else 0
            read |= {numbers[0] + i for i in range(first, 4)}
        else:
            wide = operand.startswith("desc[") or (one.name.startswith("U") and ".64" in one.name)
            read |= {n + i for n in numbers for i in range(2 if wide else 1)}
    return frozenset(written), frozenset(read)
