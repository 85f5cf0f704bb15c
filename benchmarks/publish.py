"""Show files of results as Markdown tables and one plot.

python -m benchmarks.publish results.json ... [--plot FILE.svg|png]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import readable
from ortgpu.cli.bench.measuring import Spread
from ortgpu.process.timing import quartiles


def times_plain(figure: Mapping[str, Any]) -> Spread:
    """Return plain ONNX Runtime's median time by ours, and by our quartiles."""
    low, middle, high = quartiles(figure["values"]["ours"])
    plain = figure["plain"]["median"]
    return Spread(plain / high, plain / middle, plain / low)


def table(record: Mapping[str, Any]) -> str:
    """Return a table. More is better; quartiles are in brackets."""
    lines = ["| figure | ortgpu | plain | times plain |", "|---|---|---|---|"]
    for name, figure in record["figures"].items():
        times = times_plain(figure)
        ours, plain = (readable(figure[of]["median"]) for of in ("ours", "plain"))
        lines.append(f"| `{name}` | {ours} | {plain} | {times.median:.2f} [{times.low:.2f}, {times.high:.2f}] |")
    return "\n".join(lines)


def of_zoo(record: Mapping[str, Any]) -> Iterator[tuple[str, Spread]]:
    """Yield times plain of ``map`` for the kinds of network that no rule had tuned, by name and batch."""
    for kind, part in record["parts"].items():
        if part["options"] and "prefer_nhwc" not in part["options"]:
            for batch in (1, 32):
                figure = part["figures"][f"map b{batch}"]
                pairs = zip(figure["ours"], figure["plain"], strict=True)
                low, middle, high = quartiles([ours / plain for ours, plain in pairs])
                yield f"{kind}-b{batch}", Spread(1 / high, 1 / middle, 1 / low)


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw all figures of these records, a panel for each batch, and one for those without."""
    from ortgpu.cli.bench.plot import draw_panels

    panels: dict[int, dict[str, Spread]] = {}
    for record in records:
        figures = ((name, times_plain(each)) for name, each in record.get("figures", {}).items())
        for name, times in of_zoo(record) if "parts" in record else figures:
            batch = re.search(r"-b(\d+)\b", name)
            label = name.replace(batch[0], "") if batch else name
            panels.setdefault(int(batch[1]) if batch else 0, {})[label] = times
    named = {
        f"batch {batch}" if batch else "no batch": panels[batch]
        for batch in sorted(panels, key=lambda size: size or math.inf)
    }
    gpu = next(iter(records[0]["machine"]["gpus"]), "no GPU")
    benchmarks = dict.fromkeys("map, untuned" if "parts" in record else record["benchmark"] for record in records)
    draw_panels(named, f"{', '.join(benchmarks)}, {gpu}", path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description="Results as tables and a plot.")
    parser.add_argument("results", type=Path, nargs="+", help="what --json of a benchmark wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.svg, .png); needs matplotlib")
    options = parser.parse_args(arguments)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    print("\n\n".join(table(record) for record in records if "figures" in record))
    if options.plot is not None:
        draw(records, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
