"""Types of arguments. Each refuses with what is accepted and what came; argparse adds the argument's name."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch

from dsmoe_op.formats import FORMATS, FormatName


def integer(low: int, high: int, multiple: int = 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if re.fullmatch(r"-?\d+", text) and low <= int(text) <= high and int(text) % multiple == 0:
            return int(text)
        kind = "an integer" if multiple == 1 else f"a multiple of {multiple}"
        raise argparse.ArgumentTypeError(f"expected {kind} in {low}..{high}, got {text!r}")

    return parse


def integers(low: int, high: int) -> Callable[[str], tuple[int, ...]]:
    """Separated by commas; ascending and each once."""

    def parse(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(re.fullmatch(r"\d+", part) and low <= int(part) <= high for part in parts):
            raise argparse.ArgumentTypeError(f"expected integers in {low}..{high} separated by commas, got {text!r}")
        return tuple(sorted({int(part) for part in parts}))

    return parse


def some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Separated by commas; in the order of `names`."""

    def parse(text: str) -> tuple[str, ...]:
        parts = text.split(",")
        if not set(parts) <= set(names):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)} separated by commas, got {text!r}")
        return tuple(name for name in names if name in parts)

    return parse


class Formats(NamedTuple):
    """Of the routed experts' weights and of the shared one's; None: they are not quantised."""

    routed: FormatName | None
    shared: FormatName | None

    def __str__(self) -> str:
        return "+".join(dict.fromkeys(name or "none" for name in self))

    @property
    def rounds_rows(self) -> bool:
        """Whether one of them quantises what the weights multiply."""
        return any(name is not None and FORMATS[name].activations is not None for name in self)


FORMATS_ACCEPTED = f"none, one of {', '.join(FORMATS)} for all experts, or ROUTED+SHARED, each one of these"


def formats(text: str) -> Formats:
    """Such as int4 for both, or int4+none."""
    names = text.split("+")
    if len(names) > 2 or not set(names) <= {*FORMATS, "none"}:
        raise argparse.ArgumentTypeError(f"expected {FORMATS_ACCEPTED}, got {text!r}")
    routed, shared = (cast("FormatName | None", None if name == "none" else name) for name in (names[0], names[-1]))
    return Formats(routed, shared)


def formats_or_none(text: str) -> Formats | None:
    """The same; None where nothing is quantised."""
    found = formats(text)
    return found if any(found) else None


def text(value: str) -> str:
    if not value:
        raise argparse.ArgumentTypeError("expected at least one character, got ''")
    return value


def cannot_write(path: Path) -> str | None:
    """Why there can be no such file; None where there can."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return f"cannot write {path}" if path.is_dir() or not os.access(folder, os.W_OK) else None


def device(name: str) -> torch.device:
    count = torch.cuda.device_count()
    accepted = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if name not in accepted:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(accepted)} on this machine, got {name!r}")
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)
