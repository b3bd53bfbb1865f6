"""How the commands talk: a report or one JSON object on stdout, progress on stderr, and errors that end them."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

OK, WRONG, NOT_RUN = 0, 1, 2
"""Exit codes: what was shown holds; it does not; nothing was shown (bad arguments, or something needed is missing)."""


class CommandError(Exception):
    """The command cannot run; its text is for the user."""


@contextlib.contextmanager
def stdout_kept_for_json(wanted: bool) -> Iterator[None]:
    """Whatever the libraries print goes to stderr where stdout is to hold one JSON object."""
    if wanted:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


def print_json(value: dict[str, Any]) -> None:
    """Numbers that are not finite become null."""
    json.dump(_finite(value), sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    number = [all(isinstance(row[i], (int, float)) or row[i] in ("", "-") for row in rows) for i in range(len(header))]
    lines = []
    for row in (list(header), *cells):
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, number, strict=True))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def error_text(error: BaseException, limit: int = 300) -> str:
    """The first lines of an exception, for a cell of a report."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    text = " | ".join(lines[:3])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def progress(total: int, description: str) -> Any:
    """A tqdm bar on stderr."""
    from tqdm import tqdm

    return tqdm(total=total, desc=description, file=sys.stderr, dynamic_ncols=True, leave=False)
