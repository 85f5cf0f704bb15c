"""Compare the published requirements with what is installed.

Pure functions over the facts. The rows are those of ONNX Runtime's pages about CUDA. If the installed provider file
differs from the page, the row states what the file says, and the note names the page's number. An unknown fact gives
"unknown", never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..environment.gpu.driver import GPU
from ..environment.inspection import Environment
from ..environment.libraries.catalogue import major_of
from ..environment.libraries.search import Resolution
from ..environment.packages.metadata import numbers_of
from .checks.packages import has_cuda
from .checks.surroundings import visible_gpus
from .remedies import fixes as remedies
from .remedies.releases import FOR_CUDA_13

Status = Literal["pass", "fail", "unknown"]

_GB = 10**9  # as the tables count: a machine sold with 8 GB shows a little less than 8 GiB


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


def check_inference(environment: Environment) -> tuple[Requirement, ...]:
    """Return every row of the table for inference with CUDA, in its order."""
    return tuple(row(environment) for row in _ROWS)


def _compute_capability(environment: Environment) -> Requirement:
    provider = environment.provider
    known = [gpu for gpu in visible_gpus(environment) if gpu.compute_capability is not None]
    capabilities = [gpu.compute_capability for gpu in known if gpu.compute_capability is not None]
    held = tuple(str(one) for one in (provider.architectures if provider is not None else None) or ())
    coverage = [provider.coverage(one) if provider is not None else None for one in capabilities]
    note = ""
    if held:
        without = [_name(gpu) for gpu, covered in zip(known, coverage, strict=True) if covered == "none"]
        compiled = [_name(gpu) for gpu, covered in zip(known, coverage, strict=True) if covered == "jit"]
        note = "from the provider file, not the published 3.7"
        note += f"; no code for {', '.join(without)}" if without else ""
        note += f"; the driver compiles it at first use for {', '.join(compiled)}" if compiled else ""
    return Requirement(
        "compute capability",
        f"one of {', '.join(held)}" if held else "3.7, published",
        "8.0, which Flash Attention needs",
        ", ".join(dict.fromkeys(dotted(one) for one in capabilities)) or None,
        _any(None if covered is None else covered != "none" for covered in coverage),
        _any(one >= (8, 0) for one in capabilities),
        note,
    )


def _cuda(environment: Environment) -> Requirement:
    major = environment.cuda_major
    linked = [library for library in environment.libraries if library.required and not library.spec.is_cudnn]
    found = [library for library in linked if library.chosen is not None]
    status: Status = "unknown" if major is None else "pass" if len(found) == len(linked) else "fail"
    text = "not known: no provider file says" if major is None else f"{major}.x"
    if found:
        places = dict.fromkeys(library.chosen.source for library in found if library.chosen is not None)
        described = f"{major}.x: {len(found)} of {len(linked)} linked libraries, from {', '.join(places)}"
    else:
        described = "none of the linked libraries"
    published = "published: 11.x, better 12.x or, from ONNX Runtime 1.27 on, 13.x"
    note = published if major is None else f"the provider file links this major and no other; {published}"
    return Requirement("CUDA", text, text, described if major is not None else None, status, status, note)


def _cudnn(environment: Environment) -> Requirement:
    resolution = _library(environment, "libcudnn")
    if resolution is None:
        return Requirement("cuDNN", "8.x, published", "9.x, published", None, "unknown", "unknown")
    number = major_of(resolution.soname)
    found = None if resolution.chosen is None else f"{number}.x: {resolution.chosen.path}"
    status: Status = "pass" if found else "fail"
    note = (
        "the provider file links it: without it no session opens"
        if resolution.required
        else "opened at the first convolution: models without operators that run on cuDNN do without"
    )
    return Requirement("cuDNN", f"{number}.x", f"{number}.x", found or "not found", status, status, note)


def _driver(environment: Environment) -> Requirement:
    driver, major = environment.driver, environment.cuda_major
    version, supported = driver.version, driver.supported_cuda
    lowest = remedies.lowest_driver(environment, major or 0)
    recommended = "535" if major == 12 else lowest
    found = f"{version or 'version not known'}" + (f", CUDA up to {dotted(supported)}" if supported else "")
    note = "published: 470 (CUDA 11), 525 (CUDA 12), 580 (CUDA 13)"
    if driver.libcuda is None:
        missing = "no driver" if version is None else f"{version}, without its CUDA library"
        return Requirement("driver", lowest or "470", recommended or "535", missing, "fail", "fail", note)
    minimum: Status = "unknown"
    if major is not None and supported is not None:
        # The CUDA that libcuda supports decides, not the number: a forward-compatibility libcuda is newer than both.
        minimum = "pass" if supported[0] >= major else "fail"
    elif lowest is not None and version is not None:
        minimum = "pass" if at_least(version, lowest) else "fail"
    better: Status = minimum
    if minimum == "pass" and major == 12:
        better = "unknown" if version is None else "pass" if at_least(version, "535") else "fail"
    return Requirement(
        "driver",
        f"{lowest} for CUDA {major}" if lowest else "470, published",
        f"{recommended} for CUDA {major}" if recommended else "535, published",
        found if version or supported else None,
        minimum,
        better,
        note,
    )


def _python(environment: Environment) -> Requirement:
    host = environment.host
    version = host.python[:2]
    built_for = _python_of(environment)
    newest = FOR_CUDA_13.pythons[1]
    has_none = environment.packages.onnxruntime.extension is None and version > newest
    fits = built_for in (None, version) and not has_none
    note = "" if fits or built_for is None else f"the installed ONNX Runtime is built for Python {dotted(built_for)}"
    if not note and version < FOR_CUDA_13.pythons[0]:
        note = "onnxruntime-gpu for CUDA 13 needs 3.11"
    if has_none:
        note = f"no wheel of onnxruntime-gpu is known for a Python newer than {dotted(newest)}"
    return Requirement(
        "Python",
        "3.10",
        "3.12",
        dotted(host.python),
        "pass" if fits else "fail",
        "pass" if version >= (3, 12) and fits else "fail",
        note,
    )


def _operating_system(environment: Environment) -> Requirement:
    host = environment.host
    here = (host.system, host.machine)
    return Requirement(
        "operating system",
        "Linux or Windows, x86_64",
        "Linux x86_64",
        " ".join(here),
        "pass" if has_cuda(*here) else "fail",
        "pass" if here == ("Linux", "x86_64") else "fail",
    )


def _memory(environment: Environment) -> Requirement:
    size = environment.host.memory_total
    note = "the smaller of what the machine has and what this process may use"
    return _sizes("memory", 8, 32, [size] if size is not None else [], note)


def _gpu_memory(environment: Environment) -> Requirement:
    sizes = [gpu.memory_total for gpu in visible_gpus(environment) if gpu.memory_total is not None]
    return _sizes("GPU memory", 4, 16, sizes, "the largest GPU counts" if len(sizes) > 1 else "")


def _libraries(environment: Environment) -> Requirement:
    whole = [library for library in environment.libraries if library.spec.part_of is None]
    linked = [library for library in whole if library.required]
    lazy = [library for library in whole if not library.required]
    absent = [library.soname for library in whole if library.chosen is None]
    here = len(whole) - len(absent)
    return Requirement(
        "libraries",
        ", ".join(short_name(library) for library in linked)
        or "cublas, cublasLt, cudart, cufft, curand, cudnn, published",
        f"also {', '.join(short_name(library) for library in lazy)}" if lazy else "nvrtc, nvJitLink, published",
        f"{here} of {len(whole)}" + (f"; not found: {', '.join(absent)}" if absent else "") if whole else None,
        _all(library.chosen is not None for library in linked),
        _all(library.chosen is not None for library in whole),
        "minimum: what the provider file links; recommended: what it opens at need" if whole else "",
    )


def _engine(environment: Environment) -> Requirement:
    installed = environment.packages.onnxruntime
    name = installed.build_name or next((owner.name for owner in installed.owners), None)
    nameless = "of unknown name" if installed.folder else "not installed"
    found = " ".join(filter(None, (name, installed.version))) or nameless
    whole = installed.importable and installed.provider_library is not None
    status: Status = "pass" if whole else "fail"
    note = "" if not installed.folder or whole else f"there is no CUDA provider in {installed.folder}"
    return Requirement("onnxruntime-gpu", "with the CUDA provider", "1.18 or newer", found, status, status, note)


def _cudnn_package(environment: Environment) -> Requirement:
    major, resolution = environment.cuda_major, _library(environment, "libcudnn")
    cudnn = str(major_of(resolution.soname) if resolution is not None else 9)
    name = f"nvidia-cudnn-cu{major}" if major is not None else "nvidia-cudnn-cu13"
    wheel = next((one for one in environment.packages.nvidia if one.name == name), None)
    status: Status = "unknown"
    found = None
    if wheel is not None and wheel.version is not None:
        status, found = "pass" if wheel.version.partition(".")[0] == cudnn else "fail", wheel.version
    elif resolution is not None and resolution.chosen is not None:
        status, found = "pass", f"not this package; cuDNN comes from {resolution.chosen.source}"
    elif resolution is not None:
        status, found = "fail", "not installed"
    note = "published so; a cuDNN from anywhere else serves as well"
    return Requirement(name, f"{cudnn}.x", f"{cudnn}.x", found, status, status, note)


_ROWS: tuple[Callable[[Environment], Requirement], ...] = (
    _compute_capability,
    _cuda,
    _cudnn,
    _driver,
    _python,
    _operating_system,
    _memory,
    _gpu_memory,
    _libraries,
    _engine,
    _cudnn_package,
    lambda environment: _package(environment, "numpy", "1.21.6"),
    lambda environment: _package(environment, "flatbuffers", note="for ONNX Runtime's tools; no session reads it"),
    lambda environment: _package(environment, "protobuf", note="for ONNX Runtime's tools; no session reads it"),
)


def _package(environment: Environment, name: str, lowest: str = "any", note: str = "") -> Requirement:
    installed = environment.packages.other(name)
    version = installed.version if installed is not None else None
    status: Status = "unknown" if installed is None else "pass"
    if installed is None:  # images often have its files without the metadata
        note = "not on record in this environment" + (f"; {note}" if note else "")
    return Requirement(name, lowest, lowest, version, status, status, note)


def _sizes(name: str, minimum: int, recommended: int, found: list[int], note: str) -> Requirement:
    return Requirement(
        name,
        f"{minimum} GB",
        f"{recommended} GB",
        f"{max(found) / _GB:.1f} GB" if found else None,
        _any(size >= minimum * _GB for size in found),
        _any(size >= recommended * _GB for size in found),
        note,
    )


def _any(answers: Iterable[bool | None]) -> Status:
    """Pass if one of several GPUs passes; an unknown one keeps the answer open if none does."""
    found = list(answers)
    if any(found):
        return "pass"
    return "unknown" if not found or None in found else "fail"


def _all(answers: Iterable[bool]) -> Status:
    found = list(answers)
    return "unknown" if not found else "pass" if all(found) else "fail"


def _library(environment: Environment, stem: str) -> Resolution | None:
    return next((library for library in environment.libraries if library.spec.stem == stem), None)


def short_name(library: Resolution) -> str:
    """Return ``cublas 13`` for libcublas.so.13."""
    return library.soname.removeprefix("lib").replace(".so.", " ")


def _python_of(environment: Environment) -> tuple[int, int] | None:
    """Return the Python that the extension module is built for, if its file name says so."""
    path = environment.packages.onnxruntime.extension or ""
    match = re.search(r"\.(?:cpython-|cp)(\d)(\d+)[^/\\]*$", path)
    return (int(match[1]), int(match[2])) if match else None


def _name(gpu: GPU) -> str:
    return gpu.name or gpu.uuid or f"GPU {gpu.index}"


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def at_least(version: str, lowest: str) -> bool:
    return numbers_of(version) >= numbers_of(lowest)
