"""Every broken environment ends in an exception that names the cause, and never in a session on the CPU.

From the user's side: real wheels taken apart in the lab, the real loader and provider, ``GPUSession(model)``, and what
comes of it. Each case is opened twice, as it is and with ``allow_cpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab import GPU, NVML, Cuda, Machine, Outcome, Overlay
from tests.lab.fixtures import Lab

CUDA_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
EXTENSION = "onnxruntime/capi/onnxruntime_pybind11_state*.so"
CUDNN = "nvidia/cudnn/lib/libcudnn.so.9"

H200 = GPU(uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", capability=(9, 0))
A100 = GPU(uuid="GPU-22222222-2222-3333-4444-555555555555", name="NVIDIA A100", capability=(8, 0))
P4 = GPU(uuid="GPU-33333333-2222-3333-4444-555555555555", name="Tesla P4", capability=(6, 1))
V100 = GPU(uuid="GPU-44444444-2222-3333-4444-555555555555", name="Tesla V100", capability=(7, 0))
GB10 = GPU(uuid="GPU-66666666-2222-3333-4444-555555555555", name="NVIDIA GB10", capability=(12, 1))
B200 = GPU(uuid="GPU-55555555-2222-3333-4444-555555555555", name="NVIDIA B200", capability=(10, 0))

Break = Callable[[Lab, Overlay], object]


@dataclass(frozen=True)
class Case:
    """One broken environment.

    Attributes:
        error: name of the class that is raised, exactly.
        says: what ``str(error)`` must hold.
        breaks: what is done to an environment in which everything is installed.
        others: classes that ``others`` must hold.
        details: fields of the error, exactly. A tuple is given as a list.
        cpu: whether ``allow_cpu`` opens a session: not where there is no ONNX Runtime that could, nor for a request
            that is wrong in itself.
    """

    name: str
    error: str
    says: tuple[str, ...]
    breaks: Break = lambda _lab, _overlay: None
    cuda: Cuda | None = None
    nvml: NVML | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: str = "relu"
    others: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool = True

    def machine(self, lab: Lab) -> Machine:
        machine = lab.machine(cuda=self.cuda, nvml=self.nvml, env=self.env)
        self.breaks(lab, machine.overlay)
        return machine


def removing(*patterns: str) -> Break:
    return lambda _lab, overlay: overlay.remove(*patterns)


def truncating(pattern: str, size: int) -> Break:
    return lambda _lab, overlay: overlay.truncate(pattern, size)


def library(stem: str) -> str:
    return f"nvidia/*/lib/{stem}.so.*"


def cpu_over_gpu(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin)


def gpu_over_cpu(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin).reinstall("onnxruntime-gpu")


def cpu_only(lab: Lab, overlay: Overlay) -> None:
    overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.cpu_twin)


def cpu_twin_gone_again(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin).uninstall("onnxruntime")


def gpu_twin_gone_again(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin).uninstall("onnxruntime-gpu")


def other_cudnn(lab: Lab, overlay: Overlay) -> None:
    overlay.remove("nvidia/cudnn/lib/*")
    overlay.replace("nvidia/cudnn/lib/libcudnn.so.8", lab.stubs.library("libcudnn.so.8", {"cudnnGetVersion": 8907}))


def other_cublas(lab: Lab, overlay: Overlay) -> None:
    overlay.remove(library("libcublas"), library("libcublasLt"))
    for stem in ("libcublas", "libcublasLt"):
        overlay.replace(f"nvidia/cublas/lib/{stem}.so.11", lab.stubs.library(f"{stem}.so.11"))


PACKAGES = [
    Case(
        "not-installed",
        "OnnxRuntimeNotInstalledError",
        ("not installed", "install", "onnxruntime-gpu"),
        lambda _lab, overlay: overlay.uninstall("onnxruntime-gpu"),
        cpu=False,
    ),
    Case(
        "cpu-package-only",
        "CPUOnlyPackageError",
        ("onnxruntime", "without CUDA", "CPUExecutionProvider", "uninstall", "onnxruntime-gpu"),
        cpu_only,
        details={"package": "onnxruntime"},
    ),
    Case(
        "cpu-package-over-gpu-package",
        "ConflictingPackagesError",
        ("onnxruntime ", "onnxruntime-gpu", "uninstall"),
        cpu_over_gpu,
        details={"packages": ["onnxruntime", "onnxruntime-gpu"]},
    ),
    Case(
        "gpu-package-over-cpu-package",
        "DriverNotFoundError",
        ("libcuda.so.1", "onnxruntime and onnxruntime-gpu"),
        gpu_over_cpu,
        others=("ConflictingPackagesError",),
    ),
    Case(
        "cpu-twin-uninstalled-again",
        "BrokenPackageError",
        ("uninstall left behind", "onnxruntime", "onnxruntime-gpu"),
        cpu_twin_gone_again,
        cpu=False,
    ),
    Case(
        "gpu-twin-uninstalled-again",  # of the same version: nothing is left but the record of the CPU package
        "OnnxRuntimeNotInstalledError",
        ("not installed", "install", "onnxruntime-gpu"),
        gpu_twin_gone_again,
        cpu=False,
    ),
    Case(
        "provider-file-missing",
        "BrokenPackageError",
        ("libonnxruntime_providers_cuda.so", "onnxruntime-gpu"),
        removing(CUDA_PROVIDER),
    ),
    Case(
        "provider-file-truncated",
        "BrokenPackageError",
        ("libonnxruntime_providers_cuda.so", "onnxruntime-gpu"),
        truncating(CUDA_PROVIDER, 1_000_000),
    ),
    Case(
        "shared-provider-file-missing",
        "BrokenPackageError",
        ("libonnxruntime_providers_shared.so", "onnxruntime-gpu"),
        removing("onnxruntime/capi/libonnxruntime_providers_shared.so"),
    ),
    Case(
        "shared-provider-file-truncated",
        "BrokenPackageError",
        ("libonnxruntime_providers_shared.so", "onnxruntime-gpu"),
        truncating("onnxruntime/capi/libonnxruntime_providers_shared.so", 1_000),
        cpu=False,
    ),
    Case(
        "extension-module-missing",
        "BrokenPackageError",
        ("onnxruntime_pybind11_state", "onnxruntime-gpu"),
        removing(EXTENSION),
        cpu=False,
    ),
    Case(
        "extension-module-truncated",
        "BrokenPackageError",
        ("onnxruntime_pybind11_state", "onnxruntime-gpu"),
        truncating(EXTENSION, 1_000_000),
        cpu=False,
    ),
    Case(
        "init-file-missing",
        "BrokenPackageError",
        ("__init__.py", "onnxruntime-gpu"),
        removing("onnxruntime/__init__.py"),
        cpu=False,
    ),
    Case(
        "file-altered",
        "BrokenPackageError",
        ("onnxruntime/__init__.py", "onnxruntime-gpu", "import onnxruntime fails"),
        lambda _lab, overlay: overlay.replace("onnxruntime/__init__.py", b"raise ImportError('no such thing')"),
        cpu=False,
    ),
]


def missing(*stems: str, says: tuple[str, ...]) -> Case:
    """Linked libraries that are gone, on a machine that has no driver either: both are said, the libraries first."""
    return Case(
        "no-" + "-".join(stems),
        "LibraryNotFoundError",
        (*stems, "pip install", "driver-not-found", *says),
        removing(*map(library, stems)),
        others=("DriverNotFoundError",),
    )


LIBRARIES = [
    missing("libcublasLt", says=("nvidia-cublas",)),
    missing("libcublas", says=("nvidia-cublas",)),
    missing("libcurand", says=("nvidia-curand",)),
    missing("libcudart", says=("nvidia-cuda-runtime",)),
    missing("libcublasLt", "libcurand", "libcudart", says=("nvidia-cublas", "nvidia-curand", "nvidia-cuda-runtime")),
    Case(
        "no-cuda-wheels-at-all",
        "LibraryNotFoundError",
        ("libcublas.so", "libcublasLt.so", "libcurand.so", "libcudart.so", "pip install"),
        removing("nvidia", "nvidia_*.dist-info"),
        cuda=Cuda(init=100),
    ),
    Case(
        "library-truncated",
        "LibraryNotFoundError",
        ("libcurand.so.10", "truncated", "nvidia-curand"),
        truncating(library("libcurand"), 10_000),
        others=("DriverNotFoundError",),
    ),
    Case(
        "library-empty",
        "LibraryNotFoundError",
        ("libcurand.so.10", "empty", "nvidia-curand"),
        truncating(library("libcurand"), 0),
    ),
    Case(
        "library-is-text",
        "LibraryNotFoundError",
        ("libcurand.so.10", "not an ELF file", "nvidia-curand"),
        lambda _lab, overlay: overlay.replace(
            overlay.path(library("libcurand")).relative_to(overlay.site).as_posix(),
            b"version https://git-lfs.github.com/spec/v1\n" * 40,
        ),
    ),
    Case(
        "cublas-of-another-cuda",
        "LibraryVersionError",
        ("libcublas.so", "libcublas.so.11", "libcublasLt.so.11", "nvidia-cublas"),
        other_cublas,
    ),
    Case(
        "cudnn-8-and-a-convolution",
        "LibraryVersionError",
        ("libcudnn.so.9", "libcudnn.so.8", "Conv", "nvidia-cudnn"),
        other_cudnn,
        model="conv",
        details={"needed": ["libcudnn.so.9"]},
    ),
    Case(
        "no-cudnn-and-a-convolution",
        "LibraryNotFoundError",
        ("libcudnn.so.9", "Conv", "nvidia-cudnn"),
        removing("nvidia/cudnn"),
        model="conv",
        others=("DriverNotFoundError",),
    ),
    Case(
        "part-of-cudnn-missing-and-a-convolution",
        "LibraryNotFoundError",
        ("libcudnn_ops.so.9", "Conv", "nvidia-cudnn"),
        removing("nvidia/cudnn/lib/libcudnn_ops.so.9"),
        model="conv",
    ),
    Case(
        "no-cudnn-and-no-need-of-it",
        "DriverNotFoundError",
        ("libcuda.so.1", "libcudnn.so.9"),
        removing("nvidia/cudnn"),
        others=("LibraryNotFoundError",),
    ),
]

DRIVER = [
    Case("no-driver", "DriverNotFoundError", ("libcuda.so.1", "driver", "--gpus all")),
    Case(
        "no-libcuda-and-working-nvml",
        "DriverNotFoundError",
        ("libcuda.so.1", "NVML works", "compute", "NVIDIA_DRIVER_CAPABILITIES"),
        nvml=NVML(gpus=(H200,)),
    ),
    Case(
        "driver-too-old",
        "DriverTooOldError",
        ("12.8", "CUDA 13", "570.86.15", "580"),
        cuda=Cuda(version=12080, devices=(H200,)),
        nvml=NVML(gpus=(H200,), driver="570.86.15", cuda=12080),
        details={"driver_version": "570.86.15", "driver_cuda": [12, 8], "needed_cuda": [13, 0]},
    ),
    Case(
        "driver-too-old-and-no-nvml",
        "DriverTooOldError",
        ("12.8", "CUDA 13"),
        cuda=Cuda(version=12080, devices=(H200,)),
        details={"driver_cuda": [12, 8], "needed_cuda": [13, 0]},
    ),
    Case("no-device", "NoDeviceError", ("no GPU", "100"), cuda=Cuda(init=100), nvml=NVML(gpus=())),
    Case("no-device-and-no-nvml", "NoDeviceError", ("no GPU", "100"), cuda=Cuda(init=100)),
    *(
        Case(
            f"cuinit-{code}",
            "DriverUnusableError",
            (str(code), name, *words),
            cuda=Cuda(init=code, devices=(H200,)),
            nvml=NVML(gpus=(H200,)),
            details={"cuda_code": code},
        )
        for code, name, words in [
            (3, "CUDA_ERROR_NOT_INITIALIZED", ()),
            (802, "CUDA_ERROR_SYSTEM_NOT_READY", ("fabric",)),
            (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ("reboot",)),
            (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", ("cuda-compat",)),
            (999, "CUDA_ERROR_UNKNOWN", ("nvidia_uvm",)),
            (123, "123", ()),
        ]
    ),
    Case(
        "mismatch-seen-by-nvml-too",
        "DriverUnusableError",
        ("803", "reboot"),
        cuda=Cuda(init=803),
        nvml=NVML(init=18),
        details={"cuda_code": 803},
    ),
]


def with_gpus(*gpus: GPU) -> dict[str, Any]:
    return {"cuda": Cuda(devices=gpus), "nvml": NVML(gpus=gpus)}


DEVICES = [
    *(
        Case(
            f"hidden-by-{value or 'nothing'}",
            "NoDeviceError",
            ("CUDA_VISIBLE_DEVICES", repr(value), "unset CUDA_VISIBLE_DEVICES"),
            env={"CUDA_VISIBLE_DEVICES": value},
            **with_gpus(H200),
        )
        for value in ("", "-1")
    ),
    Case(
        "hidden-by-an-unknown-uuid",
        "NoDeviceError",
        ("CUDA_VISIBLE_DEVICES", "GPU-dead", H200.uuid),
        env={"CUDA_VISIBLE_DEVICES": "GPU-dead"},
        **with_gpus(H200),
    ),
    Case(
        "ordinal-too-high",
        "DeviceNotFoundError",
        ("3", "NVIDIA H200", H200.uuid),
        arguments={"device": 3},
        details={"requested": 3},
        **with_gpus(H200),
    ),
    Case(
        "ordinal-too-high-in-the-options",
        "DeviceNotFoundError",
        ("3", "NVIDIA H200", H200.uuid),
        arguments={"providers": [("CUDAExecutionProvider", {"device_id": 3})]},
        **with_gpus(H200),
    ),
    Case(
        "ordinal-hidden",
        "DeviceNotFoundError",
        ("cuda:1", "NVIDIA H200", "CUDA_VISIBLE_DEVICES"),
        arguments={"device": "cuda:1"},
        env={"CUDA_VISIBLE_DEVICES": "0"},
        **with_gpus(H200, A100),
    ),
    Case(
        "uuid-unknown",
        "DeviceNotFoundError",
        ("GPU-dead", H200.uuid),
        arguments={"device": "GPU-dead"},
        **with_gpus(H200),
    ),
    Case(
        "ordinal-too-high-and-no-libcuda",
        "DeviceNotFoundError",
        ("7", H200.uuid),
        arguments={"device": 7},
        nvml=NVML(gpus=(H200,)),
        others=("DriverNotFoundError",),
    ),
    *(
        Case(
            f"generation-{major}.{minor}",
            "UnsupportedDeviceError",
            (gpu.name, f"{major}.{minor}"),
            details={"compute_capability": [major, minor]},
            **with_gpus(gpu),
        )
        for gpu in (P4, V100, B200, GB10)
        for major, minor in [gpu.capability]
    ),
    Case(
        "generation-6.1-and-no-libcuda",
        "UnsupportedDeviceError",
        ("Tesla P4", "6.1", "driver-not-found"),
        nvml=NVML(gpus=(P4,)),
        others=("DriverNotFoundError",),
    ),
    Case(
        "taken-by-another-process",
        "DeviceBusyError",
        ("46", "process"),
        cuda=Cuda(init=46, devices=(H200,)),
        nvml=NVML(gpus=(GPU(uuid=H200.uuid, name=H200.name, compute_mode=3, processes=((1, 1 << 30),)),)),
    ),
]


def request(name: str, says: tuple[str, ...], *, option: bool = False, **arguments: Any) -> Case:
    """A request that is wrong on every machine: on one without a driver it is still what is said first."""
    error = "ProviderOptionError" if option else "ProviderRequestError"
    return Case(name, error, says, arguments=arguments, cpu=False)


REQUESTS = [
    request("provider-cuda", ("'cuda'", "CUDAExecutionProvider"), providers=["cuda"]),
    request(
        "provider-misspelt", ("'CudaExecutionProvider'", "CUDAExecutionProvider"), providers=["CudaExecutionProvider"]
    ),
    request("provider-not-built-in", ("ROCMExecutionProvider",), providers=["ROCMExecutionProvider"]),
    request("providers-a-string", ("list",), providers="CUDAExecutionProvider"),
    request("providers-a-dict", ("list",), providers={"CUDAExecutionProvider": {}}),
    request("provider-a-number", ("1",), providers=["CUDAExecutionProvider", 1]),
    request("provider-tuple-too-short", ("CUDAExecutionProvider",), providers=[("CUDAExecutionProvider",)]),
    request(
        "provider-options-a-list", ("CUDAExecutionProvider",), providers=[("CUDAExecutionProvider", ["device_id"])]
    ),
    request("provider-twice", ("more than once",), providers=["CUDAExecutionProvider"] * 2),
    request("options-without-providers", ("provider_options",), provider_options=[{"device_id": 0}]),
    request("options-too-many", ("1 ", "2 "), providers=["CUDAExecutionProvider"], provider_options=[{}, {}]),
    request(
        "option-name", ("devise_id", "device_id"), option=True, providers=[("CUDAExecutionProvider", {"devise_id": 0})]
    ),
    request(
        "option-name-in-provider-options",
        ("devise_id", "device_id"),
        option=True,
        providers=["CUDAExecutionProvider"],
        provider_options=[{"devise_id": 0}],
    ),
    request(
        "option-value-enumerated",
        ("arena_extend_strategy", "kNever", "kSameAsRequested"),
        option=True,
        providers=[("CUDAExecutionProvider", {"arena_extend_strategy": "kNever"})],
    ),
    request(
        "option-value-number",
        ("gpu_mem_limit", "lots"),
        option=True,
        providers=[("CUDAExecutionProvider", {"gpu_mem_limit": "lots"})],
    ),
    request(
        "option-value-boolean",
        ("use_tf32", "maybe"),
        option=True,
        providers=[("CUDAExecutionProvider", {"use_tf32": "maybe"})],
    ),
    request("fallback-asked-for", ("enable_fallback",), enable_fallback=1),
]

CASES = [*PACKAGES, *LIBRARIES, *DRIVER, *DEVICES, *REQUESTS]
BUILTIN = {
    "PackageError": "ImportError",
    "LibraryError": "OSError",
    "DeviceNotFoundError": "LookupError",
    "ProviderRequestError": "ValueError",
    "ProviderOptionError": "ValueError",
}

all_cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@all_cases
def test_a_broken_environment_raises_its_cause(lab: Lab, case: Case) -> None:
    outcome = case.machine(lab).open_session(getattr(lab.models, case.model), **case.arguments)
    assert outcome.result.returncode == 0, outcome.result.output
    error = outcome.error
    assert error is not None, f"a session on {outcome.providers}"
    assert error.type == case.error, error.text
    for word in case.says:
        assert word in error.text
    assert set(case.others) <= set(error.other_types), error.text
    assert {name: error.details[name] for name in case.details} == dict(case.details)
    # What every error keeps, whatever its cause
    assert "GPUError" in error.bases
    assert "RuntimeError" in error.bases
    assert all(builtin in error.bases for base, builtin in BUILTIN.items() if base in error.bases)
    assert error.text.startswith(str(error.summary))
    assert f"ortgpu explain {error.code}" in error.text
    assert error.evidence, error.text
    assert error.fixes, error.text
    assert outcome.result.stdout == "", "a library does not print"
    assert not outcome.warnings, outcome.warnings


@pytest.mark.parametrize("case", [case for case in CASES if case.cpu], ids=lambda case: case.name)
def test_the_cpu_is_taken_only_when_it_is_allowed_and_never_silently(lab: Lab, case: Case) -> None:
    outcome = case.machine(lab).open_session(getattr(lab.models, case.model), allow_cpu=True, **case.arguments)
    assert_on_cpu_because_of(outcome, case.error)


@pytest.mark.parametrize("case", [case for case in CASES if not case.cpu], ids=lambda case: case.name)
def test_what_the_cpu_would_not_mend_stays_an_error(lab: Lab, case: Case) -> None:
    outcome = case.machine(lab).open_session(getattr(lab.models, case.model), allow_cpu=True, **case.arguments)
    assert outcome.error is not None, f"a session on {outcome.providers}"
    assert outcome.error.type == case.error, outcome.error.text


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_variable_allows_the_cpu_too(lab: Lab, value: str, allowed: bool) -> None:
    outcome = lab.machine(env={"ORTGPU_ALLOW_CPU": value}).open_session(lab.models.relu)
    if allowed:
        assert_on_cpu_because_of(outcome, "DriverNotFoundError")
    else:
        assert outcome.error is not None
        assert outcome.error.type == "DriverNotFoundError"


def assert_on_cpu_because_of(outcome: Outcome, error: str) -> None:
    assert outcome.error is None, outcome.error.text
    assert outcome.result.returncode == 0, outcome.result.output
    assert outcome.providers == ("CPUExecutionProvider",)
    assert outcome.device == "cpu"
    warning = next(warning for warning in outcome.warnings if warning.type == "CPUExecutionWarning")
    assert warning.error is not None
    assert warning.error.type == error
    assert warning.error.text in warning.text


# Environments in which the fault is not one of those above: the CPU is still not taken.


def test_a_driver_that_fails_only_inside_the_cuda_runtime(lab: Lab) -> None:
    """The last resort: every check passes, since the stub describes a device, and the runtime refuses to open it."""
    outcome = lab.machine(**with_gpus(H200)).open_session(lab.models.relu)
    assert outcome.error is not None, f"a session on {outcome.providers}"
    assert "GPUError" in outcome.error.bases
    assert "500" in outcome.error.text
    assert outcome.result.stdout == ""


def test_a_compute_mode_that_lets_nobody_in(lab: Lab) -> None:
    """The driver counts such a GPU; what opening it would return, 46, is beyond the stub. NVML knows the mode."""
    gpu = GPU(uuid=H200.uuid, name=H200.name, compute_mode=2)
    outcome = lab.machine(**with_gpus(gpu)).open_session(lab.models.relu)
    assert outcome.error is not None, f"a session on {outcome.providers}"
    busy = next(error for error in (outcome.error, *outcome.error.others) if error.type == "DeviceBusyError")
    for word in ("NVIDIA H200", "prohibited", H200.uuid, "nvidia-smi"):
        assert word in busy.text


def test_a_generation_that_the_wheel_does_not_name_and_serves(lab: Lab) -> None:
    """Machine code for 8.6 runs on 8.7. (That for 12.0a, in the wheel, does not run on 12.1.)"""
    orin = GPU(uuid=H200.uuid, name="Orin", capability=(8, 7))
    outcome = lab.machine(**with_gpus(orin)).open_session(lab.models.relu)
    assert outcome.error is not None
    assert outcome.error.type != "UnsupportedDeviceError", outcome.error.text


@pytest.mark.parametrize(
    "code",
    [
        "import ortgpu; ortgpu.preload(); import onnxruntime",
        "import onnxruntime, ortgpu; ortgpu.preload()",
        "import ortgpu; ortgpu.diagnose(); ortgpu.preload(); ortgpu.GPUSession",
    ],
    ids=["before-the-import", "after-the-import", "diagnosed-first"],
)
def test_libraries_can_be_loaded_before_and_after_the_import(lab: Lab, code: str) -> None:
    """The provider's static initialisers use what ``import onnxruntime`` sets up, and crash without it."""
    lab.machine(**with_gpus(H200)).run(code).ok()


