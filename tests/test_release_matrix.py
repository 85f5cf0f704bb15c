"""Releases of ONNX Runtime as they are published, each in an environment of its own with the CUDA libraries that this
library's catalogue names for it: old layouts and new ones, cuDNN 8 and 9, CUDA 11 to 13.

On demand, since an environment has about 3 GB: ``pytest -m matrix``. Environments are kept in ORTGPU_MATRIX_FOLDER, or
the user's cache folder, and used again while what has to be in them is the same. tests/README.md records a run.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from ortgpu.environment.catalogue import CUDNN_CORE_PARTS, LIBRARIES
from tests.lab import GPU, NVML, ChildResult, Cuda, Machine, Outcome, Overlay, Problem, Stubs
from tests.lab.environments import install
from tests.lab.models import Models
from tests.lab.stubs import SOURCES

# An environment is downloaded and unpacked in the setup of its first test.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Release:
    """A release, and what ``readelf -d`` says of its provider: the library under test reads files by its own means.

    Attributes:
        linked: the CUDA libraries that the provider links, in the order of the file.
        opened: those that it opens at need, of those that a model can need.
        links_driver: whether it links libcuda.so.1, so that it cannot be opened where there is no driver.
        imports_alone: whether ``import onnxruntime`` works without CUDA libraries in the process.
        places: whether it can tell which node is placed where.
    """

    version: str
    cuda: int
    linked: tuple[str, ...]
    opened: tuple[str, ...] = ()
    links_driver: bool = False
    imports_alone: bool = True
    places: bool = False

    def __str__(self) -> str:
        return self.version

    @property
    def cudnn(self) -> str:
        return next(soname for soname in (*self.linked, *self.opened) if soname.startswith("libcudnn.so"))

    @property
    def parts_of_cudnn(self) -> tuple[str, ...]:
        """Those that the first convolution opens."""
        major = int(self.cudnn.rpartition(".")[2])
        return tuple(f"{stem}.so.{major}" for stem in CUDNN_CORE_PARTS[major])

    @property
    def requirements(self) -> list[str]:
        """What pip is asked for. The wheels are the catalogue's, so that what errors advise is what is tested.

        Nothing that only the command line uses is among them: a session must do without.
        """
        wheels = dict.fromkeys(spec.wheels[self.cuda] for spec in LIBRARIES if self.cuda in spec.wheels)
        return [f"onnxruntime-gpu=={self.version}", *wheels, "nvidia-ml-py", "onnx", "numpy"]


def sonames(*names: str) -> tuple[str, ...]:
    """``cublas.12`` is libcublas.so.12."""
    return tuple("lib{}.so.{}".format(*name.split(".", 1)) for name in names)


def shortened(soname: str) -> str:
    return soname.removeprefix("lib").replace(".so", "", 1)


RELEASES = (
    Release("1.18.1", 11, sonames("cublasLt.11", "cublas.11", "cudnn.8", "curand.10", "cufft.10", "cudart.11.0")),
    Release(
        "1.22.0",
        12,
        sonames("cublasLt.12", "cublas.12", "cudnn.9", "curand.10", "cufft.11", "cudart.12", "nvrtc.12"),
    ),
    Release(
        "1.26.0",
        12,
        sonames("cublasLt.12", "cublas.12", "cudnn.9", "curand.10", "cufft.11", "cudart.12"),
        places=True,
    ),
    Release(
        "1.27.0",
        13,
        sonames("cublasLt.13", "cublas.13", "curand.10", "cufft.12", "cudart.13", "nvrtc.13", "cudnn.9"),
        links_driver=True,
        imports_alone=False,
        places=True,
    ),
    Release(
        "1.31.1",
        13,
        sonames("cublasLt.13", "cublas.13", "curand.10", "cudart.13"),
        opened=sonames("cudnn.9", "cufft.12"),
        links_driver=True,
        places=True,
    ),
)

H200 = GPU(uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", capability=(9, 0))

# By CUDA major: what a driver of the major before says of itself, and the fewest that a driver must have. Every driver
# of a major serves every runtime of it: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility".
TOO_OLD = {11: (10020, "440.33.01"), 12: (11080, "520.61.05"), 13: (12080, "570.86.15")}
OLDEST = {11: (11000, "450.80.02"), 12: (12000, "525.60.13"), 13: (13000, "580.65.06")}


@dataclass(frozen=True)
class Environment:
    """A release, installed."""

    release: Release
    site: Path


@pytest.fixture(scope="session", params=RELEASES, ids=str)
def environment(request: pytest.FixtureRequest) -> Environment:
    release: Release = request.param
    return Environment(release, install(release.version, release.requirements))


OLDER_DRIVER = """
#define cuGetProcAddress stub_for_cuda_11
#define cuGetProcAddress_v2 stub_for_cuda_12
#include "libcuda_stub.c"
#undef cuGetProcAddress
#undef cuGetProcAddress_v2

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    return stub_for_cuda_12(symbol, function, version, flags, status);
}

