"""Judgement alone, over made facts: nothing is wrong with a healthy machine, and each change is one finding.

What the facts are on real broken environments is for ``test_broken_environments.py``.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortgpu.diagnosis import CHECKS, Facts, Observed, Request, find_problems
from ortgpu.diagnosis.messages import of_construction
from ortgpu.diagnosis.probe import ProbeResult, ProbeStep
from ortgpu.environment.catalogue import LIBRARIES, spec_for
from ortgpu.environment.cuda import CudaDevice, CudaState
from ortgpu.environment.driver import GPU, Driver, Nvml
from ortgpu.environment.elf import ElfFile
from ortgpu.environment.host import Host
from ortgpu.environment.inspection import Environment
from ortgpu.environment.installer import Installer
from ortgpu.environment.libraries import Candidate, Resolution
from ortgpu.environment.packages import Distribution, OnnxRuntime, Packages, Torch
from ortgpu.environment.variables import Variables
from ortgpu.environment.wheel import Architecture, ProviderLibrary
from ortgpu.errors import GPUError
from ortgpu.models import ModelFacts
from ortgpu.preloading import LoadedLibrary, MissingLibrary, PreloadReport

SITE = "/venv/lib/python3.12/site-packages"
FOLDER = f"{SITE}/onnxruntime"
PROVIDER = f"{FOLDER}/capi/libonnxruntime_providers_cuda.so"
EXTENSION = f"{FOLDER}/capi/onnxruntime_pybind11_state.cpython-312-x86_64-linux-gnu.so"
BRIDGE = f"{FOLDER}/capi/libonnxruntime_providers_shared.so"
NEEDED = ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13")
UUID = "GPU-11111111-2222-3333-4444-555555555555"
AVAILABLE = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")

H200 = GPU(0, UUID, "NVIDIA H200", (9, 0), 141 << 30, 140 << 30, "default", False, (), "00000000:18:00.0")
CUDA_H200 = CudaDevice(0, UUID, "NVIDIA H200", (9, 0), 141 << 30, 0)
ENGINE = Distribution("onnxruntime-gpu", "1.31.1", SITE)
CPU_ENGINE = Distribution("onnxruntime", "1.31.1", SITE)


def resolution(soname: str, *, found: bool = True, rejected: tuple[Candidate, ...] = ()) -> Resolution:
    spec = spec_for(soname)
    assert spec is not None
    path = f"{SITE}/nvidia/{'cudnn' if spec.is_cudnn else 'cu13'}/lib/{soname}"
    here = (Candidate(soname, path, "nvidia wheels", f"{SITE}/nvidia"),) if found else ()
    return Resolution(spec, soname, soname in NEEDED, here, rejected)


def other_version(soname: str, other: str) -> Candidate:
    return Candidate(soname, f"/usr/lib/{other}", "system loader", "/usr/lib", f"is {other}, {soname} is needed")


HEALTHY = Facts(
    Environment(
        host=Host(
            system="Linux",
            machine="x86_64",
            os_name="Debian GNU/Linux 12",
            kernel="6.1.0",
            libc="glibc 2.36",
            python=(3, 12, 1),
            implementation="CPython",
            executable="/venv/bin/python",
            memory_total=64 << 30,
            container=None,
            wsl=False,
            display_vendors=frozenset({0x10DE}),
            frozen=False,
        ),
        installer=Installer("pip", "/venv/bin/python -m pip install", "/venv/bin/python -m pip uninstall -y"),
        packages=Packages(
            onnxruntime=OnnxRuntime(
                folder=FOLDER,
                importable=True,
                owners=(ENGINE,),
                elsewhere=(),
                build_name="onnxruntime-gpu",
                build_version="1.31.1",
                cuda_version=(13, 0),
                provider_library=PROVIDER,
                extension=EXTENSION,
                tensorrt_library=None,
            ),
            torch=None,
            nvidia=(Distribution("nvidia-cublas", "13.1.0", SITE), Distribution("nvidia-cudnn-cu13", "9.14.0", SITE)),
            others=(Distribution("numpy", "2.3.0", SITE),),
        ),
        extension=ElfFile(EXTENSION, machine="x86_64"),
        bridge=ElfFile(BRIDGE, machine="x86_64"),
        provider=ProviderLibrary(
            PROVIDER,
            None,
            (*NEEDED, "libcuda.so.1", "libc.so.6"),
            (),
            (Architecture(8, 0, False, False), Architecture(9, 0, False, True)),
        ),
        libraries=tuple(resolution(spec.sonames[13]) for spec in LIBRARIES if not spec.stem.endswith("_infer")),
        mapped=(),
        driver=Driver(
            libcuda="/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            libcuda_error=None,
            cuda_version=(13, 0),
            kernel_version="580.65.06",
            device_nodes=("/dev/nvidia0", "/dev/nvidiactl"),
            nvml=Nvml(True, None, "580.65.06", (13, 0), (H200,)),
        ),
        variables=Variables({}, {}),
    )
)

SEEN_HEALTHY = replace(
    HEALTHY,
    observed=Observed(
        has_session=True,
        available_providers=AVAILABLE,
        preload=PreloadReport(
            HEALTHY.environment.provider,
            tuple(
                LoadedLibrary(one.soname, one.chosen.path, one.chosen.source, one.chosen.root, one.required)
                for one in HEALTHY.environment.libraries
                if one.chosen
            ),
            (),
            (),
            False,
            13,
        ),
        cuda=CudaState(0, (CUDA_H200,), 1),
        probe=ProbeResult(
            tuple(ProbeStep(name, True) for name in ("driver", "libraries", "import", "provider", "session")),
            *(True, 0, None, False, None, 1.0, ""),
        ),
    ),
)


# Changes


Change = Callable[[Facts], Facts]


def environment(**changes: Any) -> Change:
    return lambda facts: replace(facts, environment=replace(facts.environment, **changes))


def part(name: str, **changes: Any) -> Change:
    """Change fields of one part of the environment: ``part("host", machine="aarch64")``."""

    def change(facts: Facts) -> Facts:
        old = getattr(facts.environment, name)
        return facts if old is None else environment(**{name: replace(old, **changes)})(facts)

    return change


def engine(**changes: Any) -> Change:
    return lambda facts: part("packages", onnxruntime=replace(facts.environment.packages.onnxruntime, **changes))(facts)


def nvml(**changes: Any) -> Change:
    return lambda facts: part("driver", nvml=replace(facts.environment.driver.nvml, **changes))(facts)


def variables(**now: str) -> Change:
    return environment(variables=Variables(now, now))


def request(**changes: Any) -> Change:
    return lambda facts: replace(facts, request=replace(facts.request, **changes))


def observed(**changes: Any) -> Change:
    return lambda facts: replace(facts, observed=replace(facts.observed, **changes))


def preloaded(**changes: Any) -> Change:
    report = SEEN_HEALTHY.observed.preload
    assert report is not None
    return observed(preload=replace(report, **changes))


def probed(*steps: ProbeStep, died_in: str | None = None, **changes: Any) -> Change:
    values: dict[str, Any] = {
        "steps": steps,
        "completed": died_in is None,
        "returncode": 0 if died_in is None else -11,
        "signal": None if died_in is None else "SIGSEGV",
        "timed_out": False,
        "died_in": died_in,
        "seconds": 1.0,
        "output": "Segmentation fault",
    }
    return observed(probe=ProbeResult(**{**values, **changes}))


def without(*sonames: str, found: str | None = None) -> Change:
    """Libraries that are nowhere, or only as another version."""

    def change(facts: Facts) -> Facts:
        libraries = tuple(
            resolution(one.soname, found=False, rejected=(other_version(one.soname, found),) if found else ())
            if one.soname in sonames
            else one
            for one in facts.environment.libraries
        )
        return environment(libraries=libraries)(facts)

    return change


def all_of(*changes: Change) -> Change:
    def change(facts: Facts) -> Facts:
        for one in changes:
            facts = one(facts)
        return facts

    return change


NO_ENGINE = all_of(
    engine(folder=None, importable=False, owners=(), build_name=None, build_version=None, cuda_version=None,
        provider_library=None, extension=None,), environment(extension=None, bridge=None, provider=None, libraries=()),
)  # fmt: skip
NO_PROVIDER = all_of(engine(provider_library=None), environment(provider=None, bridge=None, libraries=()))
CPU_ENGINE_THERE = all_of(NO_PROVIDER, engine(build_name="onnxruntime", owners=(CPU_ENGINE,), cuda_version=None))
NO_DRIVER = part(
    "driver", libcuda=None, libcuda_error="libcuda.so.1: cannot open shared object file", cuda_version=None,
        kernel_version=None, device_nodes=(), nvml=Nvml(False, "NVML Shared Library Not Found", None, None, ()),
)  # fmt: skip
NO_LIBRARIES = without(*NEEDED)


def cuda_failed(code: int) -> Change:
    return observed(cuda=CudaState(code, None, 1))


def owned(**changes: Any) -> Change:
    return engine(owners=(replace(ENGINE, **changes),))


def processes(mode: str | None) -> Change:
    return nvml(gpus=(replace(H200, compute_mode=mode),))


def gpus(*capabilities: tuple[int, int], uuid: str = "GPU-{}") -> Change:
    return nvml(
        gpus=tuple(
            replace(H200, index=n, uuid=uuid.format(n), name=f"GPU {one}", compute_capability=one)
            for n, one in enumerate(capabilities)
        )
    )


CUDNN_13 = "libcudnn.so.9"
SYMBOL = "libcublas.so.13: undefined symbol: cublasLtMatmul, version libcublasLt.so.13"

# name, what is changed, the finding's class, its severity, what its text holds


@dataclass(frozen=True)
class Case:
    name: str
    change: Change
    error: str
    says: str
    severity: str = "fatal"
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = [
    # Packages
    Case("another system", part("host", system="Darwin", machine="arm64"), "UnsupportedPlatformError", "Darwin arm64",
        details={"system": "Darwin", "machine": "arm64"}),
    Case("nothing installed", NO_ENGINE, "OnnxRuntimeNotInstalledError", "pip install"),
    Case("a stray module", engine(shadowed_by="/app/onnxruntime.py"), "BrokenPackageError", "/app/onnxruntime.py",
        details={"files": ("/app/onnxruntime.py",)}),
    Case("a leftover folder", engine(importable=False), "BrokenPackageError", f"rm -rf {FOLDER}"),
    Case("a missing file", owned(missing_files=("onnxruntime/capi/_pybind_state.py",)), "BrokenPackageError",
        "--force-reinstall", details={"files": ("onnxruntime/capi/_pybind_state.py",)}),
    Case("an altered file", owned(altered_files=("onnxruntime/__init__.py",)), "BrokenPackageError",
        "not the file that was installed: onnxruntime/__init__.py"),
    Case("a missing provider on record",
        all_of(NO_PROVIDER, owned(missing_files=("onnxruntime/capi/libonnxruntime_providers_cuda.so",))),
        "BrokenPackageError", "libonnxruntime_providers_cuda.so"),
    Case("a missing provider", NO_PROVIDER, "BrokenPackageError", "CUDA provider library"),
    Case("two packages, the GPU build whole", engine(owners=(CPU_ENGINE, ENGINE)), "ConflictingPackagesError",
        "onnxruntime and onnxruntime-gpu are installed over each other", "warning",
        details={"packages": ("onnxruntime", "onnxruntime-gpu")}),
    Case("two packages, the GPU build lost",
        all_of(NO_PROVIDER, engine(owners=(ENGINE, CPU_ENGINE), build_name="onnxruntime")), "ConflictingPackagesError",
        "the GPU build lost"),
    Case("two packages, holes",
        engine(owners=(CPU_ENGINE, replace(ENGINE, altered_files=("onnxruntime/__init__.py",)))),
        "ConflictingPackagesError", "1 of its files missing or overwritten"),
    Case("the CPU package", CPU_ENGINE_THERE, "CPUOnlyPackageError", "pip uninstall -y onnxruntime &&",
        details={"package": "onnxruntime", "version": "1.31.1"}),
    Case("the CPU package before the GPU one",
        all_of(CPU_ENGINE_THERE, engine(elsewhere=(replace(ENGINE, location="/usr"),))), "CPUOnlyPackageError",
        "shadowed by it: onnxruntime-gpu 1.31.1 in /usr"),
    Case("no CUDA in the build", observed(available_providers=("CPUExecutionProvider",)), "CPUOnlyPackageError",
        "without CUDA"),
    *(
        Case(f"a damaged {name}", part(name, problem="truncated: 5 of 9 bytes"), "BrokenPackageError",
            "truncated: 5 of 9 bytes",)
        for name in ("extension", "bridge", "provider")
    ),
    Case("import fails", observed(import_error="ImportError: DLL load failed"), "BrokenPackageError",
        "DLL load failed"),
    Case("no InferenceSession", observed(has_session=False), "BrokenPackageError", "InferenceSession"),
    Case("an old C library", observed(import_error="ImportError: /lib/libc.so.6: version `GLIBC_2.34' not found"),
        "UnsupportedPlatformError", "GLIBC_2.34"),
    Case("an executable stack", observed(
        import_error="ImportError: cannot enable executable stack as shared object requires: Invalid argument"),
        "BrokenPackageError", "onnxruntime-gpu>=1.28"),
    # Libraries
    Case("a model that works between processes",
         all_of(request(collective_operators=("AllReduce",)), observed(has_collective_ops=False)),
         "CollectiveOpsUnavailableError", "AllReduce"),
    Case("one library missing", without("libcurand.so.10"), "LibraryNotFoundError", "nvidia-curand~=10.0",
        details={"missing": ("libcurand.so.10",)}),
    Case("all libraries missing", NO_LIBRARIES, "LibraryNotFoundError", "found nowhere",
        details={"missing": ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10")}),
    Case("another version of it", without("libcublas.so.13", found="libcublas.so.12"), "LibraryVersionError",
        "/usr/lib/libcublas.so.12", details={"found": {"libcublas.so.13": "/usr/lib/libcublas.so.12"}}),
    Case("a library that could not be opened", preloaded(missing=(MissingLibrary("libcurand.so.10", True,
        "nvidia-curand~=10.0",
        (Candidate("libcurand.so.10", "/x/libcurand.so.10", "directory", "/x", "file too short"),),),)),
        "LibraryNotFoundError", "/x/libcurand.so.10 passed over (directory): file too short"),
    Case("a library that no wheel has", preloaded(missing=(MissingLibrary("libfoo.so.1", True, None, ()),)),
        "LibraryNotFoundError", "install the system package that has libfoo.so.1"),
    Case("a missing symbol", all_of(preloaded(), observed(provider_error=SYMBOL)), "LibraryVersionError",
        "cublasLtMatmul", details={"needed": ("libcublasLt.so.13",)}),
    Case("a provider that needs more",
        all_of(preloaded(), observed(provider_error="libfoo.so.1: cannot open shared object file")),
        "LibraryNotFoundError", "libfoo.so.1"),
    Case("a provider that does not open", all_of(preloaded(), observed(provider_error="invalid ELF header")),
        "BrokenPackageError", "invalid ELF header"),
    Case("no cuDNN", without(CUDNN_13), "LibraryNotFoundError", "models with convolutions", "warning"),
    Case("no cuDNN for a model that needs it", all_of(without(CUDNN_13), request(cudnn_operators=("Conv",))),
        "LibraryNotFoundError", "Conv of this model needs libcudnn.so.9", details={"missing": (CUDNN_13,)}),
    Case("no cuFFT", without("libcufft.so.12"), "LibraryNotFoundError", "Fourier", "warning"),
    Case("no cuFFT for a model that needs it", all_of(without("libcufft.so.12"), request(cufft_operators=("Rfft",))),
        "LibraryNotFoundError", "Rfft of this model needs libcufft.so.12"),
    Case(
        "cuDNN for another CUDA", preloaded(cudnn_cuda_major=12), "LibraryConflictError", "built for CUDA 12",
        "warning"),
    Case("cuDNN for another CUDA, and a model that needs it",
        all_of(preloaded(cudnn_cuda_major=12), request(cudnn_operators=("Conv",))), "LibraryConflictError",
        "ONNX Runtime for CUDA 13"),
    # Devices
    Case("a device that is not there", request(device=3), "DeviceNotFoundError", UUID, details={"requested": 3}),
    Case("a UUID that is not there", request(device="GPU-9999"), "DeviceNotFoundError", UUID),
    Case("a device that CUDA does not have",
        all_of(observed(cuda=CudaState(0, (CUDA_H200,), 1)), request(device="cuda:1")), "DeviceNotFoundError",
        "cuda:0 NVIDIA H200", details={"requested": "cuda:1"}),
    Case("a GPU that is too old", gpus((6, 1)), "UnsupportedDeviceError", "sm_80, sm_90a",
        details={"compute_capability": (6, 1), "architectures": ("sm_80", "sm_90a")}),
    Case("a GPU that is too new", gpus((12, 1)), "UnsupportedDeviceError", "12.1"),
    Case("two of them", gpus((6, 1), (7, 0)), "UnsupportedDeviceError", "6.1"),
    Case("the one that is named", all_of(gpus((9, 0), (7, 0)), request(device="GPU-1")), "UnsupportedDeviceError",
        "7.0"),
    Case("every GPU hidden", variables(CUDA_VISIBLE_DEVICES=""), "NoDeviceError", "unset CUDA_VISIBLE_DEVICES"),
    Case("every GPU hidden by -1", variables(CUDA_VISIBLE_DEVICES="-1"), "NoDeviceError", "hides every GPU"),
    Case("no GPU", nvml(gpus=()), "NoDeviceError", "NVML sees 0 GPU(s)"),
    Case("CUDA sees none", cuda_failed(100), "NoDeviceError", "cuInit returned 100"),
    Case("CUDA counts none", observed(cuda=CudaState(0, (), 1)), "NoDeviceError", "CUDA sees no GPU"),
    Case("compute mode prohibited", processes("prohibited"), "DeviceBusyError", "nvidia-smi -i",
        details={"uuid": UUID}),
    Case("another process holds it", cuda_failed(46), "DeviceBusyError", "no further process"),
    # Driver
    Case("no driver", NO_DRIVER, "DriverNotFoundError", "580.65 or newer"),
    Case("no compute in the container", all_of(part("driver", libcuda=None, libcuda_error="not found"),
        part("host", container="docker"), variables(NVIDIA_DRIVER_CAPABILITIES="utility"),), "DriverNotFoundError",
        "NVIDIA_DRIVER_CAPABILITIES=utility"),
    Case("no driver in WSL", all_of(NO_DRIVER, part("host", wsl=True)), "DriverNotFoundError", "/usr/lib/wsl/lib"),
    Case("an AMD GPU", all_of(NO_DRIVER, part("host", display_vendors=frozenset({0x1002}))), "DriverNotFoundError",
        "onnxruntime-rocm"),
    Case("an old driver", part("driver", cuda_version=(12, 8)), "DriverTooOldError", "CUDA up to 12.8",
        details={"driver_cuda": (12, 8), "needed_cuda": (13, 0), "driver_version": "580.65.06"}),
    Case("an old driver, as NVML says", all_of(part("driver", cuda_version=None), nvml(cuda_version=(11, 4))),
        "DriverTooOldError", "CUDA up to 11.4"),
    Case("an old driver, as CUDA says", cuda_failed(35), "DriverTooOldError", "580.65"),
    *(
        Case(f"cuInit {code}", cuda_failed(code), "DriverUnusableError", says, details={"cuda_code": code})
        for code, says in {
            3: "spawn",
            34: "stub",
            214: "memory error",
            802: "fabric",
            803: "reboot",
            804: "cuda-compat",
            999: "Xid",
            304: "CUDA_ERROR_OPERATING_SYSTEM",
            12345: "CUDA error 12345",
        }.items()
    ),
    Case("no memory left", cuda_failed(2), "InsufficientDeviceMemoryError", "no memory left"),
    Case("a poisoned context", cuda_failed(700), "PoisonedContextError", "restart this process",
        details={"cuda_code": 700}),
    # What was tried
    Case("the driver crashes", probed(died_in="driver"), "DriverUnusableError", "SIGSEGV"),
    Case(
        "the driver hangs", probed(died_in="driver", timed_out=True, seconds=30.0), "DriverUnusableError",
        "within 30 s"),
    Case("the import crashes", probed(died_in="import"), "BrokenPackageError", "import onnxruntime ended the process"),
    Case("loading crashes", probed(died_in="libraries"), "BrokenPackageError", "loading the CUDA libraries"),
    Case("the provider crashes", probed(died_in="provider"), "BrokenPackageError", "Segmentation fault"),
    Case("a session crashes", probed(died_in="session"), "ProviderFallbackError", "opening a session"),
    Case("a session fails", probed(ProbeStep("session", False, "strange words")), "ProviderFallbackError",
        "strange words"),
    Case("a session fails for a reason", probed(ProbeStep("session", False, "CUDA failure 999: unknown error")),
        "DriverUnusableError", "999"),
    Case("the model fails", probed(ProbeStep("session", True), ProbeStep("model", False, "No Op registered for Foo")),
        "ProviderError", "No Op registered for Foo"),
    # The model
    Case("no model", request(model=ModelFacts("m.onnx", problem="no such file")), "GPUError", "no such file"),
    Case("no weights", request(model=ModelFacts("m.onnx", missing_data=("m.data",))), "GPUError", "m.data"),
    Case("operators of others", request(model=ModelFacts("m.onnx", operators=frozenset({("Foo", "my.ops")}))),
        "ProviderError", "my.ops:Foo", "warning"),
    Case("nodes on the CPU", probed(ProbeStep("model", True, data={"nodes": [{"name": "n",
        "op_type": "NonMaxSuppression", "domain": "", "provider": "CPUExecutionProvider", "kind": "compute",}]},)),
        "PlacementError", "NonMaxSuppression", "warning"),
]  # fmt: skip

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def shown(problems: tuple[GPUError, ...]) -> list[tuple[Any, ...]]:
    return [(type(one), str(one), one.severity, one.consequence_of, one.details(), one.fixes) for one in problems]


def roots(problems: tuple[GPUError, ...]) -> list[str]:
    return [type(one).__name__ for one in problems if one.consequence_of is None]


# A healthy machine


HARMLESS: dict[str, Change] = {
    "facts alone": lambda facts: facts,
    "everything tried": lambda facts: replace(SEEN_HEALTHY, environment=facts.environment),
    "in a container": part("host", container="docker"),
    "a CPU build that is shadowed": engine(elsewhere=(replace(CPU_ENGINE, location="/usr"),)),
    "licences trimmed": owned(missing_files=("onnxruntime/LICENSE", "onnxruntime/tools/check.py")),
    "no metadata": engine(owners=(), build_name=None, build_version=None),
    "built by oneself": engine(owners=(replace(ENGINE, name="onnxruntime"),), build_name="onnxruntime"),
    "no NVML": nvml(available=False, error="not found", driver_version=None, cuda_version=None, gpus=()),
    "nothing known of the driver": part("driver", cuda_version=None, kernel_version=None, device_nodes=()),
    "nothing known of the GPU": nvml(gpus=(GPU(0, None, None, None, None, None, None, None, (), None),)),
    "no fat binary": part("provider", architectures=None),
    "an older forward-compatible driver": nvml(cuda_version=(12, 2)),
    "one of two GPUs": all_of(gpus((9, 0), (9, 0)), variables(CUDA_VISIBLE_DEVICES="1")),
    "a GPU by UUID": variables(CUDA_VISIBLE_DEVICES=UUID[:12]),
    "a MIG instance": all_of(
        nvml(gpus=(replace(H200, mig_uuids=("MIG-1",)),)), variables(CUDA_VISIBLE_DEVICES="MIG-1")
    ),
    "one GPU of two that is held": all_of(processes("exclusive-process"), request(device=0)),
    "one GPU of two that is known": gpus((6, 1), (9, 0)),
    "a GPU that is asked for": request(device=UUID),
    "the emptiest GPU": request(device="auto"),
    "no cuDNN, and none wanted": all_of(without(CUDNN_13), request(cudnn_disabled=True)),
    "CUDA could not be asked": observed(cuda=CudaState(None, None, 1)),
    "CUDA 1.27 in the extension": observed(
        import_error="ImportError: libcudart.so.13: cannot open shared object file: No such file"
    ),
    "the probe did not start": probed(died_in="start"),
    "a model of usual operators": request(
        model=ModelFacts("m.onnx", operators=frozenset({("Conv", ""), ("Gelu", "com.microsoft")}))
    ),
    "a build with collective operators": all_of(
        request(collective_operators=("AllReduce",)), observed(has_collective_ops=True)
    ),
    "two older parts of cuDNN": environment(
        libraries=(*HEALTHY.environment.libraries, resolution("libcudnn_ops_infer.so.9", found=False))
    ),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_nothing_is_wrong(change: Change) -> None:
    assert [str(problem) for problem in find_problems(change(HEALTHY))] == []


# One change, one finding


@EACH
def test_one_change_is_one_finding(case: Case) -> None:
    problems = find_problems(case.change(HEALTHY))
    assert roots(problems) == [case.error], [str(problem) for problem in problems]
    found = problems[0]
    assert found.severity == case.severity
    assert case.says in str(found)
    assert {name: found.details()[name] for name in case.details} == case.details
    assert all(problem.consequence_of == found.code for problem in problems[1:])


@EACH
def test_a_finding_says_what_failed_why_and_what_to_do(case: Case) -> None:
    for found in find_problems(case.change(HEALTHY)):
        assert found.summary
        assert "\n" not in found.summary
        assert "None" not in str(found)
        assert "  " not in found.summary
        assert found.evidence
        assert found.fixes or found.code in ("provider-fallback", "provider-error"), "only the last resorts know none"
        assert all(fix.strip() and fix == fix.strip() for fix in found.fixes)


@EACH
def test_a_change_of_a_machine_on_which_everything_was_tried(case: Case) -> None:
    """What was observed before does not hide what is wrong with the facts, except where it contradicts them."""
    changed = case.change(SEEN_HEALTHY)
    problems = find_problems(changed)
    known_by_now = {"NoDeviceError", "UnsupportedDeviceError", "DeviceBusyError"}  # CUDA's answer is the better one
    libraries = {"LibraryNotFoundError", "LibraryVersionError"}  # what was loaded is there
    if case.error in libraries | known_by_now and not problems:
        return
    assert roots(problems) == [case.error], [str(problem) for problem in problems]


def test_every_check_finds_something() -> None:
    """No check is dead: each is the one that reports at least one of the cases."""
    reporting = {check for case in CASES for check in CHECKS if check(case.change(HEALTHY)) is not None}
    assert [check.__name__ for check in CHECKS if check not in reporting] == []


# Several changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((NO_DRIVER, NO_LIBRARIES), ["LibraryNotFoundError", "DriverNotFoundError"]),
        ((CPU_ENGINE_THERE, NO_DRIVER), ["CPUOnlyPackageError", "DriverNotFoundError"]),
        ((without(CUDNN_13), NO_DRIVER), ["DriverNotFoundError", "LibraryNotFoundError"]),  # cuDNN is a warning
        ((engine(owners=(CPU_ENGINE, ENGINE)), without("libcurand.so.10")),
            ["LibraryNotFoundError", "ConflictingPackagesError"],),
        ((without("libcurand.so.10"), without("libcufft.so.12")), ["LibraryNotFoundError", "LibraryNotFoundError"]),
        ((part("driver", cuda_version=(12, 8)), cuda_failed(999)), ["DriverTooOldError"]),
        ((part("driver", cuda_version=(12, 8)), gpus((6, 1))), ["UnsupportedDeviceError", "DriverTooOldError"]),
        ((NO_DRIVER, variables(CUDA_VISIBLE_DEVICES="")), ["DriverNotFoundError"]),
        ((part("host", system="Darwin"), NO_ENGINE, NO_DRIVER), ["UnsupportedPlatformError"]),
        ((part("host", system="Darwin"), CPU_ENGINE_THERE, NO_DRIVER), ["UnsupportedPlatformError"]),
        ((NO_ENGINE, NO_DRIVER), ["OnnxRuntimeNotInstalledError", "DriverNotFoundError"]),
        ((nvml(gpus=()), request(device=1)), ["NoDeviceError"]),
        ((part("provider", problem="truncated"), probed(died_in="provider")), ["BrokenPackageError"]),
    ],
)  # fmt: skip
def test_root_causes_first(changes: tuple[Change, ...], expected: list[str]) -> None:
    problems = find_problems(all_of(*changes)(HEALTHY))
    assert roots(problems) == expected
    assert_in_order(problems)


def assert_in_order(problems: tuple[GPUError, ...]) -> None:
    """Fatal root causes, their consequences, then warnings; and a consequence names something that was found."""
    ranks = [(one.severity != "fatal", one.consequence_of is not None) for one in problems]
    assert ranks == sorted(ranks)
    causes = {one.code for one in problems if one.severity == "fatal" and one.consequence_of is None}
    assert {one.consequence_of for one in problems} - {None} <= causes


@pytest.mark.parametrize("first", range(0, len(CASES), 7), ids=lambda n: CASES[n].name)
def test_two_changes_are_no_surprise(first: int) -> None:
    for second in CASES:
        problems = find_problems(second.change(CASES[first].change(HEALTHY)))
        assert problems, second.name
        assert_in_order(problems)


# Properties, over facts of every kind

TEXT = st.sampled_from(["", "x", "1.31.1", "a b", "naïve\n", "None", "libcudart.so.13"])
NAMES = st.sampled_from(["onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "nvidia-cudnn-cu12", "x"])
PATHS = st.sampled_from([FOLDER, SITE, PROVIDER, "/", "", "C:\\x\\onnxruntime", "/usr/lib/libcublas.so.12"])
FILES = st.lists(
    st.sampled_from(
        ["onnxruntime/__init__.py", "onnxruntime/capi/libonnxruntime_providers_cuda.so", "onnxruntime/LICENSE"]
    ),
    max_size=2,
).map(tuple)
VERSIONS = st.none() | st.sampled_from([(11, 4), (12, 8), (13, 0), (14, 1), (0, 0)])
PAIRS = st.none() | st.tuples(st.integers(0, 13), st.integers(0, 9))
FLAGS = st.booleans()
PROBLEMS = st.none() | st.sampled_from(["truncated: 1 of 2 bytes", "is a directory"])
SONAMES = st.sampled_from([soname for spec in LIBRARIES for soname in spec.sonames.values()] + ["libfoo.so.1", "foo"])
DEVICES = st.none() | st.sampled_from([0, 1, 7, "auto", "cuda", "cuda:1", UUID, "GPU-2", "MIG-1"])
MESSAGES = st.sampled_from(
    [
        "",
        "CUDA failure 35: x",
        "CUDA failure 100: x",
        "CUDA failure 101: x",
        "CUDA failure 999999: x",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN failure 1002: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
        'Unknown provider option: "x"',
        'Failed to parse provider option "y"',
        "Failed to allocate memory for requested buffer of size 5",
        "cuDNN is unavailable",
        "CUDAExecutionProvider",
        "libcublas.so.13: cannot open shared object file",
        SYMBOL,
        "ImportError: version `GLIBCXX_3.4.32' not found",
        "No Op registered for Foo",
    ]
)


def some(strategy: st.SearchStrategy[Any], most: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=most).map(tuple)


CANDIDATES = st.builds(
    Candidate, SONAMES, PATHS, st.sampled_from(["directory", "torch", "already loaded"]), PATHS, PROBLEMS
)
DISTRIBUTIONS = st.builds(Distribution, NAMES, st.none() | TEXT, PATHS, FILES, FILES, FLAGS)
GPUS = st.builds(
    GPU,
    *(st.integers(0, 3), st.none() | st.sampled_from([UUID, "GPU-2"]), st.none() | TEXT, PAIRS),
    *(st.none() | st.integers(0, 1 << 40), st.none() | st.integers(0, 1 << 40)),
    *(st.none() | st.sampled_from(["default", "prohibited"]), st.none() | FLAGS, some(st.just("MIG-1")), st.none()),
)
ELF_FILES = st.none() | st.builds(ElfFile, PATHS, PROBLEMS)
PROVIDERS = st.none() | st.builds(
    ProviderLibrary,
    *(PATHS, PROBLEMS, some(SONAMES, 4), some(PATHS)),
    st.none() | some(st.builds(Architecture, st.integers(5, 12), st.integers(0, 9), FLAGS, FLAGS)),
)
ENVIRONMENTS = st.builds(
    Environment,
    host=st.builds(
        Host,
        *(
            st.sampled_from(["Linux", "Windows", "Darwin", ""]),
            st.sampled_from(["x86_64", "aarch64", "AMD64", "arm64"]),
        ),
        *(st.none() | TEXT, st.none() | TEXT, st.none() | TEXT, st.sampled_from([(3, 10, 0), (3, 12, 1)])),
        *(st.just("CPython"), PATHS, st.none(), st.none() | st.just("docker"), FLAGS),
        *(st.none() | st.frozensets(st.sampled_from([0x1002, 0x10DE])), FLAGS),
    ),
    installer=st.builds(Installer, st.sampled_from(["pip", "uv"]), st.just("pip install"), st.just("pip uninstall -y")),
    packages=st.builds(
        Packages,
        st.builds(
            OnnxRuntime,
            *(st.none() | PATHS, FLAGS, some(DISTRIBUTIONS), some(DISTRIBUTIONS), st.none() | NAMES, st.none() | TEXT),
            *(VERSIONS, st.none() | PATHS, st.none() | PATHS, st.none() | PATHS, st.none() | PATHS),
        ),
        st.none() | st.builds(Torch, st.none() | TEXT, VERSIONS, PATHS),
        *(some(DISTRIBUTIONS), some(DISTRIBUTIONS)),
    ),
    extension=ELF_FILES,
    bridge=ELF_FILES,
    provider=PROVIDERS,
    libraries=some(
        st.builds(Resolution, st.sampled_from(LIBRARIES), SONAMES, FLAGS, some(CANDIDATES, 1), some(CANDIDATES)), 4
    ),
    mapped=some(PATHS),
    driver=st.builds(
        Driver,
        *(st.none() | PATHS, st.none() | TEXT, VERSIONS, st.none() | TEXT, some(PATHS)),
        st.builds(Nvml, FLAGS, st.none() | TEXT, st.none() | TEXT, VERSIONS, some(GPUS)),
    ),
    variables=st.builds(
        Variables,
        st.dictionaries(
            st.sampled_from(["CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_DRIVER_CAPABILITIES"]),
            st.sampled_from(
                ["", "0", "1,0", "-1", "0,-1,1", " 7 ", UUID, "GPU-2", "MIG-1", "NoDevFiles", "99999", "x"]
            ),
        ),
        st.none() | st.just({}),
    ),
)
CUDA_STATES = st.none() | st.builds(
    CudaState, st.none() | st.sampled_from([0, 2, 3, 35, 46, 100, 101, 209, 700, 803, 999, 123456]), st.none() | some(
        st.builds(
        CudaDevice, st.integers(0, 3), st.none() | st.just(UUID), st.none() | TEXT, PAIRS, st.none(), st.none())),
        st.just(1),
)  # fmt: skip
REPORTS = st.none() | st.builds(
    PreloadReport,
    PROVIDERS,
    some(st.builds(LoadedLibrary, SONAMES, PATHS, st.just("torch"), PATHS, FLAGS)),
    some(st.builds(MissingLibrary, SONAMES, FLAGS, st.none() | st.just("nvidia-cublas~=13.0"), some(CANDIDATES))),
    some(CANDIDATES),
    FLAGS,
    st.none() | st.integers(11, 14),
)
PROBES = st.none() | st.builds(
    ProbeResult,
    some(st.builds(ProbeStep, st.sampled_from(["driver", "import", "session", "model"]), FLAGS, MESSAGES), 4),
    *(FLAGS, st.none() | st.integers(-11, 1), st.none() | st.just("SIGBUS"), FLAGS),
    *(st.none() | st.sampled_from(["start", "driver", "libraries", "import", "provider", "session", "model"]),),
    *(st.just(1.0), TEXT),
)
FACTS = st.builds(
    Facts,
    ENVIRONMENTS,
    st.builds(
        Request,
        device=DEVICES,
        cudnn_operators=some(st.just("Conv")),
        cufft_operators=some(st.just("Rfft")),
        cudnn_disabled=FLAGS,
        model=st.none()
        | st.builds(
            ModelFacts, PATHS, PROBLEMS, operators=st.frozensets(st.tuples(TEXT, TEXT)), missing_data=some(PATHS)
        ),
    ),
    st.builds(
        Observed,
        st.none() | MESSAGES,
        st.none() | FLAGS,
        st.none() | some(st.sampled_from(AVAILABLE)),
        REPORTS,
        st.none() | MESSAGES,
        CUDA_STATES,
        PROBES,
    ),
)

THOROUGH = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@THOROUGH
@given(FACTS)
def test_any_facts_are_judged(facts: Facts) -> None:
    problems = find_problems(facts)
    assert shown(problems) == shown(find_problems(facts)), "judging is deterministic and changes no facts"
    assert_in_order(problems)
    for problem in problems:
        assert isinstance(problem, GPUError)
        assert problem.summary
        assert problem.severity in ("fatal", "warning")
        assert str(problem).endswith(f"More: ortgpu explain {problem.code}")
        assert json.dumps(problem.as_dict())
        assert str(pickle.loads(pickle.dumps(problem))) == str(problem)


@THOROUGH
@given(facts=FACTS, text=MESSAGES | st.text(max_size=40))
def test_any_words_are_translated_or_left_alone(facts: Facts, text: str) -> None:
    found = of_construction(text, facts)
    if found is not None:
        assert found.summary
        assert found.severity == "fatal"
        assert json.dumps(found.as_dict())


@settings(THOROUGH, max_examples=60)
@given(FACTS)
def test_a_healthy_environment_stays_healthy_whatever_else_is_installed(facts: Facts) -> None:
    """Packages that are not ONNX Runtime, mapped libraries and the machine's name decide nothing."""
    other = facts.environment
    changed = replace(
        HEALTHY.environment,
        mapped=other.mapped,
        packages=replace(HEALTHY.environment.packages, torch=other.packages.torch, others=other.packages.others),
        host=replace(HEALTHY.environment.host, os_name=other.host.os_name, libc=other.host.libc),
    )
    assert find_problems(Facts(changed)) == ()


