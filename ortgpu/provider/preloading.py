"""Load the CUDA libraries that the installed provider needs, in order of dependency.

ONNX Runtime opens its provider later by name. The loader then finds every dependency in the process by its SONAME.
Handles stay open for the life of the process: libraries that registered with the driver cannot be closed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from ..environment.libraries.catalogue import CUDNN_CORE_PARTS, major_of, stem_of
from ..environment.libraries.library_file import read_library
from ..environment.libraries.loader import Loader, loader_of_this_process
from ..environment.libraries.loader_words import lacks_function, lacks_symbol
from ..environment.libraries.places import Source
from ..environment.libraries.search import Candidate, Resolution, folders_of, places_for, resolve
from ..environment.libraries.wheel import ProviderLibrary, provider_beside, read_provider
from ..environment.packages.installed import Packages, locate_packages
from ..process.background import fork_safe_lock, this_thread
from ..process.untranslated import untranslated

logger = logging.getLogger("ortgpu")

OPENING = "opening %s"  # logged before the call of the loader, since that may end the process or hang

_lock = fork_safe_lock()


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A library of this process. ``required``: the provider links it, and does not just open it on demand."""

    soname: str
    path: str
    source: Source
    root: str
    required: bool


@dataclass(frozen=True, slots=True)
class MissingLibrary:
    """A library that was not found or did not load. ``rejected``: unusable files, with reasons."""

    soname: str
    required: bool
    wheel: str | None  # pip requirement of the distribution that ships it
    rejected: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class PreloadReport:
    """The result of :func:`preload`.

    Attributes:
        provider: the CUDA provider's file, the source of the list of needed libraries; None: there is no file.
        libraries: the loaded libraries in order of loading, each with its path and origin.
        missing: libraries that were not found or did not load. Some models work without libraries that are not
            ``required``.
        rejected: unusable files, each with the reason.
        driver_missing: libcuda.so.1 (nvcuda.dll) cannot be loaded.
        cudnn_cuda_major: the CUDA that the loaded cuDNN was built for; None: unknown, or no cuDNN was loaded.
        cudnn_mixed: paths of cuDNN's libraries in this process, if they belong to several releases.
    """

    provider: ProviderLibrary | None
    libraries: tuple[LoadedLibrary, ...]
    missing: tuple[MissingLibrary, ...]
    rejected: tuple[Candidate, ...]
    driver_missing: bool
    cudnn_cuda_major: int | None
    cudnn_mixed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if all libraries that the provider links are in the process. The driver does not count."""
        provider = self.provider
        return provider is not None and provider.problem is None and not self.missing_required

    @property
    def missing_required(self) -> tuple[MissingLibrary, ...]:
        """The ``missing`` libraries that the provider links: without them no session opens."""
        return tuple(library for library in self.missing if library.required)

    @property
    def roots(self) -> tuple[str, ...]:
        """All root folders of loaded toolkit libraries: one, unless libraries are mixed."""
        toolkit = (lib for lib in self.libraries if not stem_of(lib.soname).startswith("libcudnn"))
        return tuple(dict.fromkeys(library.root for library in toolkit))

    @property
    def cudnn(self) -> tuple[LoadedLibrary, int] | None:
        """The loaded cuDNN and the CUDA that it was built for; None if there is no cuDNN, or its CUDA is unknown."""
        loaded = (library for library in self.libraries if stem_of(library.soname) == "libcudnn")
        library = next(loaded, None)
        return (library, self.cudnn_cuda_major) if library is not None and self.cudnn_cuda_major else None

    def path_of(self, stem: str, *, linked: bool = False) -> str | None:
        """Return the path of a loaded library by the stem of its name, such as ``libcudnn`` on every system.

        ``linked``: only a library that the provider links.
        """
        return next(
            (lib.path for lib in self.libraries if stem_of(lib.soname) == stem and (lib.required or not linked)), None
        )


def preload(directory: str | os.PathLike[str] | None = None) -> PreloadReport:
    """Load the libraries of the installed CUDA provider, without importing ONNX Runtime.

    Args:
        directory: searched right after what this process has already loaded: a folder with libraries, a toolkit, or
            a ``site-packages/nvidia`` folder.

    Returns:
        the report. Missing or damaged files raise nothing; :func:`ortgpu.diagnose` judges them.

    Not promised: that other code loads the same file of a library later.
    """
    return load(plan(locate_packages(), directory))


@dataclass(frozen=True, slots=True)
class Plan:
    """The files for :func:`load` to open. Without ``resolutions`` the needs of the provider are unknown."""

    provider: ProviderLibrary | None
    resolutions: tuple[Resolution, ...]


@untranslated()
def plan(packages: Packages, directory: str | os.PathLike[str] | None = None, *, thorough: bool = True) -> Plan:
    """Find the libraries that the provider needs. ``thorough`` is passed to ``resolve``."""
    path = packages.onnxruntime.provider_library
    provider = read_provider(path) if path else None
    if provider is None or provider.problem or provider.cuda_major is None:
        return Plan(provider, ())
    places = places_for(provider, packages.torch, os.path.abspath(directory) if directory is not None else None)
    return Plan(provider, resolve(places, provider.needed, provider.cuda_major, thorough=thorough))


def load(found: Plan, *, lazily_opened: frozenset[str] | None = None) -> PreloadReport:
    """Open the libraries of a plan, dependencies first.

    The provider's linked libraries and ``libcudnn`` are always opened. ``lazily_opened`` holds the stems of other
    libraries to open; None is all. cuDNN's parts, cuFFT, nvRTC and nvJitLink are half of the loading time and of no use
    to many models.
    """
    provider, resolutions = found.provider, found.resolutions
    if provider is None or not resolutions:
        return PreloadReport(provider, (), (), (), False, None)
    loader = loader_of_this_process()
    with this_thread.holds, _lock:
        cuda_major = provider.cuda_major or 0
        loaded: list[LoadedLibrary] = []
        missing: list[MissingLibrary] = []
        rejected: list[Candidate] = []
        driver_missing = open_library(loader.driver, loader=loader) is not None
        cudnn: LoadedLibrary | None = None
        damaged: set[str] = set()  # sonames with nothing but damaged files
        for resolution in resolutions:
            rejected.extend(resolution.rejected)
            is_part = resolution.spec.part_of is not None
            if is_part and cudnn is None:
                continue
            candidates = _beside(cudnn, resolution.candidates) if is_part and cudnn else resolution.candidates
            stem = resolution.spec.stem
            should_open = lazily_opened is None or stem in lazily_opened or resolution.required or stem == "libcudnn"
            if candidates and not should_open:
                continue
            opened, refused = _load_one(resolution, candidates, damaged, loader)
            rejected.extend(refused)
            if opened is None and resolution.damaged:
                damaged.add(resolution.soname)
            if opened is not None:
                loaded.append(opened)
                cudnn = opened if stem == "libcudnn" else cudnn
            elif not is_part or _part_is_missing(resolution, refused, driver_missing):
                wheel = resolution.spec.wheels.get(cuda_major)
                passed_over = (*resolution.rejected, *refused)
                missing.append(MissingLibrary(resolution.soname, resolution.required, wheel, passed_over))
        for library in loaded:
            logger.debug("%s from %s (%s)", library.soname, library.path, library.source)
        return PreloadReport(
            provider,
            tuple(loaded),
            tuple(missing),
            tuple(dict.fromkeys(rejected)),
            driver_missing,
            _cuda_major_of_cudnn(cudnn, resolutions, damaged, loader),
            _mixed_cudnn(cudnn, loaded, loader),
        )


def _beside(cudnn: LoadedLibrary, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return the candidates beside ``cudnn``: parts of another cuDNN do not work with it (pytorch issue 185512)."""
    folders = folders_of(cudnn.path)
    return tuple(candidate for candidate in candidates if not folders.isdisjoint(folders_of(candidate.path)))