/* The runtime of CUDA 11 asks for this one by name, and takes what it gets for a function of four arguments. */
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    int result = stub_for_cuda_11(symbol, function, version, flags);
    if (version < 12000 && !strcmp(symbol, "cuGetProcAddress")) *function = (void *)cuGetProcAddress;
    return result;
}

/* Looked up by 1.18.1 and 1.22.0 while the provider is being loaded. Where one is missing, or libcuda.so.1 is, they die
 * of SIGSEGV: they throw before the library has what their exceptions need (onnxruntime issue 24652). */
int cuFuncSetAttribute(void) { return NOT_SUPPORTED; }
int cuFuncSetCacheConfig(void) { return NOT_SUPPORTED; }
int cuLaunchCooperativeKernel(void) { return NOT_SUPPORTED; }
int cuLaunchKernel(void) { return NOT_SUPPORTED; }
int cuLinkAddData_v2(void) { return NOT_SUPPORTED; }
int cuLinkAddFile_v2(void) { return NOT_SUPPORTED; }
int cuLinkComplete(void) { return NOT_SUPPORTED; }
int cuLinkCreate_v2(void) { return NOT_SUPPORTED; }
int cuLinkDestroy(void) { return NOT_SUPPORTED; }
"""


class StubsForOlderReleases(Stubs):
    """The lab's driver, and what older providers and runtimes want of one."""

    @functools.cached_property
    def cuda(self) -> Path:
        source = self.folder / "libcuda_for_older_releases.c"
        source.write_text(OLDER_DRIVER, encoding="utf-8")
        return self._build(str(source), "cuda/libcuda.so.1", "-Wl,-soname,libcuda.so.1", f"-I{SOURCES}")


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


def run(machine: Machine, function: Callable[..., object], *arguments: object) -> ChildResult:
    """Call a function of this file in a child. Its globals are those of ``tests/lab/probe.py``, not of this file."""
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


# What runs in children: the source of a function is passed on, so each imports what it uses.


def load_libraries() -> dict[str, Any]:
    import os
    import re
    import sys

    import ortgpu

    found = ortgpu.preload()
    assert found.provider is not None
    with open("/proc/self/maps", encoding="utf-8") as file:
        mapped = {line.split(None, 5)[5].strip() for line in file if "/" in line}
    return {
        "problem": found.provider.problem,
        "cuda": found.provider.cuda_major,
        "needed": found.provider.needed,
        "ok": found.ok,
        "libraries": {
            lib.soname: {"path": lib.path, "source": lib.source, "required": lib.required} for lib in found.libraries
        },
        "missing": [(lib.soname, [(file.path, file.problem) for file in lib.rejected]) for lib in found.missing],
        "roots": found.roots,
        "cudnn_cuda_major": found.cudnn_cuda_major,
        "driver_missing": found.driver_missing,
        "mapped": sorted(path for path in mapped if re.match(r"lib(cu|nv)", os.path.basename(path))),
        "imported": sorted({"onnxruntime", "onnx", "rich", "click"} & set(sys.modules)),
    }


def open_provider() -> str | None:
    """What the loader says of the provider file, once its libraries are loaded."""
    from ortgpu.preloading import preload, why_provider_does_not_load

    provider = preload().provider
    import onnxruntime as onnxruntime  # 1.27.0 needs what was loaded, and every provider needs it

    assert provider is not None
    return why_provider_does_not_load(provider)


def raise_without_driver(model: bytes) -> dict[str, Any]:
    """The error as a program sees it that has the model in memory."""
    from ortgpu import GPUSession
    from ortgpu.errors import GPUError

    try:
        GPUSession(model)
    except GPUError as error:
        return {"type": type(error).__name__, "text": str(error), "others": [str(other) for other in error.others]}
    return {"type": None}


