"""The figures of ``ortgpu bench`` as a picture. Needs matplotlib, of the extra ``bench``."""

from __future__ import annotations

import contextlib
import html
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ortgpu.cli.bench.measuring import WAYS, Figure
from ortgpu.provider.settings import described
from ortgpu.session.chosen.layouts import LAYOUTS
from ortgpu.session.tuning.tuning import Trial

_BARS = (*WAYS, *LAYOUTS)


def draw(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Write the figures of a bench as .png, as .svg, or as an .html page with the SVG in it."""
    with _canvas(title, path, (10, 4.5)) as canvas:
        rate, latency = canvas.subplots(1, 2)
        rate.set(title="Items a second, with quartiles", xlabel="batch")
        _bars(rate, figures, [(each.rate.median, each.rate.low, each.rate.high) for each in figures])
        timed = [(each, each.latency) for each in figures if each.latency is not None]
        latency.set(title="Time of a request, median to 90th percentile", xlabel="batch", ylabel="ms")
        _bars(latency, [each for each, _ in timed], [(t.p50 * 1e3, t.p50 * 1e3, t.p90 * 1e3) for _, t in timed])


def draw_trials(trials: Sequence[Trial], title: str, path: Path) -> None:
    """Write the candidates of ``tune``, the fastest first, as :func:`draw` writes figures."""
    timed = sorted(((each.ratio, described(each.settings)) for each in trials if each.ratio is not None), reverse=True)
    with _canvas(title, path, (10, 1.5 + 0.3 * len(timed))) as canvas:
        axes = canvas.subplots()
        axes.set(title="Time relative to plain ONNX Runtime's")
        axes.barh([name for _, name in timed], [ratio for ratio, _ in timed])
        axes.axvline(1, color="black", linewidth=0.8)


@contextlib.contextmanager
def _canvas(title: str, path: Path, size: tuple[float, float]) -> Iterator[Canvas]:
    """Yield an empty picture, and write it at the end of the block."""
    # Not pyplot, which would look for a window system. Text stays text, so it can be found and copied. Formulas are
    # disabled, since a name may contain two dollar signs.
    with mpl.rc_context({"svg.fonttype": "none", "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # shown as boxes in a .png only
        title = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in title)
        canvas = Canvas(figsize=size, layout="constrained")
        canvas.suptitle(title)
        yield canvas
        if path.suffix.lower() != ".html":
            canvas.savefig(path, format=path.suffix.lower().removeprefix("."))
            return
        stream = io.StringIO()
        canvas.savefig(stream, format="svg")
        svg = stream.getvalue()
        svg = svg[svg.index("<svg") :]  # without the XML declaration, which is invalid inside a page
        name = html.escape(title)
        page = (
            f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{name}</title></head>"
            f"<body><h1>{name}</h1>{svg}</body></html>\n"
        )
        path.write_text(page, encoding="utf-8")


def _bars(axes: Axes, figures: Sequence[Figure], values: Sequence[tuple[float, float, float]]) -> None:
    """Draw a group of bars for each batch, with one bar for each way.

    A value is the height of the bar and the ends of its error line.
    """
    batches = list(dict.fromkeys(figure.batch for figure in figures))
    ways = [way for way in _BARS if any(figure.way == way for figure in figures)]
    width = 0.8 / max(len(ways), 1)
    for number, way in enumerate(ways):
        chosen = [(figure.batch, value) for figure, value in zip(figures, values, strict=True) if figure.way == way]
        places = [batches.index(batch) + (number - (len(ways) - 1) / 2) * width for batch, _ in chosen]
        heights = [height for _, (height, _, _) in chosen]
        below = [height - low for _, (height, low, _) in chosen]
        above = [high - height for _, (height, _, high) in chosen]
        colour = f"C{_BARS.index(way)}"  # the same in both pictures
        axes.bar(places, heights, width, yerr=[below, above], capsize=2, label=way, color=colour)
    axes.set_xticks(range(len(batches)), ["fixed" if batch is None else str(batch) for batch in batches])
    if ways:
        axes.legend()
