"""Show a file of results as a Markdown table and a plot.

python -m benchmarks.publish results.json [--plot FILE.svg|png]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import readable
from ortgpu.process.timing import quartiles


def ratios(figure: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios of ours to plain, pair by pair."""
    return quartiles(
        [ours / plain for ours, plain in zip(*(figure["values"][of] for of in ("ours", "plain")), strict=True)]
    )


def table(record: Mapping[str, Any]) -> str:
    """Return a table. A smaller ratio is better for ortgpu; quartiles are in brackets."""
    lines = ["| figure | ortgpu | plain | ratio |", "|---|---|---|---|"]
    for name, figure in record["figures"].items():
        low, middle, high = ratios(figure)
        ours, plain = (readable(figure[of]["median"]) for of in ("ours", "plain"))
        lines.append(f"| `{name}` | {ours} | {plain} | {middle:.3f} [{low:.3f}, {high:.3f}] |")
    return "\n".join(lines)


def draw(record: Mapping[str, Any], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figures = record["figures"]
    with mpl.rc_context({"svg.fonttype": "none"}):
        canvas = Figure(figsize=(9, 1.2 + 0.35 * len(figures)), layout="constrained")
        axes = canvas.subplots()
        for place, figure in enumerate(figures.values()):
            low, middle, high = ratios(figure)
            axes.barh(place, middle, xerr=[[middle - low], [high - middle]], capsize=2, color="C0")
        axes.set_yticks(range(len(figures)), list(figures))
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1)
        gpus = ", ".join(record["machine"]["gpus"]) or "no GPU"
        axes.set(
            xlabel="time of ortgpu / time of plain ONNX Runtime, with quartiles", title=f"{record['benchmark']}, {gpus}"
        )
        canvas.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description="Results as a table and a plot.")
    parser.add_argument("results", type=Path, help="what --json of a benchmark wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.svg, .png); needs matplotlib")
    options = parser.parse_args(arguments)
    record = json.loads(options.results.read_text(encoding="utf-8"))
    print(table(record))
    if options.plot is not None:
        draw(record, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
