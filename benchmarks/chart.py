"""Figures as a chart: bars by way, one row of panels per suite and length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.settings import Rows

PANELS = {
    "step": ("peak MiB", "processor s"),
    "masks": ("peak MiB", "processor s"),
    "head": ("in all MB", "processor s"),
    "mlp": ("peak MiB", "processor s"),
    "longest": ("T", "s / step"),
    "operations": ("attention GFLOP", "everything else GFLOP"),
}
LABELS = ("tokens", "way")
OURS, OTHERS = "#c2410c", "#94a3b8"


def draw(figures: dict[str, Any], file: Path) -> None:
    """Write what can be drawn of the figures; the name's ending (svg, png) is the format."""
    plot = _library()
    plot.rcParams |= {"svg.hashsalt": "streamfx", "svg.fonttype": "none"}  # the same figures, the same file; text as text
    groups = [(title, rows, columns) for name, columns in PANELS.items() for title, rows in _groups(name, figures.get(name, []))]
    groups = [(title, drawn, columns) for title, rows, columns in groups if (drawn := [r for r in rows if columns[0] in r])]
    if not groups:
        raise SystemExit(f"--chart {file}: nothing to draw; there are charts of {', '.join(PANELS)}")
    heights = [len(rows) + 2 for _, rows, _ in groups]
    figure, grid = plot.subplots(
        len(groups), 2, figsize=(10, 0.3 * sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for panels, (title, rows, columns) in zip(grid, groups, strict=True):
        for axes, column in zip(panels, columns, strict=True):
            _bars(axes, rows, column)
            axes.set_title(f"{title}: {column}" if column != "T" else f"{title}", loc="left", fontsize=9)
        panels[1].set_yticklabels([])
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plot.close(figure)


def _library() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--chart needs matplotlib: pip install 'streamfx[bench]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _groups(name: str, rows: Rows) -> list[tuple[str, Rows]]:
    """A suite's rows by length; of `longest`, whose lengths are its result, all in one."""
    if name == "longest" or not any("T" in row for row in rows):
        return [(name, rows)] if rows else []
    lengths = dict.fromkeys(row.get("T") for row in rows)
    return [(f"{name}, T = {length:,}", [row for row in rows if row.get("T") == length]) for length in lengths]


def _bars(axes: Any, rows: Rows, column: str) -> None:
    values = [row.get(column) or 0 for row in rows]
    labels = [", ".join(str(row[name]) for name in LABELS if name in row) for row in rows]
    colours = [OURS if "streambp" in label else OTHERS for label in labels]
    bars = axes.barh(range(len(rows)), values, color=colours)
    axes.bar_label(bars, fmt="{:,.4g}", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
