"""A self-contained HTML page that shows the CPU islands of a model and the copies around them."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from ..provider.requests import CPU, CUDA
from ..session.placement_details import GraphNode, PlacementDetails


def segments(details: PlacementDetails) -> list[tuple[str, list[GraphNode]]]:
    """Return the main graph in order, as "gpu", "cpu", "copy" or "unknown" with the nodes that follow each other."""

    def kind_of(node: GraphNode) -> str:
        return "copy" if node.copy else {CUDA: "gpu", CPU: "cpu"}.get(node.provider or "", "unknown")

    return [(kind, list(nodes)) for kind, nodes in groupby(details.nodes, kind_of)]


def render(details: PlacementDetails) -> str:
    """Return the page. It needs no network and has no scripts."""
    off = details.off_gpu
    compute = sum(node.kind == "compute" for node, _ in off)
    facts = [
        ("nodes", str(len(details.placed))),
        ("on the GPU", str(len(details.placed) - len(off))),
        ("computing on the CPU", str(compute)),
        ("handling shapes on the CPU", str(len(off) - compute)),
        ("copies between devices", str(details.copies)),
    ]
    cards = "".join(f"<div class=card><b>{value}</b>{name}</div>" for name, value in facts)
    rows = "".join(
        f"<tr class={node.kind}><td>{_text(str(node))}</td><td class=kind>{node.kind}</td>"
        f"<td>{_text(reason or 'not known')}</td></tr>"
        for node, reason in off
    )
    head = "<thead><tr><th>node on the CPU</th><th>kind</th><th>reason</th></tr></thead>"
    nothing = "<p id=off>Every node is on the GPU.</p>"
    table = f"<table id=off>{head}<tbody>{rows}</tbody></table>" if rows else nothing
    title = _text(details.model)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f"<title>Placement of {title}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Placement of {title}</h1><div class=cards>{cards}</div>"
        f"<h2>Not on the GPU</h2>{table}"
        "<h2>The graph, in the order in which it runs</h2>"
        f"<ol id=graph>{''.join(_segments(details))}</ol></body></html>\n"
    )


def _segments(details: PlacementDetails) -> Iterator[str]:
    labels = {"gpu": "GPU", "cpu": "CPU island", "copy": "copy", "unknown": "not known"}
    for kind, members in segments(details):
        counts = Counter(node.op_type if not node.copy else f"copy {node.copy}" for node in members)
        summary = ", ".join(f"{n} {op}" if n > 1 else op for op, n in counts.most_common(6))
        more = "" if len(counts) <= 6 else ", …"
        nodes = "".join(
            f"<li>{_text(node.op_type)} <code>{_text(node.name)}</code> "
            f"<small>{_text(', '.join(node.inputs))} → {_text(', '.join(node.outputs))}</small>"
            + (f"<em>{_text(node.reason)}</em>" if node.reason else "")
            + "</li>"
            for node in members
        )
        yield (
            f"<li class={kind}><details{' open' if kind == 'cpu' else ''}>"
            f"<summary><b>{labels[kind]}</b> {len(members)}: {_text(summary)}{more}</summary>"
            f"<ul>{nodes}</ul></details></li>"
        )


def _text(value: str) -> str:
    return html.escape(value.encode("utf-8", "backslashreplace").decode())


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:2rem}
.cards{display:flex;flex-wrap:wrap;gap:.6rem}.card{border:1px solid #d0d7de;border-radius:.4rem;padding:.5rem .9rem}
.card b{display:block;font-size:1.3rem}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d0d7de}
td{overflow-wrap:anywhere}td.kind{white-space:nowrap}
tr.compute td:first-child{border-left:4px solid #cf222e}tr.shape td:first-child{border-left:4px solid #bf8700}
ol#graph{list-style:none;padding:0}
ol#graph>li{margin:.2rem 0;border-left-width:.5rem;border-left-style:solid;padding:.2rem .8rem;background:#f6f8fa}
li.gpu{border-color:#1a7f37}li.cpu{border-color:#cf222e}li.copy{border-color:#8250df}li.unknown{border-color:#6e7781}
summary{cursor:pointer;overflow-wrap:anywhere}small{color:#57606a;overflow-wrap:anywhere}em{display:block;color:#cf222e}
"""
