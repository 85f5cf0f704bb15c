"""Facts that are made up: those of a healthy machine, and changes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ortgpu.diagnosis.facts import Facts, Observed
from ortgpu.diagnosis.probe.result import ProbeResult, ProbeStep
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.environment.gpu.driver import GPU, Driver, Nvml, RefusedNode
from ortgpu.environment.host import Host
from ortgpu.environment.inspection import Environment
from ortgpu.environment.libraries.catalogue import BY_STEM, LIBRARIES, spec_for
from ortgpu.environment.libraries.library_file import LibraryFile
from ortgpu.environment.libraries.search import Candidate, Resolution
from ortgpu.environment.libraries.wheel import Architecture, ProviderLibrary
from ortgpu.environment.packages.installed import Distribution, OnnxRuntime, Packages
from ortgpu.environment.packages.installer import Installer
from ortgpu.environment.variables import Variables
from ortgpu.errors import GPUError
from ortgpu.provider.preloading import LoadedLibrary, MissingLibrary, PreloadReport

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
        extension=LibraryFile(EXTENSION, machine="x86_64"),
        bridge=LibraryFile(BRIDGE, machine="x86_64"),
        provider=ProviderLibrary(
            PROVIDER,
            None,
            (*NEEDED, "libcuda.so.1", "libc.so.6"),
            (),
            (Architecture(8, 0, False, False), Architecture(9, 0, False, True)),
        ),
        libraries_by_cuda=dict.fromkeys((11, 12, 13), tuple(BY_STEM)),
        libraries=tuple(resolution(spec.sonames[13]) for spec in LIBRARIES if not spec.stem.endswith("_infer")),
        mapped=(),
        driver=Driver(
            libcuda="/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            libcuda_error=None,
            cuda_version=(13, 0),
            kernel_version="580.65.06",
            device_nodes=("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"),
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


def refused(*nodes: RefusedNode) -> Change:
    return part("driver", refused_nodes=nodes)


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


def probed_without(*missing: MissingLibrary) -> Change:
    return probed(ProbeStep("libraries", False, data={"not_loaded": missing}))


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


def assert_in_order(problems: tuple[GPUError, ...]) -> None:
    """Fatal root causes, their consequences, then warnings; and a consequence names something that was found."""
    ranks = [(one.severity != "fatal", one.consequence_of is not None) for one in problems]
    assert ranks == sorted(ranks)
    causes = {one.code for one in problems if one.severity == "fatal" and one.consequence_of is None}
    assert {one.consequence_of for one in problems} - {None} <= causes