def _part_is_missing(part: Resolution, refused: list[Candidate], driver_missing: bool) -> bool:
    of_the_driver = r"libcuda\.so\.1|nvcuda\.dll" if driver_missing else r"undefined symbol: cu[A-Z]"
    if any(re.search(of_the_driver, candidate.problem or "") for candidate in refused):
        return False  # cuDNN's run-time compiler links the driver, so the driver is at fault.
    is_core = part.spec.stem in CUDNN_CORE_PARTS.get(major_of(part.soname) or 0, ())
    return is_core or part.required or bool(refused or part.damaged)


def _load_one(
    resolution: Resolution, candidates: tuple[Candidate, ...], damaged: Collection[str], loader: Loader
) -> tuple[LoadedLibrary | None, list[Candidate]]:
    refused: list[Candidate] = []
    for candidate in candidates:
        error = None
        if candidate.source != "already loaded":
            error = _why_not(candidate.path, damaged) or open_library(candidate.path, loader=loader)
        if error is None:
            library = LoadedLibrary(
                resolution.soname, candidate.path, candidate.source, candidate.root, resolution.required
            )
            return library, refused
        refused.append(dataclasses.replace(candidate, problem=error, unfit_for=_lacking(error, candidate.path, loader)))
    may_be_elsewhere = resolution.required and not resolution.damaged and not refused
    if may_be_elsewhere and open_library(resolution.soname, loader=loader) is None:
        # The loader may find a library outside of documented places: LD_PRELOAD, a namespace, an unknown cache format.
        path = next((p for p in loader.loaded() if _is_file_of(p, resolution.soname)), resolution.soname)
        return LoadedLibrary(resolution.soname, path, "system loader", os.path.dirname(path), True), refused
    return None, refused


