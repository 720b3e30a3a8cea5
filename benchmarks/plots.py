"""``make bench-plots``: measure how costs grow, and draw it into docs/images.

The figures are kept under build/, so that they can be drawn again without being measured
(``--drawn-from``). Needs matplotlib: ``pip install '.[plots]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth import Curve, curves
from benchmarks.summary.topics import ROOT
from benchmarks.table import today

IMAGES = ROOT / "docs" / "images"
FIGURES = ROOT / "build" / "growth.json"
OURS = ("#0b6e4f", "#2fa36b", "#8ccfa6")
THEIRS = ("#c0392b", "#e8927c")
GREY = "#555555"


def main() -> None:
    """Measure unless told where the figures are, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two minutes; figures are rough")
    parser.add_argument("--drawn-from", type=Path, help=f"figures of a run, such as {FIGURES}")
    parser.add_argument("--to", type=Path, default=IMAGES, help="folder of the images")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args()
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install '.[plots]'") from None
    if args.drawn_from is None:
        told = measured(quick=args.quick)
        FIGURES.parent.mkdir(exist_ok=True)
        FIGURES.write_text(json.dumps(told), encoding="utf-8")
    else:
        told = json.loads(args.drawn_from.read_text(encoding="utf-8"))
    found = [Curve(**curve) for curve in told["curves"]]
    args.to.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("growth-engine", found[:2]), ("growth-page", found[2:])):
        path = args.to / f"{name}.{args.format}"
        draw(Figure, chosen, told["when"], path)
        print(path)


def measured(*, quick: bool) -> dict[str, Any]:
    """All curves, and when and on what they were measured."""
    found = [dataclasses.asdict(curve) for curve in curves(quick)]
    return {"when": today(), "curves": found}


def draw(figure: type[Any], chosen: Sequence[Curve], when: str, path: Path) -> None:
    """One image: a panel a curve, two in a row."""
    from matplotlib import rc_context  # noqa: PLC0415

    lines = (len(chosen) + 1) // 2
    # Text stays text: small files, and the same picture for the same figures.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sidestep", "font.size": 10}):
        sheet = figure(figsize=(10, 3.9 * lines + 0.3), layout="constrained", facecolor="white")
        for place, curve in enumerate(chosen, 1):
            panel(sheet.add_subplot(lines, 2, place), curve)
        sheet.supxlabel(f"Measured {when}", fontsize=8, color=GREY)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        sheet.savefig(path, dpi=110, metadata=metadata)


def panel(axes: Any, curve: Curve) -> None:
    """One curve's lines, each named in the legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator  # noqa: PLC0415

    ours, theirs = iter(OURS), iter(THEIRS)
    top = 0.0
    for name, points in curve.lines.items():
        mine = name.startswith("sidestep")
        across, up = zip(*points, strict=True)
        axes.plot(
            *(across, up),
            label=name,
            color=next(ours if mine else theirs),
            marker="o" if mine else "s",
            markersize=4,
            linewidth=1.8,
            linestyle="-" if mine else "--",
        )
        top = max(top, *up)
    if curve.straight:
        axes.set_ylim(0, top * 1.3)
    else:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        # Room for the legend above the highest line.
        low, _ = axes.get_ylim()
        axes.set_ylim(low, top * (top / low) ** 0.45)
        few = top / low < 100
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        axes.set_xticks([x for x, _ in next(iter(curve.lines.values()))])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.minorticks_off()
    axes.set_title(curve.title, fontsize=11, loc="left")
    axes.set_xlabel(curve.over)
    axes.set_ylabel(curve.unit)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, loc="upper left", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
