"""Releases of ONNX Runtime as they are published, each in an environment of its own with the CUDA libraries that this
library's catalogue names for it: old layouts and new ones, cuDNN 8 and 9, CUDA 11 to 13.

On demand, since an environment has about 3 GB: ``pytest -m matrix``. Environments are kept in ORTGPU_MATRIX_FOLDER, or
the user's cache folder, and used again while what has to be in them is the same. tests/README.md records a run.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from ortgpu.environment.libraries.catalogue import LIBRARIES
from tests.lab import GPU, NVML, Cuda, Machine, Outcome, Overlay, Problem, Stubs
from tests.lab.environments import install
from tests.lab.models import Models
from tests.support.children import Child
from tests.support.release_programs import (
    fail_inside_a_provider,
    load_libraries,
    open_provider,
    raise_without_driver,
    use_on_cpu,
    use_under_guard,
    use_with_many_feeds,
)
from tests.support.releases import OLDEST, RELEASES, TOO_OLD, Release, StubsForOlderReleases, shortened

# An environment is downloaded and unpacked in the setup of its first test.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]

H200 = GPU(uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", capability=(9, 0))


@dataclass(frozen=True)
class Environment:
    """A release, installed."""

    release: Release
    site: Path


@pytest.fixture(scope="session", params=RELEASES, ids=str)
def environment(request: pytest.FixtureRequest) -> Environment:
    release: Release = request.param
    return Environment(release, install(release.version, release.requirements))


@pytest.fixture(scope="session")
def driver(stubs: Stubs, tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    return StubsForOlderReleases(tmp_path_factory.mktemp("stubs-for-older-releases"))


@pytest.fixture
def machine(environment: Environment, tmp_path: Path, driver: Stubs) -> Machine:
    """The release on a machine with neither driver nor GPU, and nothing else of CUDA than its own wheels."""
    overlay = Overlay(tmp_path / "environment", environment.site)
    if not environment.release.imports_alone:
        # Its search path names a toolkit that this machine may have, and the lab does not hide what that leads to.
        module = overlay.path("onnxruntime/capi/onnxruntime_pybind11_state*.so")
        content = module.read_bytes().replace(b"/usr/local/cuda-", b"/nonexistent/ab-")
        overlay.replace(module.relative_to(overlay.site).as_posix(), content)
    return Machine(overlay, driver)


@pytest.fixture
def release(environment: Environment) -> Release:
    return environment.release


def run(machine: Machine, function: Callable[..., object], *arguments: object) -> Child:
    """Call a function of release_programs.py in a child. Its globals are those of ``tests/lab/probe.py``."""
    return machine.run(f"{inspect.getsource(function)}\nreport({function.__name__}(*{arguments!r}))").ok()


def refusal(outcome: Outcome, kind: str) -> Problem:
    """The error that a session was refused with; ONNX Runtime itself must not have said anything."""
    assert outcome.result.returncode == 0, outcome.result.output
    assert outcome.error is not None, f"a session on {outcome.providers}"
    assert outcome.error.type == kind, outcome.error.text
    assert outcome.result.stdout == ""
    assert not outcome.warnings
    return outcome.error


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = relu(x @ [[1, 0], [0, -1]]), in a form that every one of these releases reads."""
    path = tmp_path_factory.mktemp("models") / "tiny.onnx"
    path.write_bytes(tiny_model([1, 0, 0, -1]))
    return path