# Words of ONNX Runtime


PREFIX = (
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 std::conditional_t onnxruntime::CudaCall(...) "
)
SUFFIX = (
    " ; GPU=-1 ; hostname=h ; file=/onnxruntime_src/cuda_execution_provider.cc ; line=355 ; expr=cudaSetDevice(id);"
)


@pytest.mark.parametrize(
    ("text", "error", "details"),
    [
        (f"{PREFIX}CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version{SUFFIX}",
            "DriverTooOldError", {"needed_cuda": (13, 0)},),
        (f"{PREFIX}CUDA failure 100: no CUDA-capable device is detected{SUFFIX}", "NoDeviceError", {}),
        (f"{PREFIX}CUDA failure 101: invalid device ordinal{SUFFIX}", "DeviceNotFoundError", {}),
        (f"{PREFIX}CUDA failure 3: initialization error{SUFFIX}", "DriverUnusableError", {"cuda_code": 3}),
        (f"{PREFIX}CUDA failure 803: system has unsupported display driver / cuda driver combination{SUFFIX}",
            "DriverUnusableError", {"cuda_code": 803},),
        (f"{PREFIX}CUDA failure 999: unknown error{SUFFIX}", "DriverUnusableError", {"cuda_code": 999}),
        (f"{PREFIX}CUDA failure 46: all CUDA-capable devices are busy or unavailable{SUFFIX}", "DeviceBusyError", {}),
        (f"{PREFIX}CUDA failure 2: out of memory{SUFFIX}", "InsufficientDeviceMemoryError", {}),
        (f"{PREFIX}CUDA failure 700: an illegal memory access was encountered{SUFFIX}", "PoisonedContextError",
            {"cuda_code": 700},),
        (f"{PREFIX}CUDA failure 719: unspecified launch failure{SUFFIX}", "PoisonedContextError", {"cuda_code": 719}),
        ('Unknown provider option: "devise_id"', "ProviderOptionError", {"option": "devise_id"}),
        ("[ONNXRuntimeError] : 1 : FAIL : provider_options_utils.h:187 Parse Failed to parse provider option "
            '"arena_extend_strategy"', "ProviderOptionError", {"option": "arena_extend_strategy"},),
        ('[ONNXRuntimeError] : 1 : FAIL : Failed to map enum name to value: "x" for option "cudnn_conv_algo_search"',
            "ProviderOptionError", {"option": "cudnn_conv_algo_search"},),
        ("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: /src/bfc_arena.cc:376 void* "
            "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested buffer "
            "of size 4294967296\n", "InsufficientDeviceMemoryError", {"requested": 4294967296},),
        (f"{PREFIX}CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; expr=cublasCreate(&cublas_handle_);",
            "InsufficientDeviceMemoryError", {},),
        (f"{PREFIX}CUBLAS failure 3: the resource allocation failed ; GPU=0 ; expr=cublasCreate(&cublas_handle_);",
            "InsufficientDeviceMemoryError", {},),
        (f"{PREFIX}CUBLAS failure 1: the library was not initialized ; expr=cublasCreate(&cublas_handle_);",
            "InsufficientDeviceMemoryError", {},),
        (f"{PREFIX}CUBLAS failure 13: the function failed to launch on the GPU ; expr=cublasGemm()",
            "ProviderFailureError", {"library": "CUBLAS", "status": "CUBLAS_STATUS_EXECUTION_FAILED"},),
        (f"{PREFIX}CUBLAS failure 99: unrecognized status ; expr=cublasGemm()",
            "ProviderFailureError", {"library": "CUBLAS", "status": "status 99"},),
        (f"{PREFIX}CUBLAS failure 1: CUBLAS_STATUS_NOT_INITIALIZED ; expr=cublasCreate(&cublas_handle_);",
            "InsufficientDeviceMemoryError", {},),
        (f"{PREFIX}CUDNN failure 1: CUDNN_STATUS_NOT_INITIALIZED ; expr=cudnnCreate(&cudnn_handle_);",
            "InsufficientDeviceMemoryError", {},),
        ("CUDNN failure 1002: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "ProviderFailureError",
            {"library": "CUDNN", "status": "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"},),
        ("[ONNXRuntimeError] : 11 : EP_FAIL : CUDNN_FE failure 11: CUDNN_BACKEND_API_FAILED", "ProviderFailureError",
            {"status": "CUDNN_BACKEND_API_FAILED"},),
        ("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : cuDNN is not available. Install cuDNN, or set enable_cudnn=0",
            "LibraryNotFoundError", {"missing": ("libcudnn.so.9",)},),
        ("Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please install all dependencies",
            "ProviderFallbackError", {},),
    ],
)  # fmt: skip
def test_words_about_the_gpu(text: str, error: str, details: dict[str, Any]) -> None:
    found = of_construction(text, HEALTHY)
    assert found is not None
    assert type(found).__name__ == error
    assert {name: found.details()[name] for name in details} == details
    if not text.endswith('"'):
        assert PREFIX not in str(found), "the C++ signature tells a user nothing"