def use_on_cpu(path: str, model: bytes) -> dict[str, Any]:
    """Everything that a session does which is not about the GPU."""
    import gc
    import pathlib
    import queue
    import warnings
    import weakref

    import numpy

    from ortgpu import GPUSession
    from ortgpu.errors import CPUExecutionWarning, ExecutionError, ProviderRequestError

    warnings.simplefilter("ignore", CPUExecutionWarning)
    import onnxruntime  # 1.27.0 can be imported since ortgpu has loaded what it links

    x = numpy.array([[1, 2], [-3, 4]], dtype=numpy.float32)
    y = numpy.maximum(x @ numpy.array([[1, 0], [0, -1]], dtype=numpy.float32), 0)
    seen: dict[str, Any] = {}

    def same(outputs: Any) -> bool:
        return bool(numpy.array_equal(outputs[0], y))

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = GPUSession(model, options, disabled_optimizers=["ConstantFolding"], allow_cpu=True)
    seen["providers"] = session.get_providers()
    seen["device"] = str(session.device)
    seen["placed"] = session.placement.by_provider if session.placement.known else None
    seen["fallback"] = session._enable_fallback
    seen["is a session"] = isinstance(session, onnxruntime.InferenceSession)
    seen["names"] = [node.name for node in (*session.get_inputs(), *session.get_outputs())]
    seen["metadata"] = session.get_modelmeta().graph_name
    seen["options kept"] = session.get_session_options().intra_op_num_threads
    seen["run"] = same(session.run(None, {"x": x}))
    seen["run with options"] = same(session.run(["y"], {"x": x}, onnxruntime.RunOptions()))
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    seen["run with values"] = same([result.numpy() for result in session.run_with_ort_values(["y"], {"x": value})])
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    seen["run with binding"] = same(binding.copy_outputs_to_cpu())
    results: queue.Queue[Any] = queue.Queue()
    session.run_async(["y"], {"x": x}, lambda outputs, *_: results.put(outputs), None)
    seen["run in background"] = same(results.get(timeout=20))

    seen["refused"] = {}
    for name in ("enable_fallback", "set_providers"):
        try:
            getattr(session, name)()
        except ProviderRequestError:
            seen["refused"][name] = True

    del binding, value
    native = weakref.ref(session._sess)
    session.close()
    session.close()
    gc.collect()
    seen["closed means freed"] = native() is None
    seen["closed"] = {}
    uses = {
        "run": lambda: session.run(None, {"x": x}),
        "run_with_ort_values": lambda: session.run_with_ort_values(["y"], {}),
        "run_async": lambda: session.run_async(["y"], {"x": x}, print, None),
        "run_with_iobinding": lambda: session.run_with_iobinding(session.io_binding()),
        "io_binding": session.io_binding,
        "get_inputs": lambda: list(session.get_inputs()),
        "get_outputs": lambda: session.get_outputs()[0],
        "get_modelmeta": lambda: session.get_modelmeta().graph_name,
        "end_profiling": session.end_profiling,
        "get_profiling_start_time_ns": lambda: session.get_profiling_start_time_ns() + 0,
    }
    for name, use in uses.items():
        try:
            use()
        except Exception as error:  # noqa: BLE001 - which one is what the test asks about
            seen["closed"][name] = f"{type(error).__name__}: {error}"
        else:
            seen["closed"][name] = "works"

    with GPUSession(pathlib.Path(path), allow_cpu=True) as from_path:
        seen["from a path"] = same(from_path.run(None, {"x": x}))
    try:
        from_path.run(None, {"x": x})
    except ExecutionError:
        seen["closed on leaving"] = True
    return seen


def fail_inside_a_provider(model: bytes) -> dict[str, Any]:
    """A run that fails the way after which ONNX Runtime builds a session anew on the CPU."""
    import warnings

    from ortgpu import GPUSession
    from ortgpu.devices import Device
    from ortgpu.errors import CPUExecutionWarning

    warnings.simplefilter("ignore", CPUExecutionWarning)
    from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

    class Failing:
        """The session's own, until it runs."""

        def __init__(self, real: object) -> None:
            self.real = real

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

        def run(self, *_: object) -> None:
            raise EPFail("[ONNXRuntimeError] : 11 : EP_FAIL : made by the test")

    session = GPUSession(model, allow_cpu=True)
    session.device = Device("cuda", 0, None, None, None, None, None)
    session._sess = Failing(session._sess)
    try:
        session.run(None, {"x": [[0.0, 0.0]]})
    except Exception as error:  # noqa: BLE001 - which one is what the test asks about
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": None}


