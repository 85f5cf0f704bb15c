"""What a GPU refuses when a session is opened: full memory, a graph that cannot be captured, an absent library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.children import child_environment
from tests.support.this_machine import overlay, without_cuda_variables

from .children import RaisedError, Report, run_program
from .libraries import cuda_major, hidden_from_the_loader, toolkit
from .plugin import built_in_only

pytestmark = pytest.mark.ortgpu

# MiB that another process leaves free: less than a CUDA context takes, about one, and some that hold a context but not
# all of cuBLAS and cuDNN
LEFT = (64, 400, 560, 640, 800)
CUFFT = {"12": "libcufft.so.11", "13": "libcufft.so.12"}  # CUDA 12.x and 13.x, by their release notes


@pytest.fixture(scope="module")
def full(conv: Path) -> Report:
    return run_program("memory_is_full", {"model": conv, "left": LEFT}, deadline=200)


@pytest.mark.parametrize("left", LEFT)
def test_full_memory_is_named_or_the_session_runs(full: Report, left: int) -> None:
    child = full[f"{left} MiB left: child"]
    assert child["returncode"] == 0, child["stderr"]
    outcome: dict[str, Any] = full[f"{left} MiB left"]
    if "error" in outcome:
        error = RaisedError(**outcome["error"])
        # while the session is being opened, or at its first run, which is when cuDNN takes its workspace
        assert error.type in ("InsufficientDeviceMemoryError", "GPUOutOfMemoryError"), error.text
        assert error.fields["free"] is None or error.fields["free"] < error.fields["total"]
    else:
        assert outcome["returned"]


def test_less_than_a_context_takes_is_refused(full: Report) -> None:
    assert full.error(f"{LEFT[0]} MiB left").type == "InsufficientDeviceMemoryError"


@pytest.fixture(scope="module")
def graphs() -> Report:
    return run_program("cuda_graphs")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("island", "PlacementError", "GlobalLpPool 'island'"),
        pytest.param("control flow", "ProviderRequestError", "control flow, If", marks=built_in_only),
    ],
)
def test_a_graph_that_cannot_be_captured_is_refused(graphs: Report, name: str, kind: str, words: str) -> None:
    error = graphs.error(name)
    assert error.type == kind
    assert words in error.text


def test_a_graph_on_cuda_alone_is_captured_and_replayed(graphs: Report) -> None:
    assert graphs.returned("all on CUDA") == [[0, 2], [-1, 2], [-2, 2]]


def test_a_transform_is_computed() -> None:
    first, rest = run_program("transform").returned("spectrum")
    assert first == pytest.approx(8)
    assert rest == pytest.approx(0, abs=1e-5)


@pytest.fixture(scope="module")
def without_cufft(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The toolkit of this host without cuFFT, in a process that sees no wheels of NVIDIA."""
    folder = tmp_path_factory.mktemp("without-cufft")
    _, libraries = toolkit()
    (folder / "cuda" / "lib64").mkdir(parents=True)
    for entry in libraries.iterdir():
        if not entry.name.startswith("libcufft"):
            (folder / "cuda" / "lib64" / entry.name).symlink_to(entry)
    changes = {**without_cuda_variables(), "CUDA_HOME": str(folder / "cuda")}
    env = child_environment(changes, python_path=[overlay(folder / "packages", nvidia="none")])
    before = hidden_from_the_loader(CUFFT[cuda_major()], env)
    return run_program("transform", env=env, before=before, interpreter=["-S"])


def test_a_transform_without_cufft_is_refused(without_cufft: Report) -> None:
    error = without_cufft.error("spectrum")
    assert error.type == "LibraryNotFoundError"
    assert CUFFT[cuda_major()] in error.fields["missing"]
    assert without_cufft["libraries"].get("libcufft") is None


def test_other_models_need_no_cufft(without_cufft: Report) -> None:
    assert without_cufft.returned("negation") == [-1, 2]


def test_what_stands_in_the_way_of_one_process_alone(mlp: Path) -> None:
    error = run_program("left_in_this_process", {"model": mlp}).error("session")
    assert error.type == "ProviderFallbackError"
    assert "run `ortgpu doctor`" in error.text
    assert "restart this process" in error.text
