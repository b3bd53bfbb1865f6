"""Whole layers drawn at random on a GPU, with up to 16,384 tokens: see `fuzz.py`.

Each combination of options compiles kernels of its own, so each that is drawn is called many times: with other numbers
of tokens, values and bad rows.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fuzz import WORST, beside, check, fuzz, layers
from gpu import needs_gpu
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dsmoe_op import formats

pytestmark = [needs_gpu, pytest.mark.timeout(900)]  # dozens of kernels compile, beside other tests'

MOST_TOKENS = 16384
SIZES: tuple[dict[str, int], ...] = ({"H": 48, "E": 12, "I": 32, "S": 64}, {"H": 272, "E": 12, "I": 144, "S": 288})
"""S a multiple of I, as the fused schedule asks for. The second is wider than a tile, and no multiple of one."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each combination of options is a test of its own, for pytest-xdist to spread."""
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(16 if metafunc.config.option.thorough else 2))


def like(layer: dict[str, Any]) -> dict[str, Any]:
    """The same options, so that the kernels serve, and another number of tokens, other values and routing."""
    T = random.choice((0, 1, 2, int(2 ** random.uniform(0, 7)), int(2 ** random.uniform(7, 14)), MOST_TOKENS))
    valid = layer["make"]["valid_tokens"]
    make = {"T": T, "valid_tokens": None if valid is None else random.choice((-1, 0, T // 2, T, T + 3))}
    seed = layer["seed"] % 12 + 12 * random.randrange(10**6)  # how a tensor lies goes by the remainder
    return layer | {"seed": seed, "worst": random.choice(WORST), "make": layer["make"] | make}


def check_layers(drawn: st.SearchStrategy[dict[str, Any]], counted: Any, thorough: bool) -> None:
    calls = 120 if thorough else 6
    begun = False

    @settings(fuzz(2), phases=[Phase.generate])  # to make an example smaller would compile for minutes
    @given(drawn, st.integers(0, 2**31 - 1))
    def run(layer: dict[str, Any], seed: int) -> None:
        nonlocal begun
        if not begun:  # hypothesis begins with the simplest layer, each time
            begun = True
            return
        layer["make"]["device"] = "cuda"
        random.seed(seed)  # an example that hypothesis repeats is the same one
        for one in [layer, *(like(layer) for _ in range(calls - 1))]:
            try:
                with torch.device("cuda"):  # what `fuzz.py` and the bounds make by the way
                    check(one, lambda what, n=1: counted(f"{what} on a GPU", n))
            except AssertionError as error:
                error.add_note(f"with the same options, and {one['seed']=}, {one['worst']=}, {one['make']=}")
                raise
        counted("combinations of options of random layers on a GPU")

    run()


def test_any_layer_is_the_definition_within_its_roundings(counted, thorough, part) -> None:
    check_layers(layers(st.just(1), **SIZES[part % len(SIZES)]), counted, thorough)


def test_any_quantised_layer_is_too(counted, thorough, part) -> None:
    """In any mix of formats."""
    if torch.cuda.get_device_capability() == (8, 9):
        pytest.skip("bounds.py does not know how this GPU sums fp8 products")

    @st.composite
    def quantised(draw: st.DrawFn) -> dict[str, Any]:
        routed = draw(st.sampled_from([None, *formats.FORMATS]))
        return draw(layers(st.just(1), mix=(routed, draw(beside(routed))), **SIZES[part % len(SIZES)]))

    check_layers(quantised(), counted, thorough)
