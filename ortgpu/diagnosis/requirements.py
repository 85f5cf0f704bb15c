"""Compare the published requirements with what is installed.

The rows come from ONNX Runtime's pages about CUDA. Where the installed provider file differs, the row has its number,
and the note the page's. An unknown fact gives "unknown", never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from ..environment.gpu.driver import GPU
from ..environment.inspection import Environment
from ..environment.libraries.catalogue import major_of
from ..environment.libraries.search import Resolution
from ..environment.packages.metadata import numbers_of
from .checks.packages import CUDA_PLATFORMS, python_of
from .checks.surroundings import visible_gpus
from .remedies import fixes as remedies
from .remedies.releases import FOR_CUDA_13

Status = Literal["pass", "fail", "unknown"]
Met = bool | None  # None means unknown.

GB: Final = 10**9  # The tables count so: a machine sold with 8 GB shows a little less than 8 GiB.
_STATUS: Final[dict[Met, Status]] = {True: "pass", False: "fail", None: "unknown"}


@dataclass(frozen=True, slots=True)
class Requirement:
    """One row. ``found`` is the judged fact, or None if it is not known; ``note`` is for a person."""

    name: str
    minimum: str
    recommended: str
    found: str | None
    status_minimum: Status
    status_recommended: Status
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def row(
    name: str, minimum: str, recommended: str, found: str | None, met: tuple[Met, Met], note: str = ""
) -> Requirement:
    return Requirement(name, minimum, recommended, found, _STATUS[met[0]], _STATUS[met[1]], note)


def reaches(value: Any, minimum: Any, recommended: Any) -> tuple[Met, Met]:
    return (None, None) if value is None else (value >= minimum, value >= recommended)


def check_inference(environment: Environment) -> tuple[Requirement, ...]:
    unread = "for ONNX Runtime's tools; no session reads it"
    return (
        *(check(environment) for check in (_compute_capability, _cuda, _cudnn, _driver, _python)),
        *_host(environment),
        *(check(environment) for check in (_libraries, _engine, _cudnn_package)),
        _package(environment, "numpy", "1.21.6"),
        *(_package(environment, name, note=unread) for name in ("flatbuffers", "protobuf")),
    )


def _compute_capability(environment: Environment) -> Requirement:
    provider, gpus = environment.provider, visible_gpus(environment)
    capabilities = {_name(gpu): gpu.compute_capability for gpu in gpus if gpu.compute_capability}
    held = ", ".join(str(code) for code in (provider.architectures if provider is not None else None) or ())
    coverage = {
        name: provider.coverage(value) if provider is not None else None for name, value in capabilities.items()
    }
    note = "from the provider file, not the published 3.7" if held else ""
    for kind, says in (("none", "no code"), ("jit", "the driver compiles it at first use")):
        if held and (names := [name for name, how in coverage.items() if how == kind]):
            note += f"; {says} for {', '.join(names)}"
    return row(
        "compute capability",
        f"one of {held}" if held else "3.7, published",
        "8.0, which Flash Attention needs",
        ", ".join(dict.fromkeys(map(dotted, capabilities.values()))) or None,
        (
            _any(None if how is None else how != "none" for how in coverage.values()),
            _any(capability >= (8, 0) for capability in capabilities.values()),
        ),
        note,
    )


def _cuda(environment: Environment) -> Requirement:
    published = "published: 11.x, better 12.x or, from ONNX Runtime 1.27 on, 13.x"
    major = environment.cuda_major
    if major is None:
        text = "not known: no provider file says"
        return row("CUDA", text, text, None, (None, None), published)
    linked = [library.chosen for library in environment.libraries if library.required and not library.spec.is_cudnn]
    sources = [file.source for file in linked if file is not None]
    met, number = len(sources) == len(linked), f"{major}.x"
    fact = f"{number}: {len(sources)} of {len(linked)} linked libraries, from {', '.join(dict.fromkeys(sources))}"
    note = f"the provider file links this major and no other; {published}"
    return row("CUDA", number, number, fact if sources else "none of the linked libraries", (met, met), note)


def _cudnn(environment: Environment) -> Requirement:
    resolution = _library(environment, "libcudnn")
    if resolution is None:
        return row("cuDNN", "8.x, published", "9.x, published", None, (None, None))
    number, met = f"{major_of(resolution.soname)}.x", resolution.chosen is not None
    fact = f"{number}: {resolution.chosen.path}" if resolution.chosen is not None else "not found"
    note = "opened at the first convolution: models without operators that run on cuDNN do without"
    if resolution.required:
        note = "the provider file links it: without it no session opens"
    return row("cuDNN", number, number, fact, (met, met), note)


def _driver(environment: Environment) -> Requirement:
    driver, major = environment.driver, environment.cuda_major
    version, supported = driver.version, driver.supported_cuda
    lowest = remedies.lowest_driver(environment, major or 0)
    recommended = "535" if major == 12 else lowest
    note = "published: 470 (CUDA 11), 525 (CUDA 12), 580 (CUDA 13)"
    if driver.libcuda is None:
        missing = "no driver" if version is None else f"{version}, without its CUDA library"
        return row("driver", lowest or "470", recommended or "535", missing, (False, False), note)
    met: Met = None
    if major is not None and supported is not None:
        # The CUDA that libcuda supports decides, not the number: a forward-compatibility libcuda is newer than both.
        met = supported[0] >= major
    elif lowest is not None and version is not None:
        met = is_at_least(version, lowest)
    better = met
    if met and major == 12:
        better = None if version is None else is_at_least(version, "535")
    fact = f"{version or 'version not known'}" + (f", CUDA up to {dotted(supported)}" if supported else "")
    low, high = (f"{number} for CUDA {major}" if number else None for number in (lowest, recommended))
    known = fact if version or supported else None
    return row("driver", low or "470, published", high or "535, published", known, (met, better), note)


def _python(environment: Environment) -> Requirement:
    version, newest, installed = environment.host.python[:2], FOR_CUDA_13.pythons[1], environment.packages.onnxruntime
    built_for = python_of(installed)
    has_none = installed.extension is None and version > newest
    fits, note = built_for in (None, version) and not has_none, ""
    if has_none:
        note = f"no wheel of onnxruntime-gpu is known for a Python newer than {dotted(newest)}"
    elif not fits and built_for is not None:
        note = f"the installed ONNX Runtime is built for Python {dotted(built_for)}"
    elif version < FOR_CUDA_13.pythons[0]:
        note = "onnxruntime-gpu for CUDA 13 needs 3.11"
    return row("Python", "3.10", "3.12", dotted(environment.host.python), (fits, version >= (3, 12) and fits), note)


def _host(environment: Environment) -> Iterator[Requirement]:
    host = environment.host
    platform = (host.system, host.machine)
    met = (platform in CUDA_PLATFORMS, platform == ("Linux", "x86_64"))
    yield row("operating system", "Linux or Windows, x86_64", "Linux x86_64", " ".join(platform), met)
    note = "the smaller of what the machine has and what this process may use"
    yield _size("memory", 8, 32, host.memory_total, note)
    sizes = [gpu.memory_total for gpu in visible_gpus(environment) if gpu.memory_total is not None]
    note = "the largest GPU counts" if len(sizes) > 1 else ""
    yield _size("GPU memory", 4, 16, max(sizes, default=None), note)


def _size(name: str, minimum: int, recommended: int, size: int | None, note: str) -> Requirement:
    fact = f"{size / GB:.1f} GB" if size is not None else None
    return row(name, f"{minimum} GB", f"{recommended} GB", fact, reaches(size, minimum * GB, recommended * GB), note)


def _libraries(environment: Environment) -> Requirement:
    whole = [library for library in environment.libraries if library.spec.part_of is None]
    linked, lazy = ([library for library in whole if library.required is is_required] for is_required in (True, False))
    absent = [library.soname for library in whole if library.chosen is None]
    fact = f"{len(whole) - len(absent)} of {len(whole)}" + (f"; not found: {', '.join(absent)}" if absent else "")
    all_linked = all(library.chosen is not None for library in linked) if linked else None
    return row(
        "libraries",
        ", ".join(map(short_name, linked)) or "cublas, cublasLt, cudart, cufft, curand, cudnn, published",
        f"also {', '.join(map(short_name, lazy))}" if lazy else "nvrtc, nvJitLink, published",
        fact if whole else None,
        (all_linked, not absent if whole else None),
        "minimum: what the provider file links; recommended: what it opens on demand" if whole else "",
    )


def _engine(environment: Environment) -> Requirement:
    installed = environment.packages.onnxruntime
    name = installed.build_name or next((owner.name for owner in installed.owners), None)
    nameless = "of unknown name" if installed.folder else "not installed"
    fact = " ".join(filter(None, (name, installed.version))) or nameless
    whole = installed.importable and installed.provider_library is not None
    note = "" if not installed.folder or whole else f"there is no CUDA provider in {installed.folder}"
    return row("onnxruntime-gpu", "with the CUDA provider", "1.18 or newer", fact, (whole, whole), note)


def _cudnn_package(environment: Environment) -> Requirement:
    resolution = _library(environment, "libcudnn")
    chosen = resolution.chosen if resolution is not None else None
    cudnn = str(major_of(resolution.soname) if resolution is not None else 9)
    name = f"nvidia-cudnn-cu{environment.cuda_major or 13}"
    version = next((package.version for package in environment.packages.nvidia if package.name == name), None)
    met, fact = None if resolution is None else chosen is not None, version
    if version is not None:
        met = version.partition(".")[0] == cudnn
    elif resolution is not None:
        fact = f"not this package; cuDNN comes from {chosen.source}" if chosen is not None else "not installed"
    note = "published so; a cuDNN from anywhere else serves as well"
    return row(name, f"{cudnn}.x", f"{cudnn}.x", fact, (met, met), note)


def _package(environment: Environment, name: str, lowest: str = "any", note: str = "") -> Requirement:
    installed = environment.packages.other(name)
    if installed is not None:
        return row(name, lowest, lowest, installed.version, (True, True), note)
    absent = "not on record in this environment"  # Images often have the files without the metadata.
    return row(name, lowest, lowest, None, (None, None), f"{absent}; {note}" if note else absent)


def _any(answers: Iterable[Met]) -> Met:
    """Return True if a GPU passes; None if none passes and the answer for a GPU is unknown; else False."""
    values = list(answers)
    if any(values):
        return True
    return None if not values or None in values else False


def _library(environment: Environment, stem: str) -> Resolution | None:
    return next((library for library in environment.libraries if library.spec.stem == stem), None)


def short_name(library: Resolution) -> str:
    return library.soname.removeprefix("lib").replace(".so.", " ")


def _name(gpu: GPU) -> str:
    return gpu.name or gpu.uuid or f"GPU {gpu.index}"


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def is_at_least(version: str, lowest: str) -> bool:
    return numbers_of(version) >= numbers_of(lowest)