@pytest.mark.parametrize(
    ("text", "change", "error"),
    [
        ("CUDA failure 35: x", NO_DRIVER, "DriverNotFoundError"),
        ("CUDA failure 35: x", part("driver", cuda_version=(12, 8)), "DriverTooOldError"),
        ("CUDA failure 100: x", variables(CUDA_VISIBLE_DEVICES="-1"), "NoDeviceError"),
        ("CUDA failure 101: x", request(device=5), "DeviceNotFoundError"),
        ("cuDNN is unavailable or disabled", request(cudnn_disabled=True, cudnn_operators=("Conv",)),
            "ProviderOptionError",),
    ],
)  # fmt: skip
def test_words_and_facts_together(text: str, change: Change, error: str) -> None:
    found = of_construction(text, change(HEALTHY))
    assert type(found).__name__ == error


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[ONNXRuntimeError] : 3 : NO_SUCHFILE : Load model from /m.onnx failed: File doesn't exist",
        "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from /m.onnx failed:Protobuf parsing failed.",
        "[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model. Error: No Op registered for Foo",
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Foo(1) node with name ''",
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x for the following indices",
        "[ONNXRuntimeError] : 1 : FAIL : Load model failed: Unsupported model IR version: 99, max supported IR 11",
        "Specified provider 'CUDAExecutionProvider' is not in available provider names. Available: 'CPU'",
        "Required inputs (['x']) are missing from input feed ([]).",
        "failure 35, error 100, and 803 nodes",
    ],
)
def test_words_about_something_else(text: str) -> None:
    assert of_construction(text, HEALTHY) is None