def tiny_model(weight: list[float]) -> bytes:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Relu", ["z"], ["y"])],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor("w", TensorProto.FLOAT, [2, 2], weight)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def test_every_library_is_loaded_from_the_wheels_that_the_catalogue_names(release: Release, machine: Machine) -> None:
    seen = run(machine, load_libraries).json
    assert seen["problem"] is None
    assert seen["cuda"] == release.cuda
    assert {soname for soname in seen["needed"] if soname.startswith(("libcu", "libnv"))} == {
        *release.linked,
        *(["libcuda.so.1"] if release.links_driver else []),
    }
    assert seen["missing"] == []
    assert seen["ok"]
    assert {soname for soname, library in seen["libraries"].items() if library["required"]} == set(release.linked)
    assert {*release.opened, *release.parts_of_cudnn} <= set(seen["libraries"])
    assert seen["cudnn_cuda_major"] == release.cuda
    assert seen["driver_missing"]

    # From these wheels and nowhere else, as the report has it and as the kernel does.
    wheels = f"{machine.overlay.site}/nvidia"
    assert seen["roots"] == [wheels]
    for soname, library in seen["libraries"].items():
        assert library["source"] == "nvidia wheels"
        assert library["path"].startswith(wheels)
        assert os.path.basename(library["path"]) == soname
    inside = (wheels, os.path.realpath(machine.overlay.source / "nvidia"))  # links may have been followed
    assert {os.path.basename(path) for path in seen["mapped"]} >= set(seen["libraries"])
    assert [path for path in seen["mapped"] if not path.startswith(inside)] == []
    assert seen["imported"] == []


def test_every_part_of_cudnn_is_known(release: Release, machine: Machine) -> None:
    """With a driver, which one part links; but for those that ONNX Runtime has no use for."""
    present = {path.name for path in machine.overlay.site.glob("nvidia/cudnn/lib/libcudnn*.so.*")}
    useless = {name for name in present if "_train" in name}
    loaded = run(machine.but(cuda=Cuda(init=100)), load_libraries).json["libraries"]
    assert {soname for soname in loaded if soname.startswith("libcudnn")} == present - useless


def test_the_provider_opens(release: Release, machine: Machine) -> None:
    """What no list can promise: the real file finds everything that it links. All get a driver, since 1.18.1 and 1.22.0
    do not link one and die without it nevertheless (see OLDER_DRIVER)."""
    assert run(machine.but(cuda=Cuda(init=100)), open_provider).json is None
    if release.links_driver:
        assert "libcuda.so.1: cannot open shared object file" in run(machine, open_provider).json


def test_what_is_missing_is_the_driver_and_nothing_else(release: Release, machine: Machine, tiny: Path) -> None:
    error = refusal(machine.open_session(tiny), "DriverNotFoundError")
    assert error.others == ()
    assert not any(soname in error.text for soname in (*release.linked, *release.opened)), error.text
    assert "pip" not in error.text
    seen = run(machine, raise_without_driver, tiny.read_bytes()).json
    assert seen["type"] == "DriverNotFoundError"
    assert seen["others"] == []
    assert seen["text"].startswith("the NVIDIA driver's library libcuda.so.1 cannot be loaded")
    assert "libcublas" not in seen["text"]


def test_the_record_is_what_happens(release: Release, machine: Machine, tiny: Path) -> None:
    """The table in tests/README.md: what is loaded from the wheels, and what a session says."""
    loaded = run(machine, load_libraries).json["libraries"]
    parts = {soname for soname in loaded if soname.startswith("libcudnn_")}
    linked = [soname for soname in loaded if loaded[soname]["required"]]
    opened = [soname for soname in loaded if not loaded[soname]["required"] and soname not in parts]
    outcome = machine.open_session(tiny)
    row = [
        release.version,
        str(release.cuda),
        release.cudnn.rpartition(".")[2],
        " ".join(map(shortened, linked)),
        " ".join(map(shortened, opened)) + (", parts of cuDNN" if parts else ""),
        outcome.error.type if outcome.error else str(outcome.providers),
    ]
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(row)} |" in text.splitlines()


def test_a_driver_without_a_device(machine: Machine, tiny: Path) -> None:
    for nvml in (None, NVML(gpus=())):
        outcome = machine.but(cuda=Cuda(init=100), nvml=nvml).open_session(tiny)
        assert refusal(outcome, "NoDeviceError").others == ()


