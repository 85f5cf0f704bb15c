"""Make Markdown tables and a plot of files of results.

    python -m benchmarks.publish results.json ...                          # print the tables
    python -m benchmarks.publish results.json ... --plot FILE.svg          # and draw them (.svg, .png)
    python -m benchmarks.publish --page benchmarks/FIGURES.md [--check]    # write the tables of a page anew

A page names the file of each of its tables, in a comment before it. So no figure of a table is typed. The worst case of
a table is its first row. ``--check`` writes nothing, and fails if a table is not that of its file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import readable
from ortgpu.cli.figures.measuring import Spread
from ortgpu.process.timing import quartiles

Record = Mapping[str, Any]
Rows = list[Sequence[str]]  # The first one is the head of the table.

_TABLE = re.compile(r"(<!-- table of (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_NAMED = ("onnxruntime-gpu", "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "numpy", "torch", "python")


def speed_up(figure: Record) -> Spread:
    """Return plain ONNX Runtime's median time divided by ours, and by our quartiles."""
    low, middle, high = quartiles(figure["values"]["ours"])
    plain = figure["plain"]["median"]
    return Spread(plain / high, plain / middle, plain / low)


def of_pairs(record: Record) -> Rows:
    """Overhead, throughput, pools: medians, and the speed-up with its quartiles."""
    rows = []
    for name, figure in sorted(record["figures"].items(), key=lambda each: speed_up(each[1]).median):
        times = speed_up(figure)
        ours, plain = (readable(figure[of]["median"]) for of in ("ours", "plain"))
        rows.append((f"`{name}`", ours, plain, f"{times.median:.2f} [{times.low:.2f}, {times.high:.2f}]"))
    return [("figure", "ortgpu", "plain", "speed-up"), *rows]


def of_kinds(record: Record) -> Rows:
    """The zoo: for each figure the worst kind of network, the geometric mean and the best."""
    found: dict[str, dict[str, float]] = {}
    for part, each in record["parts"].items():
        for name, figure in each["figures"].items():
            group, _, variant = name.partition(": ")  # Graphs and copies have a part each, and variants of a figure.
            group = group.partition(" by torch.compile")[0] + " over torch.compile" if "torch" in group else group
            found.setdefault(group, {})[variant or part.partition(",")[0]] = 1 / figure["ratio"]
    rows = []
    for name, times in sorted(found.items(), key=lambda each: min(each[1].values())):
        worst, best = (function(times, key=lambda kind: times[kind]) for function in (min, max))
        mean = statistics.geometric_mean(times.values())
        rows.append((name, f"{times[worst]:.2f}, {worst}", f"{mean:.2f}", f"{times[best]:.2f}, {best}", len(times)))
    return [("speed-up", "worst", "geometric mean", "best", "kinds"), *[tuple(map(str, row)) for row in rows]]


def of_joined(record: Record) -> Rows:
    """Joined requests."""
    rows = [(each["figure"], f"{each['value']:.2f}", f"{each['bar']:.1f}") for each in record["figures"]]
    return [("figure", "value", "wanted"), *rows]


_SHAPES = {  # a figure of benchmarks.shapes: its title, and whether less is better
    "in turn over repeated, worst": ("the worst shape in turn, over the same shape repeated in plain", True),
    "a plain session for each, in turn over repeated, worst": ("the same of a plain session for each shape", True),
    "in turn over a plain session for each, worst": ("the worst shape in turn, over a plain session for each", True),
    "first after warm over repeated, worst": ("the first run after `warm`, over a repeated one in plain", True),
    "first after warm over a plain session for each, in turn, worst": (
        "the first run after `warm`, over a plain session for each shape in turn",
        True,
    ),
    "memory over plain's": ("GPU memory over that of plain after its largest shape", True),
    "random over plain's": ("40 shapes at random, time over plain's", True),
    "threads over plain's": ("runs a second in eight threads once settled, over plain with one shape", False),
    "threads over plain's, warmed for eight": ("the same from the start, after `warm(feeds, runs=8)`", False),
    "map in turn over map of one": ("`map` over shapes in turn, items a second over one shape", False),
    "map in turn over map of one, from the start, warmed for four": (
        "the same from the start, after `warm(feeds, runs=4)`",
        False,
    ),
}


def of_shapes(record: Record) -> Rows:
    """Inputs of several shapes: the figure of each kind of network, the worst kind first."""
    rows = []
    for name, (title, less) in _SHAPES.items():
        found = {kind: each[name] for kind, each in record["parts"].items() if name in each}
        if found:
            worst, *others = sorted(found.items(), key=lambda each: each[1], reverse=less)
            cells = ("; ".join(f"{value:.2f}, {kind}" for kind, value in part) for part in ([worst], others))
            rows.append((title, *cells))
    return [("figure", "worst", "others"), *rows]