def unmappable(soname: str) -> Resolution:
    path = f"{SITE}/nvidia/cu13/lib/{soname}"
    problem = f"{path}: failed to map segment from shared object"
    file = Candidate(soname, path, "nvidia wheels", f"{SITE}/nvidia", problem)
    return resolution(soname, found=False, rejected=(file,))


def test_a_file_that_may_not_be_mapped_is_not_installed_again() -> None:
    """A file system without execution, for which the loader has the same words as for want of memory."""
    kept = [found for found in HEALTHY.environment.libraries if found.soname != "libcublasLt.so.13"]
    environment = replace(HEALTHY.environment, libraries=(*kept, unmappable("libcublasLt.so.13")))
    problem = find_problems(replace(HEALTHY, environment=environment))[0]
    assert type(problem).__name__ == "LibraryNotFoundError"
    assert [fix.needs for fix in problem.fixes] == ["host"]
    assert f"{SITE}/nvidia/cu13/lib" in problem.fixes[0]
    assert "noexec" in problem.fixes[0]


def test_beside_it_what_is_absent_is_installed() -> None:
    kept = [f for f in HEALTHY.environment.libraries if not f.soname.startswith(("libcublasLt.", "libcurand."))]
    libraries = (*kept, unmappable("libcublasLt.so.13"), resolution("libcurand.so.10", found=False))
    problem = find_problems(replace(HEALTHY, environment=replace(HEALTHY.environment, libraries=libraries)))[0]
    assert [fix.kind for fix in problem.fixes] == ["manual", "shell"]
    assert "nvidia-curand" in problem.fixes[1]
    assert "nvidia-cublas" not in problem.fixes[1]