def test_a_working_nvml_is_not_needed(lab: Lab) -> None:
    """What NVML does not know is unknown, not wrong."""
    for nvml in (None, NVML(init=9), NVML(error=999)):
        outcome = lab.machine(cuda=Cuda(init=999), nvml=nvml).open_session(lab.models.relu)
        assert outcome.error is not None
        assert outcome.error.type == "DriverUnusableError", outcome.error.text


def test_a_module_of_the_users_own_shadows_the_package(lab: Lab) -> None:
    """A script called onnxruntime.py in the working directory is what `import onnxruntime` finds."""
    machine = lab.machine()
    (lab.folder / "onnxruntime.py").write_text("print('mine')\n", encoding="utf-8")
    result = machine.run(f"open_session({str(lab.models.relu)!r}, {{}})", cwd=lab.folder)
    assert result.returncode == 0, result.output
    assert "PackageError" in result.json["error"]["bases"], result.output
    assert "onnxruntime.py" in result.json["error"]["text"]


def test_what_is_not_about_the_gpu_stays_onnx_runtimes_own(lab: Lab) -> None:
    machine = lab.machine()
    missing_file = machine.open_session(lab.folder / "no-such-model.onnx", allow_cpu=True)
    assert missing_file.error is not None
    assert missing_file.error.type == "NoSuchFile"
    (lab.folder / "text.onnx").write_text("not a model", encoding="utf-8")
    invalid = machine.open_session(lab.folder / "text.onnx", allow_cpu=True)
    assert invalid.error is not None
    assert invalid.error.type in {"InvalidProtobuf", "Fail", "InvalidGraph"}
