"""Time over tokens, ours, peers and floor, as a PNG and an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsmoe_op.cli.cell import OK, Cell
from dsmoe_op.cli.output import CommandError
from dsmoe_op.cli.peers import OURS

COLUMNS = 3


def check_installed(what: str = "--plot") -> None:
    """
    Args:
        what: needs it, for the error.

    Raises:
        CommandError: there is no matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandError(f"{what}: matplotlib cannot be imported ({error}): pip install 'dsmoe_op[bench]'") from None


def save(cells: Sequence[Cell], path: Path, title: str) -> list[Path]:
    """Draws one panel for each shape and dtype; writes path with the suffixes .png and .svg, and returns both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((cell.shape, cell.dtype) for cell in cells))
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, figsize=(6.4 * columns, 6.2 * rows + 0.8))
    for (shape, dtype), axis in zip(panels, axes.flat, strict=False):
        _panel(axis, [cell for cell in cells if (cell.shape, cell.dtype) == (shape, dtype)])
        axis.set_title(f"{shape}, {dtype}", fontsize=11)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    paths = save_figure(figure, path)
    pyplot.close(figure)
    return paths


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Writes path with the suffixes .png and .svg, and returns both."""
    base = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    paths = [base.with_name(base.name + suffix) for suffix in (".png", ".svg")]
    for target in paths:
        figure.savefig(target, dpi=150)
    return paths


def _panel(axis: Any, cells: Sequence[Cell]) -> None:
    """Ours with full lines, peers dashed, the floor black; what was wrong has no line."""
    import matplotlib.ticker

    colors = matplotlib.colormaps["tab20"]
    cells = sorted(cells, key=lambda cell: cell.tokens)
    tokens = [cell.tokens for cell in cells]
    names = list(dict.fromkeys(row.candidate for cell in cells for row in cell.rows))
    for number, name in enumerate(names):
        points = [
            (cell.tokens, row.time.us)
            for cell in cells
            if (row := cell.row(name)) is not None and row.time is not None and row.status == OK
        ]
        if not points:
            continue
        mine = name.startswith(OURS)
        emphasis = {"linewidth": 2.6, "zorder": 3} if name == cells[0].ours else {"linewidth": 1.2}
        axis.plot(
            *zip(*points, strict=True),
            marker="o" if mine else "s",
            markersize=4,
            linestyle="-" if mine else "--",
            color=colors(2 * number % 20 + number // 10 % 2),  # the strong ones first, then the pale ones
            label=name,
            **emphasis,
        )
    axis.plot(tokens, [cell.floor_us for cell in cells], color="black", linewidth=1.6, linestyle=":", label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axis.set_xticks(tokens, [str(T) for T in tokens])
    axis.set_xlabel("tokens")
    axis.set_ylabel("time of a layer, us")
    axis.grid(True, which="both", alpha=0.25)
    axis.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)  # below