def of_memory(record: Record) -> Rows:
    """What budgets, ``trim`` and many models did: the worst case first, and the other networks after it."""
    parts = record["parts"]
    rows: list[tuple[str, str]] = []
    if (models := parts.get("models")) is not None:
        rows += [
            ("calls of twelve models in eight threads: lost, wrong, right", f"{models['lost']}, {models['wrong']}, "
                f"{models['right']:,}"),
            ("their memory over the budget, a third of their sum", f"{models['above MiB']:,.0f} MiB"),
            ("what a call costs more than `run`, and by the model's path",
                " and ".join(f"{each:.1f} µs" for each in models["hit costs us, and by its path"])),
        ]  # fmt: skip
    for title, part, name in (
        ("runs with a budget over runs without, the median of five pairs", "cost", "ratio"),
        ("memory after `trim` over that after the first small run", "trim", "ratio"),
    ):
        found = sorted(((each[name], kind) for kind, each in parts.get(part, {}).items()), reverse=True)
        if found:
            rows.append((title, "; ".join(f"{value:.2f}, {kind}" for value, kind in found)))
    budgets = [
        (each["above MiB"], f"{each['above MiB']:,.0f} MiB, {part.partition('-')[2]} with {share}", each)
        for part, figures in parts.items()
        if part.startswith("budget-")
        for share, each in figures.items()
        if isinstance(each, Mapping) and "above MiB" in each
    ]
    if budgets:
        counts = [sum(each[name] for _, _, each in budgets) for name in ("wrong", "right", "out of memory")]
        rows += [
            ("runs of random shapes within a budget: wrong, right, out of memory", ", ".join(map(str, counts))),
            ("memory over the budget, a part of the unlimited peak", "; ".join(
                text for _, text, _ in sorted(budgets, key=lambda each: each[0], reverse=True)
            )),
        ]  # fmt: skip
    fits = [
        (abs(told - found), f"{told:,.0f} instead of {found:,.0f} MiB, {part.partition('-')[2]} with {batch}", within)
        for part, figures in parts.items()
        if part.startswith("fit-")
        for batch, each in figures.items()
        if isinstance(each, Mapping)
        for told, found, within in zip(each["fit MiB"], each["NVML MiB"], each["within"], strict=True)
    ]
    if fits:
        count = sum(within for _, _, within in fits)
        rows += [
            (
                "figures of `fit` within 5 % or 32 MiB of those of a process that runs the model",
                f"{count} of {len(fits)}",
            ),
            ("the figure that is furthest off", max(fits)[1]),
        ]
    return [("figure", "value"), *rows]


def of_service(record: Record) -> Rows:
    """Workers that die under load."""
    requests = record["requests"]
    rows: Rows = [
        ("requests that failed without a cause, stuck, processes left", f"{len(record['failed'])}, {record['stuck']}, "
            f"{len(record['orphans'])}"),
        ("seconds from a death to the successor's first result, the worst",
            f"{max(record['seconds from a death to the first result']):.1f}"),
        ("requests that were right, cancelled", f"{requests.get('right', 0):,}, {requests.get('cancelled', 0):,}"),
        ("workers killed; requests that ended a worker", f"{record['killed']}; {sum(record['spoilt'].values())}"),
        ("minutes", f"{record['minutes']:.0f}"),
    ]  # fmt: skip
    return [("figure", "value"), *rows]


TABLES: Mapping[str, Callable[[Record], Rows]] = {
    "overhead": of_pairs,
    "throughput": of_pairs,
    "pool": of_pairs,
    "zoo": of_kinds,
    "batched": of_joined,
    "shapes": of_shapes,
    "memory": of_memory,
    "chaos": of_service,
}


def markdown(rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * lines[0].count(" | ") + "---|")
    return "\n".join(lines)


def table(record: Record) -> str:
    return markdown(TABLES[record["benchmark"]](record))


def machine(record: Record) -> str:
    """Return the machine, the versions, the date and the commit of a file of results."""
    of, versions = record["machine"], record["versions"]
    gpus = {name: of["gpus"].count(name) for name in of["gpus"]}
    named = ", ".join(f"{name} {versions[name]}" for name in _NAMED if name in versions)
    return (
        f"{' and '.join(f'{count} x {name}' for name, count in gpus.items()) or 'no GPU'}, driver {of['driver']}, "
        f"{of['cores']} cores; {named}; {record['date'][:10]}, commit {record['commit'][:8]}"
    )


def page(text: str, folder: Path) -> str:
    """Return a page with the tables of the files that it names, which are relative to the folder."""

    def made(match: re.Match[str]) -> str:
        record = json.loads((folder / match[2]).read_text(encoding="utf-8"))
        return f"{match[1]}{table(record)}\n\n{machine(record)} ([file]({match[2]})).\n{match[3]}"

    return _TABLE.sub(made, text)


def of_zoo(record: Record) -> Iterator[tuple[str, Spread]]:
    """Yield the speed-up of ``map`` for the kinds of network that no rule had tuned, by name and batch."""
    for kind, part in record["parts"].items():
        if part["options"] and "prefer_nhwc" not in part["options"]:
            for batch in (1, 32):
                figure = part["figures"][f"map b{batch}"]
                pairs = zip(figure["ours"], figure["plain"], strict=True)
                low, middle, high = quartiles([ours / plain for ours, plain in pairs])
                yield f"{kind}-b{batch}", Spread(1 / high, 1 / middle, 1 / low)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw all figures of these records, a panel for each batch, and one for those without."""
    from ortgpu.cli.figures.plot import draw_panels

    panels: dict[int, dict[str, Spread]] = {}
    for record in records:
        figures = ((name, speed_up(each)) for name, each in record.get("figures", {}).items())
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
    parser.add_argument("results", type=Path, nargs="*", help="what --json or --out of a benchmark wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.svg, .png); needs matplotlib")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables of this page anew")
    parser.add_argument("--check", action="store_true", help="only say whether the page has the tables of its files")
    options = parser.parse_args(arguments)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    print("\n\n".join(table(record) for record in records if record["benchmark"] in TABLES))
    if options.plot is not None:
        draw(records, options.plot)
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        new = page(text, options.page.parent)
        if options.check:
            return int(new != text)
        options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
