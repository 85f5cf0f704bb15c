"""What a GPUSessionPool makes of several GPUs, beside plain ONNX Runtime with one session for each.

    python -m benchmarks.pool [--quick] [--batch N] [--model NAME] [--json FILE]

On 1, 2, 4, 8 GPUs and on all, as far as there are so many: items a second from ordinary arrays, through a pool and
through plain sessions with three threads each, all in turns in one process. --on-cpu only shows that it works: its
figures are those of no GPU. README.md beside this file says how figures are taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.common import ROOT, environment_record, find_gpus, print_machine, run_child, spread

DEADLINE = 540  # seconds


def counts_of(gpus: int) -> list[int]:
    """How many GPUs are measured together."""
    return sorted({*(count for count in (1, 2, 4, 8) if count <= gpus), gpus})


def figures(seconds: dict[str, list[float]], counts: Sequence[int], items: int) -> dict[str, Any]:
    """By number of GPUs: items a second of both, and the ratios round by round. ``items`` of one GPU's share."""
    rates = {name: [items * int(name.partition(" ")[2]) / each for each in taken] for name, taken in seconds.items()}

    def ratio(one: str, other: str) -> dict[str, Any]:
        return spread([mine / theirs for mine, theirs in zip(rates[one], rates[other], strict=True)])

    return {
        str(count): {
            "unit": "items/s",
            "ours": spread(rates[f"ours {count}"]),
            "plain": spread(rates[f"plain {count}"]),
            "ratio": ratio(f"ours {count}", f"plain {count}"),
            "ours to one GPU": ratio(f"ours {count}", f"ours {counts[0]}"),
            "plain to one GPU": ratio(f"plain {count}", f"plain {counts[0]}"),
            "seconds": {"ours": seconds[f"ours {count}"], "plain": seconds[f"plain {count}"]},
        }
        for count in counts
    }


def table(found: dict[str, Any]) -> str:
    """Medians, with quartiles in brackets."""

    def cell(of: dict[str, Any], form: str) -> str:
        return f"{of['median']:{form}} [{of['quartiles'][0]:{form}}, {of['quartiles'][1]:{form}}]"

    rows = [("GPUs", "pool, items/s", "plain, items/s", "ratio", "pool to one GPU", "plain to one GPU", "n")]
    for count, figure in found.items():
        ratios = (cell(figure[name], ".2f") for name in ("ratio", "ours to one GPU", "plain to one GPU"))
        rates = (cell(figure[name], ",.0f") for name in ("ours", "plain"))
        rows.append((count, *rates, *ratios, str(figure["ours"]["n"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description="What a pool makes of several GPUs.")
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works, not to report")
    parser.add_argument("--model", default="resnet50", choices=["mlp", "conv", "resnet50", "encoder"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--on-cpu", type=int, metavar="N", help="N sessions on the CPU in the place of GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(arguments)

    gpus = find_gpus()
    count = options.on_cpu or len(gpus.visible)
    if not count:
        print(f"needs an NVIDIA GPU: {gpus.reason}", file=sys.stderr)
        return 1
    counts = counts_of(count)
    request = {
        "model": models.made(options.model),
        "counts": counts,
        "batch": options.batch,
        "feeds": 8 if options.quick else 32,
        "rounds": 3 if options.quick else 15,
        "on_cpu": bool(options.on_cpu),
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "workers.py"), "pool", json.dumps(request)]
    child = run_child(command, deadline=DEADLINE)
    if child.returncode != 0:
        print(child.explain(), file=sys.stderr)
        return 1
    record: dict[str, Any] = {
        "benchmark": "pool",
        **environment_record(gpus),
        "quick": options.quick,
        "request": {**request, "model": f"{options.model}: {models.recipe_of(options.model)}"},
        "devices": child.reports["devices"],
        "figures": figures(child.reports["seconds"], counts, options.batch * request["feeds"]),
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print_machine(record)
    print(f"{record['request']['model']}, batch {options.batch}, on {', '.join(record['devices'])}", end="\n\n")
    print(table(record["figures"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