def test_a_driver_of_the_cuda_before(release: Release, machine: Machine, tiny: Path) -> None:
    version, driver = TOO_OLD[release.cuda]
    for nvml in (None, NVML(gpus=(H200,), driver=driver, cuda=version)):
        outcome = machine.but(cuda=Cuda(version=version, devices=(H200,)), nvml=nvml).open_session(tiny)
        error = refusal(outcome, "DriverTooOldError")
        assert error.others == ()
        assert error.details["needed_cuda"] == [release.cuda, 0]
        assert error.details["driver_cuda"] == [version // 1000, version % 1000 // 10]
        assert error.details["driver_version"] == (driver if nvml else None)


def test_the_oldest_driver_that_serves_is_not_called_too_old(release: Release, machine: Machine, tiny: Path) -> None:
    """It gets as far as the CUDA runtime, which takes no driver but NVIDIA's own, and stops at failure 500."""
    version, driver = OLDEST[release.cuda]
    nvml = NVML(gpus=(H200,), driver=driver, cuda=version)
    outcome = machine.but(cuda=Cuda(version=version, devices=(H200,)), nvml=nvml).open_session(tiny)
    error = refusal(outcome, "DriverUnusableError")
    assert error.details["cuda_code"] == 500
    assert error.others == ()


def test_on_the_cpu_everything_works(release: Release, machine: Machine, tiny: Path) -> None:
    result = run(machine, use_on_cpu, str(tiny), tiny.read_bytes())
    closed = result.json.pop("closed")
    assert result.json == {
        "providers": ["CPUExecutionProvider"],
        "device": "cpu",
        "placed": {"CPUExecutionProvider": 2} if release.places else None,
        "fallback": False,
        "is a session": True,
        "names": ["x", "y"],
        "metadata": "tiny",
        "options kept": 2,
        "run": True,
        "run with options": True,
        "run with values": True,
        "run with binding": True,
        "run in background": True,
        "refused": {"enable_fallback": True, "set_providers": True},
        "closed means freed": True,
        "from a path": True,
        "closed on leaving": True,
    }
    assert {name: text.split("\n")[0] for name, text in closed.items()} == dict.fromkeys(
        closed, "ExecutionError: this GPUSession is closed"
    )
    assert result.stdout == ""


def test_many_feeds_and_arrays_of_other_libraries(release: Release, machine: Machine, tiny: Path) -> None:
    seen = run(machine, use_with_many_feeds, tiny.read_bytes()).json
    assert seen["mapped"] == [True] * 20
    if release.version == "1.18.1":  # it came between this release and the next of these
        assert seen["foreign"] == "input 'x' is a Foreign, and the installed ONNX Runtime takes NumPy arrays only"
    else:
        assert seen["foreign"] is True
    assert seen["chosen"] == {}
    assert seen["staged"] is True
    assert seen["pinned"] == 0
    assert "bytes cannot be pinned: CUDA failure " in seen["why not"]


def test_the_cpu_is_taken_with_a_warning_that_carries_the_cause(machine: Machine, tiny: Path) -> None:
    outcome = machine.open_session(tiny, allow_cpu=True)
    assert outcome.error is None, outcome.error.text
    assert outcome.providers == ("CPUExecutionProvider",)
    assert [(warned.type, warned.error and warned.error.type) for warned in outcome.warnings] == [
        ("CPUExecutionWarning", "DriverNotFoundError")
    ]


def test_a_failure_inside_a_provider_is_raised_and_not_retried(machine: Machine, tiny: Path) -> None:
    result = run(machine, fail_inside_a_provider, tiny.read_bytes())
    assert result.json["type"] in ("EPFail", "ProviderFailureError"), result.json
    assert "made by the test" in result.json["text"]
    assert result.stdout == "", "ONNX Runtime prints that it falls back"


def remove(overlay: Overlay, pattern: str) -> None:
    overlay.remove(pattern)


def truncate(overlay: Overlay, pattern: str) -> None:
    """As an interrupted download leaves a file: whoever opens it dies of SIGBUS."""
    overlay.truncate(pattern, overlay.path(pattern).stat().st_size // 2)


def each(names: Callable[[Release], Iterable[str]]) -> pytest.MarkDecorator:
    """Parametrize by release and name."""
    pairs = [pytest.param(release, name, id=f"{release}-{name}") for release in RELEASES for name in names(release)]
    return pytest.mark.parametrize(("environment", "soname"), pairs, indirect=["environment"])


@pytest.mark.parametrize("damage", [remove, truncate])
@each(lambda release: release.linked)
def test_a_linked_library_that_is_gone_or_damaged_is_named(
    release: Release, machine: Machine, tiny: Path, soname: str, damage: Callable[[Overlay, str], None]
) -> None:
    damage(machine.overlay, f"nvidia/*/lib/{soname}")
    error = refusal(machine.open_session(tiny), "LibraryNotFoundError")
    assert error.details["missing"] == [soname], "what cannot be opened without it is not missing"
    assert error.other_types == ("DriverNotFoundError",)
    wheel = next(spec.wheels[release.cuda] for spec in LIBRARIES if soname.startswith(f"{spec.stem}.so."))
    assert any(wheel.split("~")[0] in fix for fix in error.fixes)


@pytest.mark.parametrize("damage", [remove, truncate])
@each(lambda release: release.parts_of_cudnn)
def test_a_part_of_cudnn_that_is_gone_or_damaged_is_named_where_it_is_needed(
    machine: Machine, models: Models, soname: str, damage: Callable[[Overlay, str], None]
) -> None:
    """With a driver: then everything is opened. cuDNN aborts the process that asks it for a part that is not there."""
    damage(machine.overlay, f"nvidia/cudnn/lib/{soname}")
    error = refusal(machine.but(cuda=Cuda(init=100)).open_session(models.conv), "LibraryNotFoundError")
    assert soname in error.details["missing"]
    assert any("nvidia-cudnn-cu" in fix for fix in error.fixes)


@each(lambda release: {release.cudnn} & set(release.opened))
def test_a_library_that_is_opened_at_need_is_named_where_it_is_needed(
    machine: Machine, tiny: Path, models: Models, soname: str
) -> None:
    """Where cuDNN is linked, it is one of the cases above."""
    machine.overlay.remove(f"nvidia/*/lib/{soname}")
    error = refusal(machine.open_session(models.conv), "LibraryNotFoundError")
    assert error.details["missing"] == [soname]
    refusal(machine.open_session(tiny), "DriverNotFoundError")


def test_the_import_needs_this_library_only_where_it_is_known_to(
    release: Release, machine: Machine, tiny: Path
) -> None:
    """1.27.0 links the CUDA runtime into its Python module: preload_dlls(), which is in it, comes too late."""
    plain = machine.run("import onnxruntime")
    assert (plain.returncode == 0) == release.imports_alone, plain.output
    if not release.imports_alone:
        assert "libcudart.so.13: cannot open shared object file" in plain.stderr
    refusal(machine.open_session(tiny), "DriverNotFoundError")
    assert machine.open_session(tiny, allow_cpu=True).providers == ("CPUExecutionProvider",)


@pytest.mark.parametrize("installed_first", [True, False])
def test_sessions_of_others_are_guarded(machine: Machine, tiny: Path, installed_first: bool) -> None:
    seen = run(machine, use_under_guard, tiny.read_bytes(), installed_first).json
    error = "DriverNotFoundError"
    assert seen == {
        "plain": error,
        "subclass": error,
        "set_providers": error,
        "sessions": [["cpu", "CPUExecutionProvider"]],
        "runs": [[1.0, 0.0]],
        "restored": True,
    }
