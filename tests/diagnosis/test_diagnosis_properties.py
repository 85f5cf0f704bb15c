"""The diagnosis of facts of every kind: it never raises, is deterministic, and finds nothing on a healthy machine."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from typing import Any, get_type_hints

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortgpu.diagnosis.checks.classifier import explain_opening
from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.facts import Facts, Observed, Request
from ortgpu.diagnosis.probe.result import ProbeResult, ProbeStep
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.environment.gpu.driver import GPU, Driver, Nvml, RefusedNode
from ortgpu.environment.host import Host
from ortgpu.environment.inspection import Environment
from ortgpu.environment.libraries.catalogue import LIBRARIES
from ortgpu.environment.libraries.library_file import LibraryFile
from ortgpu.environment.libraries.search import Candidate, Resolution
from ortgpu.environment.libraries.wheel import Architecture, ProviderLibrary
from ortgpu.environment.packages.installed import Distribution, OnnxRuntime, Packages, Torch
from ortgpu.environment.packages.installer import Installer
from ortgpu.environment.variables import Variables
from ortgpu.errors import GPUError
from ortgpu.model.contents import ModelFacts
from ortgpu.provider.preloading import LoadedLibrary, MissingLibrary, PreloadReport
from tests.support.made_facts import AVAILABLE, FOLDER, H200, HEALTHY, PROVIDER, SITE, SYMBOL, UUID, assert_in_order

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


def shown(problems: tuple[GPUError, ...]) -> list[tuple[Any, ...]]:
    return [(type(one), str(one), one.severity, one.consequence_of, one.details(), one.fixes) for one in problems]


def rest(cls: type[Any], given: int) -> dict[str, st.SearchStrategy[Any]]:
    """For every field of a dataclass after so many: anything of its type, so that none is left at its default."""
    types = get_type_hints(cls)
    return {field.name: st.from_type(types[field.name]) for field in fields(cls)[given:]}


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
ELF_FILES = st.none() | st.builds(LibraryFile, PATHS, PROBLEMS)
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
            *(VERSIONS, st.none() | PATHS, st.none() | PATHS, st.none() | PATHS),
            st.none() | PATHS | st.just("/app.pyz/onnxruntime/__init__.py"),
        ),
        st.none() | st.builds(Torch, st.none() | TEXT, VERSIONS, PATHS),
        *(some(DISTRIBUTIONS), some(DISTRIBUTIONS)),
        **rest(Packages, 4),
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
        st.builds(
            Nvml, FLAGS, st.none() | TEXT, st.none() | TEXT, VERSIONS, some(GPUS), st.sampled_from([None, 4, 9, 15, 18])
        ),
        some(st.builds(RefusedNode, PATHS, st.sampled_from(["EACCES", "EPERM"]), st.none() | TEXT)),
        **rest(Driver, 7),
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
MISSING = some(st.builds(MissingLibrary, SONAMES, FLAGS, st.none() | st.just("nvidia-cublas~=13.0"), some(CANDIDATES)))
REPORTS = st.none() | st.builds(
    PreloadReport,
    PROVIDERS,
    some(st.builds(LoadedLibrary, SONAMES, PATHS, st.just("torch"), PATHS, FLAGS)),
    MISSING,
    some(CANDIDATES),
    FLAGS,
    st.none() | st.integers(11, 14),
    some(PATHS),
)
LOADING = st.builds(
    lambda missing, mixed: ProbeStep("libraries", False, data={"not_loaded": missing, "cudnn_mixed": mixed}),
    MISSING,
    some(PATHS),
)
PROBES = st.none() | st.builds(
    ProbeResult,
    some(st.builds(ProbeStep, st.sampled_from(["driver", "import", "session", "model"]), FLAGS, MESSAGES) | LOADING, 4),
    *(FLAGS, st.none() | st.integers(-11, 1), st.none() | st.just("SIGBUS"), FLAGS),
    *(st.none() | st.sampled_from(["start", "driver", "libraries", "import", "provider", "session", "model"]),),
    *(st.just(1.0), TEXT),
    **rest(ProbeResult, 8),
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
            ModelFacts,
            PATHS,
            PROBLEMS,
            operators=st.frozensets(st.tuples(TEXT, TEXT)),
            data_problems=some(st.tuples(PATHS, PROBLEMS)),
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
        st.none() | FLAGS,
        numpy_error=st.none() | MESSAGES,
    ),
)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    """By this name hypothesis tells of it: written out at its length, a strategy is a warning."""
    return draw(FACTS)


THOROUGH = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@THOROUGH
@given(any_facts())
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
@given(facts=any_facts(), text=MESSAGES | st.text(max_size=40))
def test_any_words_are_translated_or_left_alone(facts: Facts, text: str) -> None:
    found = explain_opening(text, facts)
    if found is not None:
        assert found.summary
        assert found.severity == "fatal"
        assert json.dumps(found.as_dict())


OTHER_GPU = st.builds(
    replace,
    st.just(H200),
    uuid=st.sampled_from(["GPU-22222222-2222-3333-4444-555555555555", None]),
    compute_capability=PAIRS,
    compute_mode=st.none() | st.sampled_from(["default", "exclusive-process", "prohibited"]),
    mig_enabled=st.none() | FLAGS,
)


@settings(THOROUGH, max_examples=60)
@given(facts=any_facts(), others=some(OTHER_GPU), nvml=FLAGS, data=st.data())
def test_a_healthy_environment_stays_healthy_whatever_else_is_there(
    facts: Facts, others: tuple[GPU, ...], nvml: bool, data: st.DataObject
) -> None:
    """Packages that are not ONNX Runtime, mapped libraries, the machine's name, what it runs in and GPUs beside the one
    that serves decide nothing. Nor does what is not known."""
    other, healthy = facts.environment, HEALTHY.environment
    driver = data.draw(st.sampled_from(["580.65.06", "590.44.01", None]))
    gpus = (*others, H200) if nvml else ()
    shown = data.draw(st.sampled_from([{}, {"CUDA_VISIBLE_DEVICES": UUID}, {"CUDA_VISIBLE_DEVICES": str(len(others))}]))
    changed = replace(
        healthy,
        mapped=other.mapped,
        installer=other.installer,
        packages=replace(healthy.packages, torch=other.packages.torch, others=other.packages.others),
        host=replace(
            healthy.host,
            os_name=other.host.os_name,
            libc=other.host.libc,
            kernel=other.host.kernel,
            memory_total=other.host.memory_total,
            container=other.host.container,
            service=other.host.service,
            display_vendors=data.draw(st.sampled_from([None, frozenset(), frozenset({0x10DE, 0x8086})])),
        ),
        driver=replace(
            healthy.driver,
            kernel_version=driver,
            libcuda_entry=other.driver.libcuda_entry,
            cuda_version=data.draw(st.sampled_from([(13, 0), (13, 4), None])),
            nvml=Nvml(nvml, None if nvml else "NVML Shared Library Not Found", driver, None, gpus),
        ),
        variables=Variables(shown, None),
    )
    assert find_problems(Facts(changed)) == ()