def _why_not(path: str, damaged: Collection[str]) -> str | None:
    """Return why a file must not be opened: it links a damaged file, and the loader would die of SIGBUS."""
    if not damaged:
        return None
    linked = next((soname for soname in read_library(path).needed if soname in damaged), None)
    return f"links {linked}, of which there are only damaged files" if linked else None


def _lacking(words: str, path: str, loader: Loader) -> str | None:
    """Return the loaded library from another folder that lacks a symbol for this file."""
    lacked = lacks_symbol(words) or lacks_function(words)
    if lacked is None or (name := lacked[1]) is None:
        return None
    loaded = (file for file in loader.loaded() if _is_file_of(file, name))
    return next((file for file in loaded if folders_of(file).isdisjoint(folders_of(path))), None)


def is_of_cudnn(path: str) -> bool:
    return re.match(r"(lib)?cudnn", os.path.basename(path), re.IGNORECASE) is not None


def _is_file_of(path: str, soname: str) -> bool:
    return os.path.normcase(os.path.basename(path)).startswith(os.path.normcase(soname))


def open_library(path: str, mode: int = 0, *, loader: Loader | None = None) -> str | None:
    """Open a library and keep it. Return None, or the loader's message.

    ``mode`` 0 is RTLD_LOCAL: no symbol of the library may shadow another copy's.
    """
    by = loader or loader_of_this_process()
    if path in by.handles:
        return None
    logger.debug(OPENING, path)
    return by.open(path, mode)


def why_provider_does_not_load(provider: ProviderLibrary) -> str | None:
    """Return why the provider file does not open: the loader's message, or our own. None if it is open.

    Only for a process with ONNX Runtime imported. The file calls into ONNX Runtime while it is being loaded. It dies of
    SIGSEGV if ONNX Runtime is not there yet, or if another ONNX Runtime would answer.
    """
    return why_another_answers(provider_beside(provider.path, "shared")) or open_library(provider.path)


def why_another_answers(bridge: str) -> str | None:
    """Open the library between ONNX Runtime and its providers. Return why they would not call into it, or None."""
    loader = loader_of_this_process()
    refused = open_library(bridge, mode=getattr(os, "RTLD_GLOBAL", 0))
    return refused or loader.taken_from_another("Provider_GetHost", bridge)


def _cuda_major_of_cudnn(
    cudnn: LoadedLibrary | None, resolutions: tuple[Resolution, ...], damaged: Collection[str], loader: Loader
) -> int | None:
    """Return the CUDA that cuDNN was built for, or None if it does not say.

    ``libcudnn`` passes the question to one of its parts, and aborts the process if it cannot open this part.
    """
    if cudnn is None:
        return None
    stem = next(iter(CUDNN_CORE_PARTS.get(major_of(cudnn.soname) or 0, ())), None)
    part = next((resolution for resolution in resolutions if resolution.spec.stem == stem), None)
    if part is None or _load_one(part, _beside(cudnn, part.candidates), damaged, loader)[0] is None:
        return None
    return (loader.ask(cudnn.path, "cudnnGetCudartVersion") or 0) // 1000 or None


# In cuDNN 9 each part compares its release with the releases of its dependencies, without a GPU (cudnn_version.h).
_VERSION_CHECKS = {
    "libcudnn_graph": "cudnnGraphVersionCheck",
    "libcudnn_ops": "cudnnOpsVersionCheck",
    "libcudnn_cnn": "cudnnCnnVersionCheck",
    "libcudnn_adv": "cudnnAdvVersionCheck",
}


def _mixed_cudnn(cudnn: LoadedLibrary | None, loaded: list[LoadedLibrary], loader: Loader) -> tuple[str, ...]:
    """Return the mapped files of cuDNN if the loaded parts say that they do not belong together.

    This asks only loaded parts: ``libcudnn`` would open the others, and abort if it cannot.
    """
    if cudnn is None or major_of(cudnn.soname) != 9:
        return ()
    for library in loaded:
        function = _VERSION_CHECKS.get(stem_of(library.soname))
        if function is not None and loader.ask(cudnn.path, function):  # A release without the function gives None.
            return tuple(filter(is_of_cudnn, loader.loaded()))
    return ()