def use_with_many_feeds(model: bytes) -> dict[str, Any]:
    import logging
    import warnings

    import numpy as np

    import ortgpu
    from ortgpu.cudart import CudaRuntime
    from ortgpu.errors import CPUExecutionWarning, GPUError
    from ortgpu.pinned import PinnedMemory

    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self) -> object:
            return feeds[3]["x"].__dlpack__()

    warnings.simplefilter("ignore", CPUExecutionWarning)
    seen: dict[str, Any] = {}
    with ortgpu.GPUSession(model, allow_cpu=True, cuda_graph=True) as session:
        feeds = [{"x": np.full((5000, 2), number, np.float32)} for number in range(20)]
        expected = [session.run(None, feed)[0] for feed in feeds]
        mapped = list(session.map(iter(feeds), in_flight=3))
        seen["mapped"] = [bool((got[0] == right).all()) for got, right in zip(mapped, expected, strict=True)]
        try:
            seen["foreign"] = bool((session.run(None, {"x": Foreign()})[0] == expected[3]).all())
        except GPUError as error:
            seen["foreign"] = error.summary
        seen["chosen"] = session.options_chosen

    # The runtime that the provider would use, without a driver: it refuses, and ordinary memory takes the place
    messages: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("ortgpu").setLevel(logging.DEBUG)
    logging.getLogger("ortgpu").addHandler(Noting())
    path = ortgpu.preload().path_of("libcudart")
    assert path is not None
    memory = PinnedMemory(CudaRuntime(path, 0), 1 << 30)
    seen["staged"] = memory.staged(feeds[0])["x"] is feeds[0]["x"] and memory.empty(3).shape == (3,)
    seen["pinned"] = memory.bytes_pinned
    seen["why not"] = messages[-1]
    return seen


def use_under_guard(model: bytes, installed_first: bool) -> dict[str, Any]:
    """Sessions that somebody else makes; 1.27.0 cannot even be imported unless something loads what it links."""
    import sys

    import ortgpu

    if installed_first:
        ortgpu.install()
    else:
        ortgpu.preload()
    import onnxruntime
    from onnxruntime import InferenceSession

    class Subclass(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
        def __init__(self, content: bytes) -> None:
            super().__init__(content, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])

    before = onnxruntime.InferenceSession.__init__
    finders = list(sys.meta_path)
    seen: dict[str, Any] = {}
    with ortgpu.enforce():
        makers: dict[str, Any] = {"plain": InferenceSession, "subclass": Subclass}
        for name, make in makers.items():
            try:
                seen[name] = make(model).get_providers()
            except Exception as error:  # noqa: BLE001 - which one is what the test asks about
                seen[name] = type(error).__name__
        on_cpu = InferenceSession(model, providers=["CPUExecutionProvider"])
        on_cpu.set_providers(["CPUExecutionProvider"])
        try:
            on_cpu.set_providers(["CUDAExecutionProvider"])
        except Exception as error:  # noqa: BLE001
            seen["set_providers"] = type(error).__name__
        seen["sessions"] = [(record.kind, *record.providers) for record in ortgpu.sessions()]
    seen["runs"] = on_cpu.run(None, {"x": [[1.0, 2.0]]})[0].tolist()
    seen["restored"] = onnxruntime.InferenceSession.__init__ is before and sys.meta_path == finders
    return seen


# The tests


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
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
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
    # cuBLAS cannot be opened without the other, and is in the same wheel.
    assert error.details["missing"] == [soname, *(s for s in release.linked if "cublasLt" in soname and "cublas." in s)]
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


def test_a_library_that_is_opened_at_need_is_named_where_it_is_needed(
    release: Release, machine: Machine, tiny: Path, models: Models
) -> None:
    """Where cuDNN is linked, it is one of the cases above."""
    if release.cudnn not in release.opened:
        return
    machine.overlay.remove(f"nvidia/*/lib/{release.cudnn}")
    error = refusal(machine.open_session(models.conv), "LibraryNotFoundError")
    assert error.details["missing"] == [release.cudnn]
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
