"""Pictures of speed-ups over plain ONNX Runtime, and of GPU memory. They need matplotlib, of the extra ``bench``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from ortgpu.cli.figures.measuring import Figure, Spread
from ortgpu.provider.settings import described
from ortgpu.session.fitting import Fit, FitRow
from ortgpu.session.tuning.children import Trial

# These colours can be read on a white and on a dark page. The background is transparent.
INK, FASTER, SLOWER = "#808080", "#4c8fd0", "#d9662b"
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def draw(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Write the figures of a bench, a panel for each batch."""
    panels: dict[str, dict[str, Spread]] = {}
    for figure in figures:
        if figure.ratio is not None:
            panels.setdefault("fixed batch" if figure.batch is None else f"batch {figure.batch}", {})[figure.way] = (
                figure.ratio
            )
    draw_panels(panels, title, path)


def draw_trials(trials: Sequence[Trial], title: str, path: Path) -> None:
    """Write the measured candidates of ``tune``."""
    times = {described(trial.settings): 1 / trial.ratio for trial in trials if trial.ratio}
    draw_panels(
        {"all batches": {name: Spread(speed_up, speed_up, speed_up) for name, speed_up in times.items()}}, title, path
    )


def draw_panels(panels: Mapping[str, Mapping[str, Spread]], title: str, path: Path) -> None:
    """Write speed-ups by panel and name, the worst on top, as .png or as .svg."""
    with _axes_of(panels, title, path) as all_axes:
        for axes, rows in zip(all_axes, panels.values(), strict=True):
            for place, (label, times) in enumerate(sorted(rows.items(), key=lambda row: row[1].median)):
                ends = [[times.median - times.low], [times.high - times.median]]
                colour = FASTER if times.median >= 1 else SLOWER
                axes.barh(label, times.median, xerr=ends, color=colour, ecolor=INK)
                axes.annotate(f" {times.median:.2f}", (max(times.high, times.median), place), va="center")
            axes.axvline(1, color=INK, linewidth=1, linestyle="--")
        if all_axes:
            all_axes[-1].set_xlabel("speed-up over plain ONNX Runtime: above 1, ortgpu is faster")


def draw_fit(fit: Fit, path: Path) -> None:
    """Write the memory that ``ortgpu.fit`` measured, a panel for each model, with the first run and later runs."""
    panels: dict[str, dict[str, FitRow]] = {}
    for number, model in enumerate(fit.models, 1):
        rows = {
            f"feed {place}" if row.batch is None else f"batch {row.batch}": row for place, row in enumerate(model.rows)
        }
        name = Path(model.model).name
        panels[f"{number}. {name}" if len(fit.models) > 1 else name] = rows
    with _axes_of(panels, str(fit.device), path) as all_axes:
        for axes, rows in zip(all_axes, panels.values(), strict=True):
            for place, (label, row) in enumerate(rows.items()):
                peak, steady = ((size or 0) / (1 << 20) for size in (row.peak, row.steady))
                axes.barh(label, peak, color=SLOWER)
                axes.barh(label, steady, color=FASTER)
                text = f" {peak:,.0f}, later {steady:,.0f}" if row.peak is not None else " does not fit, or unknown"
                axes.annotate(text, (max(peak, steady), place), va="center")
        if all_axes:
            what = "host memory" if fit.on_cpu else "GPU memory beside CUDA's context"
            all_axes[-1].set_xlabel(f"MiB of {what}: the first run, and later runs")


@contextlib.contextmanager
def _axes_of(panels: Mapping[str, Mapping[str, object]], title: str, path: Path) -> Iterator[Sequence[Any]]:
    """Give axes for each panel, and write the picture at the end: as .png or as .svg."""
    # pyplot would look for a window system, so it is not used. Text stays text, so it can be searched and copied.
    # Formulas are disabled, since a name may contain two dollar signs. With the salt, the same figures make the same
    # file.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "ortgpu", "text.parse_math": False}
    settings.update(dict.fromkeys(_INKED, INK))
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # Only a .png shows boxes for them.
        title = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in title)
        sizes = [len(rows) + 1 for rows in panels.values()]
        canvas = Canvas(figsize=(8, 1 + 0.32 * sum(sizes)), layout="constrained")
        canvas.suptitle(title)
        all_axes: list[Any] = []
        if panels:
            all_axes += list(canvas.subplots(len(panels), sharex=True, squeeze=False, height_ratios=sizes)[:, 0])
        yield all_axes
        for axes, name in zip(all_axes, panels, strict=True):
            axes.invert_yaxis()
            axes.set_title(name, loc="left", fontsize="medium")
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.1)
        form = "png" if path.suffix.lower() == ".png" else "svg"
        canvas.savefig(path, format=form, transparent=True, metadata={"Date": None} if form == "svg" else None)
