"""A picture of what streams did: a lane for each, the layer's parts in colours, the time shaded in which two worked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsmoe_op.cli import plot, profiling
from dsmoe_op.cli.parts import OTHER, Range

COLORS = {"router": "#E69F00", "routed": "#0072B2", "shared": "#009E73", "finalize": "#CC79A7", OTHER: "#999999"}
"""Of a range's first part: Okabe and Ito's, which colour-blind people can tell apart."""
_SHADE, _ALPHA = "#F0E442", 0.5
_WIDTH, _LANE = 13.0, 0.75
"""Inches: of the picture, and the height of a lane."""
_DETAIL = 3000
"""Parts of the picture's width; what is nearer to its like than one of them is drawn as one."""
_FEW = 300
"""Kernels of a part on a stream that are drawn one by one, with edges."""
MAX_LANES = 24


def save(ranges: Sequence[Range], lanes: dict[int, str], path: Path, title: str, subtitle: str) -> list[Path]:
    """Writes path with the suffixes .png and .svg, and returns both.

    Args:
        ranges: what to draw, at least one.
        lanes: names by stream, from above; those after the first MAX_LANES are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if len(lanes) > MAX_LANES:
        subtitle += f"; {MAX_LANES} of {len(lanes)} streams, the busiest"
        lanes = dict(itertools.islice(lanes.items(), MAX_LANES))
    begin = min(r.begin for r in ranges)
    span = max(r.end for r in ranges) - begin or 1.0
    height = _LANE * len(lanes)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 10, "hatch.linewidth": 2.5}):
        figure = pyplot.figure(figsize=(_WIDTH, height + 2.1))
        total = height + 2.1
        axis = figure.add_axes((0.125, 1.05 / total, 0.86, height / total))
        overlaps = [(b, e) for b, e, streams in profiling.stretches(w for r in ranges for w in r.work) if streams > 1]
        for b, e in _merged(overlaps, span):
            axis.axvspan(b - begin, e - begin, color=_SHADE, alpha=_ALPHA, linewidth=0, zorder=0)
        rows = {stream: len(lanes) - 1 - i for i, stream in enumerate(lanes)}
        for stream, row in rows.items():
            _lane(axis, [r for r in ranges if r.stream == stream], row, begin, span)
        _layers(axis, ranges, begin, span, len(lanes))
        axis.set_xlim(0, span)
        axis.set_ylim(-0.5, len(lanes) - 0.5)
        axis.set_yticks(list(rows.values()), list(lanes.values()))
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("microseconds")
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        figure.text(0.012, 1 - 0.33 / total, title, fontsize=15, fontweight="bold")
        figure.text(0.012, 1 - 0.62 / total, subtitle, fontsize=10, color="#555555")
        _legend(figure, ranges, bool(overlaps))
        paths = plot.save_figure(figure, path)
        pyplot.close(figure)
    return paths


def _merged(intervals: Sequence[tuple[float, float]], span: float) -> list[tuple[float, float]]:
    """Ascending intervals; those too near to be told apart as one."""
    found: list[tuple[float, float]] = []
    for b, e in intervals:
        if found and b - found[-1][1] <= span / _DETAIL:
            found[-1] = (found[-1][0], max(e, found[-1][1]))
        else:
            found.append((b, e))
    return found


def _lane(axis: Any, ranges: Sequence[Range], row: int, begin: float, span: float) -> None:
    """A stream's kernels, and the name of a part where there is room for it."""
    axis.axhline(row, color="#DDDDDD", linewidth=1, zorder=1)
    for part, its in _by_part(ranges):
        bars = [bar for r in its for bar in r.bars]
        if len(bars) > _FEW:
            bars = _merged(bars, span)
        look = style(part) if len(bars) <= _FEW else style(part) | {"linewidth": 0}
        widths = [(b - begin, max(e - b, span / _DETAIL)) for b, e in bars]
        axis.broken_barh(widths, (row - 0.34, 0.68), zorder=2, **look)
        for r in its:
            if part != OTHER and (r.end - r.begin) / span * _WIDTH > 0.1 * len(part):
                place = ((r.begin + r.end) / 2 - begin, row)
                ground = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1.5}
                color = "black" if part.startswith(("router", "finalize")) else "white"
                axis.text(*place, part, ha="center", va="center", color=color, weight="bold", bbox=ground, zorder=3)


def _by_part(ranges: Sequence[Range]) -> list[tuple[str, list[Range]]]:
    ordered = sorted(ranges, key=lambda r: (r.part, r.begin))
    return [(part, list(its)) for part, its in itertools.groupby(ordered, lambda r: r.part)]


def style(part: str) -> dict[str, Any]:
    """How bars look; a launch of several parts is striped with the colour of its last."""
    first, *others = part.split("+")
    if not others:
        return {"facecolor": COLORS[first], "edgecolor": "white", "linewidth": 0.8}
    return {"facecolor": COLORS[first], "edgecolor": COLORS[others[-1]], "hatch": "//", "linewidth": 0}


def _layers(axis: Any, ranges: Sequence[Range], begin: float, span: float, lanes: int) -> None:
    """Where each layer begins."""
    starts: dict[int, float] = {}
    for r in ranges:
        if r.part != OTHER:
            starts.setdefault(r.layer, r.begin)
    if len(starts) < 2 or len(starts) > 40:
        return
    for (layer, start), end in zip(starts.items(), [*list(starts.values())[1:], begin + span], strict=True):
        axis.axvline(start - begin, color="#444444", linewidth=0.8, linestyle=":", zorder=1)
        if (end - start) / span * _WIDTH > 0.7:
            axis.text(start - begin, lanes - 0.5, f" layer {layer + 1}", va="top", fontsize=8, color="#444444")


def _legend(figure: Any, ranges: Sequence[Range], overlaps: bool) -> None:
    from matplotlib.patches import Patch

    parts = sorted({r.part for r in ranges}, key=lambda part: (list(COLORS).index(part.split("+")[0]), part))
    other = "other kernels, copies and fills" if len(parts) > 1 else "kernels, copies and fills"
    handles = [Patch(**style(part), label=other if part == OTHER else part) for part in parts]
    if overlaps:
        handles.append(Patch(facecolor=_SHADE, alpha=_ALPHA, label="two streams at once"))
    figure.legend(handles=handles, loc="lower left", ncols=8, frameon=False, bbox_to_anchor=(0.115, 0.0))
