"""The example of a container: its Dockerfile's steps in a fresh root, and the service in what they make."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import onnx.parser
import pytest

from tests.behaviour.test_examples import EXAMPLES, MODEL
from tests.behaviour.test_packaging import copied_to
from tests.behaviour.test_service import DEADLINE, free_port, served_by
from tests.lab import images

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CONVOLUTION = """
<ir_version: 8, opset_import: ["": 17]>
conv (float[1, 1, 8, 8] x) => (float[1, 1, 8, 8] y) <float[1, 1, 1, 1] w = {2}> { y = Conv(x, w) }
"""
# What most write: all of CUDA, and pip with the compiler that Debian recommends beside it.
USUAL = """
FROM debian:bookworm-slim
RUN apt-get update && apt-get install --yes python3-pip
COPY . /ortgpu
RUN pip install --break-system-packages '/ortgpu[cuda]' fastapi uvicorn
COPY model.onnx examples/service.py /service/
"""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `docker build` is given."""
    if reason := images.why_not_here():
        pytest.skip(reason)
    folder = copied_to(tmp_path_factory.mktemp("context"))
    (folder / "model.onnx").write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("images")
    yield made
    shutil.rmtree(made)  # gigabytes


@pytest.fixture(scope="module")
def image(context: Path, folder: Path) -> images.Stage:
    return images.build(EXAMPLES / "Dockerfile", context, folder)


def test_the_image_has_what_the_model_needs(image: images.Stage) -> None:
    """Without a GPU the cause is the driver. What other models need is told as such."""
    done = subprocess.run(image.arguments(image.command), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr
    assert "More: ortgpu explain driver-not-found" in done.stderr
    assert "this model's" not in done.stderr
    assert done.stderr.count("To fix it:") == 1


def test_the_image_serves(image: images.Stage, tmp_path: Path) -> None:
    port = free_port()
    command = image.arguments([*image.command, "--port", str(port)], {"ORTGPU_ALLOW_CPU": "1"})
    with served_by(command, port, tmp_path, {"PATH": images.PATH}) as service:
        service.wait_for(lambda: service.ask("/readyz")[0] == 200, 4 * DEADLINE)
        assert service.ask("/predict", [[-1, 2, -3, 4]]) == (200, [[0, 2, 0, 4]])


def test_the_build_ends_where_the_model_needs_more(image: images.Stage, folder: Path) -> None:
    (folder / "build" / "service" / "model.onnx").write_bytes(onnx.parser.parse_model(CONVOLUTION).SerializeToString())
    stage = images.Stage(folder / "build", "debian:bookworm-slim")
    (step,) = re.findall(
        r"^RUN (.* /service/check_libraries\.py .*)$", (EXAMPLES / "Dockerfile").read_text(), re.MULTILINE
    )
    done = subprocess.run(stage.arguments(step.split()), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "pip install 'nvidia-cudnn-cu13" in done.stdout
    assert "nvidia-cufft" not in done.stdout


def test_the_page_says_how_large_images_are(image: images.Stage, context: Path, folder: Path) -> None:
    page = (EXAMPLES / "CONTAINER.md").read_text(encoding="utf-8")
    small, large = (float(each) for each in re.findall(r"^\|.*\| (\d\.\d) GB \|$", page, re.MULTILINE))
    (folder / "Dockerfile").write_text(USUAL, encoding="utf-8")
    (folder / "usual").mkdir()
    usual = images.build(folder / "Dockerfile", context, folder / "usual")
    assert image.size() / 1e9 == pytest.approx(small, rel=0.15)
    assert usual.size() / 1e9 == pytest.approx(large, rel=0.15)
