"""The plot of figures: what it shows, on any page and for a model of any name."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.cli.test_measuring import figure


@pytest.fixture
def needs_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib, which the extras bench and test bring")


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("suffix", [".png", ".svg", ".SVG"])
def test_plots(tmp_path: Path, suffix: str) -> None:
    from ortgpu.cli.figures.plot import draw

    path = tmp_path / f"figures{suffix}"
    draw(
        [figure("plain", 1, 100, None), figure("graph", 1, 140, 1.4), figure("pool", 8, 900, 2.0)], "<m> on a GPU", path
    )
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
        return
    text = path.read_text(encoding="utf-8")
    words = {(element.text or "").strip() for element in ElementTree.fromstring(text).iter()}
    assert {"graph", "pool", "batch 1", "batch 8", "1.40", "2.00", "<m> on a GPU"} <= words
    assert not {"run", "map", "plain"} & words


@pytest.mark.usefixtures("needs_matplotlib")
def test_plot_has_the_worst_on_top(tmp_path: Path) -> None:
    from ortgpu.cli.figures.plot import draw

    path = tmp_path / "figures.svg"
    draw([figure("map", 8, 250, 2.5), figure("run", 8, 200, 2.0), figure("pool", 8, 50, 0.5)], "m", path)
    words = [(element.text or "").strip() for element in ElementTree.parse(path).iter()]
    assert [word for word in words if word in ("map", "run", "pool")] == ["pool", "run", "map"]


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("page", ["#ffffff", "#000000", "#0d1117"])
def test_plot_reads_on_any_page(tmp_path: Path, page: str) -> None:
    """WCAG asks for a contrast of 3 between graphics and what is behind them."""
    from ortgpu.cli.figures.plot import FASTER, INK, SLOWER, draw

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in (INK, FASTER, SLOWER):
        darker, lighter = sorted((luminance(colour), luminance(page)))
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour
    path = tmp_path / "figures.svg"
    draw([figure("map", 8, 250, 2.5), figure("pool", 8, 50, 0.5)], "m", path)
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})(?!; opacity: 0)", path.read_text(encoding="utf-8")))
    assert drawn == {INK, FASTER, SLOWER}, "nothing else is drawn, and no background"


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("name", ["$\\frac$ 模型", "two\nlines\x1b[31m"], ids=["formula", "control"])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_of_a_model_with_any_name(tmp_path: Path, name: str, suffix: str) -> None:
    from ortgpu.cli.figures.plot import draw

    path = tmp_path / f"figures{suffix}"
    draw([figure("plain", 1, 100, None)], name, path)  # warnings are errors here
    if suffix == ".svg":
        words = {element.text for element in ElementTree.parse(path).iter()}
        assert name.replace("\n", "\ufffd").replace("\x1b", "\ufffd") in words
