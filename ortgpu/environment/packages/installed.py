"""Facts about installed distributions, read without importing any of them.

Files are compared with RECORD. Files that this user may not read are listed, too (root installed them under a strict
umask, say). To the import system, and to a search, a folder that cannot be listed is empty. A complete package then
looks absent, or like the leftover of an uninstall.
"""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import stat
import sys
import zipimport
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..gpu.driver import load_libcuda
from ..libraries.loader import loaded_plugin
from .metadata import (
    MetadataFolder,
    Place,
    RecordEntry,
    absolute,
    list_distributions,
    list_names,
    list_places,
    parse_assignments,
    parse_cuda_version,
    parse_record,
    read_text,
)
from .metadata import search_path as strings_of
from .plugins import FILE_NAMES, Arrival, PluginPackage, choose_arrival, provider_file_name, read_plugins

# These distributions own the import package `onnxruntime`. The names are used where nothing on disk tells the owner.
_ENGINE_NAME: Final = re.compile(
    r"(onnxruntime|ort-nightly)"
    r"(-(gpu|directml|openvino|training(-cpu|-gpu)?|qnn|rocm|migraphx|cann|vitisai|silicon|noopenmp|azure))?"
)
_ENGINE_METADATA: Final = re.compile(_ENGINE_NAME.pattern.replace("-", "[-_]") + r"-.*\.(dist|egg)-info")
_OTHER_NAMES: Final = frozenset(
    (
        *("numpy", "onnx", "protobuf", "flatbuffers", "torchvision", "torchaudio"),
        *("cupy", "cuda-python", "cuda-bindings"),
        *("nvidia-ml-py", "pynvml"),  # The old pynvml hides the module of nvidia-ml-py.
    )
)
_OTHER_PREFIXES: Final = ("cupy-", "onnxruntime-", "tensorrt")
_MODULE_ENDINGS: Final = (*importlib.machinery.EXTENSION_SUFFIXES, ".py", ".pyc")


@dataclass(frozen=True, slots=True)
class Distribution:
    name: str  # normalised: "onnxruntime-gpu"
    version: str | None
    location: str  # the folder that holds its dist-info, e.g. .../site-packages
    missing_files: tuple[str, ...] = ()  # entries of RECORD that are not on disk, relative to location
    altered_files: tuple[str, ...] = ()  # files with another size (small files: another hash) than in RECORD
    record_readable: bool = True
    folder: str | None = None  # its dist-info, below location; None: not read


@dataclass(frozen=True, slots=True)
class OnnxRuntime:
    """The package that `import onnxruntime` would find."""

    folder: str | None  # folder of the package that would be imported; None: there is none
    importable: bool  # folder has an __init__.py (False: the namespace leftover of an uninstall)
    owners: tuple[Distribution, ...]  # distributions that claim files in this folder
    elsewhere: tuple[Distribution, ...]  # distributions that own an onnxruntime folder in another place (shadowed)
    build_name: str | None  # package_name of capi/build_and_package_info.py
    build_version: str | None
    cuda_version: tuple[int, int] | None  # the CUDA that the build names
    provider_library: str | None  # path of libonnxruntime_providers_cuda.so / .dll, wherever CUDA comes from
    extension: str | None  # path of onnxruntime_pybind11_state
    tensorrt_library: str | None  # path of libonnxruntime_providers_tensorrt.so / .dll, if it is there
    # `import onnxruntime` takes this file instead of `folder`: a module file (somebody's own onnxruntime.py), or the
    # package in a zip archive. Without this field that environment would look healthy.
    shadowed_by: str | None = None
    # Name and version of the build that this process imported, if another build is on disk now.
    imported_as: tuple[str, str] | None = None
    arrival: Arrival | None = None  # how CUDA reaches it; None: not at all
    plugins: tuple[PluginPackage, ...] = ()  # the installed packages that bring an execution provider as a plugin

    @property
    def cuda_is_plugin(self) -> bool:
        return self.arrival is not None and self.arrival.is_plugin

    @property
    def bridge(self) -> str | None:
        """The library between it and its providers; None if there is no provider."""
        provider = self.provider_library
        system = "Windows" if provider is not None and provider.endswith(".dll") else "Linux"
        return os.path.join(self.folder or "", "capi", provider_file_name("shared", system)) if provider else None

    @property
    def version(self) -> str | None:
        """The version from the build's file, else from the metadata: 1.18.1 has no such file."""
        return self.build_version or next((owner.version for owner in self.owners), None)

    @property
    def home(self) -> str:
        """The folder of the search path that holds it; empty if there is none."""
        return os.path.dirname(self.folder or "")

    @property
    def is_of_another_release(self) -> bool:
        """True if this process imported another release, so that this provider does not fit the imported module."""
        return self.imported_as is not None and self.imported_as[1] != self.build_version


@dataclass(frozen=True, slots=True)
class RefusedPath:
    path: str
    mode: str  # as ls writes it: "drwx------"
    own: bool  # it belongs to this user, who can change its mode


@dataclass(frozen=True, slots=True)
class Torch:
    version: str | None
    cuda_version: tuple[int, int] | None  # None: a build without CUDA, or unknown
    folder: str


@dataclass(frozen=True, slots=True)
class Packages:
    onnxruntime: OnnxRuntime
    torch: Torch | None
    nvidia: tuple[Distribution, ...]  # nvidia-* wheels; only their libraries are compared, by size
    others: tuple[Distribution, ...]  # numpy, onnx, protobuf, flatbuffers, nvidia-ml-py, cupy-*, torchvision ...
    refused: tuple[RefusedPath, ...] = ()  # paths on the search path, in ONNX Runtime's package and the NVIDIA wheels
    numpy_file: str | None = None  # file that `import numpy` would run, installed or not; None: unknown
    # Names of distributions that require "onnxruntime" itself. They are read only if that distribution is installed.
    requirers: tuple[str, ...] = ()
    # Distributions named onnxruntime that have no files but their metadata: `ortgpu hold` writes them.
    held: tuple[Distribution, ...] = ()
    hiding_standard: tuple[str, ...] = ()  # files on the search path that hide modules of the standard library

    def other(self, name: str) -> Distribution | None:
        """Return the first of ``others`` with this name on the search path, or None."""
        for distribution in self.others:
            if distribution.name == name:
                return distribution
        return None


def read_packages(search_path: Sequence[str] | None = None, *, compare_contents: bool = False) -> Packages:
    """Read the distributions on ``search_path`` (``sys.path``), importing none of them. Nothing raises.

    Only for distributions that could own ``onnxruntime/`` is RECORD compared with the disk. The comparison covers
    existence and size of every file, and the hash of a few small Python files. With ``compare_contents`` the hashes of
    all libraries are compared too, also in NVIDIA wheels and NumPy. That reads gigabytes. In zip files only ONNX
    Runtime is seen.
    """
    places, package = _arrive(search_path)
    numpy = _spec_of("numpy", search_path)
    distributions = [dist for place in places for dist in list_distributions(place)]
    requirers: set[str] = set()
    if any(dist.name == "onnxruntime" for dist in distributions):
        requirers = {dist.name for dist in distributions if _REQUIREMENT.search(dist.read("METADATA") or b"")}
    nvidia, others = [], []
    for dist in distributions:
        is_other = dist.name in _OTHER_NAMES or dist.name.startswith(_OTHER_PREFIXES)
        if dist.name.startswith("nvidia-") and not is_other:
            nvidia.append(_describe_library_wheel(dist, compare_contents))
        elif is_other and compare_contents and dist.name == "numpy":
            others.append(_describe_library_wheel(dist, True))
        elif is_other and not _ENGINE_NAME.fullmatch(dist.name):
            others.append(Distribution(dist.name, dist.read_version(), dist.location))
    return Packages(
        requirers=tuple(sorted(requirers)),
        onnxruntime=_read_onnxruntime(package, places, distributions, compare_contents, in_process=search_path is None),
        torch=_read_torch(places, distributions),
        nvidia=tuple(nvidia),
        others=tuple(others),
        refused=read_refused(strings_of(search_path), package.folder),
        numpy_file=numpy.origin if numpy is not None and numpy.has_location else None,
        held=tuple(_held(distributions)),
        hiding_standard=tuple(_hiding_standard(places)),
    )


def read_held() -> tuple[Distribution, ...]:
    return tuple(_held(dist for place in list_places() for dist in list_distributions(place)))


def count_engines(folder: str) -> int:
    """Return the number of distributions of ONNX Runtime in a folder by the names of their metadata alone."""
    return sum(map(bool, map(_ENGINE_METADATA.fullmatch, list_names(folder))))


def _held(found: Iterable[MetadataFolder]) -> Iterator[Distribution]:
    for dist in found:
        entries = parse_record(dist.read("RECORD") or b"") if dist.name == "onnxruntime" else None
        # An editable install has its files elsewhere, and lists the .pth file that leads there.
        if entries and all(entry.path.startswith(f"{dist.folder}/") for entry in entries):
            yield Distribution(dist.name, dist.read_version(), dist.location, folder=dist.folder)


def _hiding_standard(places: Iterable[Place]) -> Iterator[str]:
    """Yield files that lie before the standard library on the search path and have a name of one of its modules."""
    home = os.path.dirname(getattr(os, "__file__", ""))  # A frozen program may have no __file__.
    for place in places:
        if _is_same(place.folder, home):
            return
        for name in sorted(place.names):
            path = os.path.join(place.folder, name)
            module = name.removesuffix(".py")
            if module in sys.stdlib_module_names and os.path.isfile(
                path if module != name else os.path.join(path, "__init__.py")
            ):
                yield path


def _spec_of(name: str, search_path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.machinery.PathFinder.find_spec(name, None if search_path is None else list(search_path))
    except Exception:  # noqa: BLE001 - hooks of others on the path may raise anything
        return None


def locate_packages() -> Packages:
    """Locate the files of ONNX Runtime and torch, but no distributions: a session needs no more."""
    places, package = _arrive(None)
    onnxruntime = _read_onnxruntime(package, places, (), in_process=True)
    return Packages(onnxruntime, _read_torch(places, ()), (), ())


def _arrive(search_path: Sequence[str] | None) -> tuple[list[Place], _Package]:
    places = list_places(search_path)
    package = _find_onnxruntime(places)
    spec = _spec_of("onnxruntime", search_path)
    if spec is not None and isinstance(spec.loader, zipimport.zipimporter):
        package = _Package(package.folder, package.importable, spec.origin)
    elif search_path is None:
        if "onnxruntime" in sys.modules or not package.importable:
            package = _specified_onnxruntime() or package
        if package.folder:  # It may have been loaded from a place that has left sys.path since.
            parent = os.path.dirname(package.folder)
            if not any(_is_same(place.folder, parent) for place in places):
                places += list_places([parent])
    return places, package


def _describe_library_wheel(one: MetadataFolder, compare_contents: bool) -> Distribution:
    """Describe a wheel of libraries. It lists no missing files: images are trimmed, and the search finds the rest."""
    record = one.read("RECORD") or b""
    lines = re.findall(rb"^.*\.(?:so|dll).*\n?", record, re.MULTILINE)
    entries = parse_record(b"".join(lines)) or ()
    _, altered = _missing_and_altered(entries, one, by_content=compare_contents)
    return Distribution(one.name, one.read_version(), one.location, altered_files=altered)


@dataclass(frozen=True, slots=True)
class _Package:
    folder: str | None
    importable: bool
    shadowed_by: str | None = None


def _find_onnxruntime(places: Sequence[Place]) -> _Package:
    """Search like the import system: in each place for a package, then a module file; at the end for a bare folder."""
    leftover = shadow = None
    for place in places:
        if "onnxruntime" in place.names:
            folder = os.path.join(place.folder, "onnxruntime")
            if os.path.isfile(os.path.join(folder, "__init__.py")) or os.path.isfile(f"{folder}/__init__.pyc"):
                return _Package(folder, importable=True, shadowed_by=shadow)
            if leftover is None and os.path.isdir(folder):
                leftover = folder
        for ending in _MODULE_ENDINGS:
            if shadow is None and "onnxruntime" + ending in place.names:
                shadow = os.path.join(place.folder, "onnxruntime" + ending)
    return _Package(leftover, importable=False, shadowed_by=shadow)


def _specified_onnxruntime() -> _Package | None:
    """Return the package that was imported, or that an import hook (editable install, frozen bundle) finds.

    None for a mock in its place, and for a module file. Finding a top-level module imports nothing.
    """
    try:
        spec: Any = importlib.util.find_spec("onnxruntime")
        folder = os.path.abspath(next(iter(spec.submodule_search_locations)))
        return _Package(folder, importable=isinstance(spec.origin, str))
    except Exception:  # noqa: BLE001 - hooks are anybody's code, and a mock has any attribute
        return None


def _read_onnxruntime(
    package: _Package,
    places: Sequence[Place],
    found: Sequence[MetadataFolder],
    compare_contents: bool = False,
    *,
    in_process: bool,
) -> OnnxRuntime:
    folder = package.folder
    # A wheel with a name of its own, made without setuptools, shows in RECORD only. Reading every RECORD is slow, so it
    # is done only if the folder would otherwise have no owner.
    claims = _claims(found, thorough=False)
    if folder and not any(_is_home(folder, dist) for dist, _ in claims):
        claims = _claims(found, thorough=True)
    owners: list[Distribution] = []
    elsewhere: list[Distribution] = []
    for dist, entries in claims:
        owner = Distribution(
            dist.name,
            dist.read_version(),
            dist.location,
            *_missing_and_altered(entries or (), dist, by_content=compare_contents),
            record_readable=entries is not None,
            folder=dist.folder,
        )
        (owners if folder is not None and _is_home(folder, dist) else elsewhere).append(owner)
    capi = os.path.join(folder, "capi") if folder else None
    names = frozenset(list_names(capi) if capi else ())
    build = parse_assignments(read_text(os.path.join(capi, "build_and_package_info.py"))) if capi else {}
    plugins = read_plugins(places)
    built_in = _first_of(capi, names, _CUDA_FILES)
    others = sorted(name for name in names if name.startswith(f"{_EXTENSION}.") and name.endswith((".so", ".pyd")))
    extension = _first_of(capi, names, [*_EXTENSIONS, *others])
    cuda = None
    if sum(plugin.library is not None for plugin in plugins) > 1:  # The driver decides among several packages.
        *_, supported = load_libcuda()
        cuda = supported[0] if supported is not None else None
    loaded = loaded_plugin() if in_process and built_in is None else None
    arrival = choose_arrival(built_in, extension, plugins, in_process=in_process, driver_cuda=cuda, loaded=loaded)
    return OnnxRuntime(
        folder=folder,
        importable=package.importable,
        owners=tuple(owners),
        elsewhere=tuple(elsewhere),
        build_name=build.get("package_name") or None,
        build_version=build.get("__version__") or None,
        cuda_version=parse_cuda_version(build.get("cuda_version")),
        provider_library=arrival.library if arrival is not None else None,
        extension=extension,
        tensorrt_library=_first_of(capi, names, _TENSORRT_FILES),
        shadowed_by=package.shadowed_by,
        imported_as=_imported_as(folder, build.get("package_name"), build.get("__version__")),
        arrival=arrival,
        plugins=plugins,
    )


_CUDA_FILES: Final = [provider_file_name("cuda", system) for system in FILE_NAMES]
_TENSORRT_FILES: Final = [provider_file_name("tensorrt", system) for system in FILE_NAMES]

_EXTENSION: Final = "onnxruntime_pybind11_state"
_EXTENSIONS: Final = [_EXTENSION + ending for ending in importlib.machinery.EXTENSION_SUFFIXES]

# Requirements with a marker for an extra or a system do not match, because markers are not evaluated.
_REQUIREMENT: Final = re.compile(
    rb"(?im)^Requires-Dist:[ \t]*onnxruntime(?![\w.-])(?!.*\b(extra|sys_platform|os_name|platform_\w+)\b)"
)


def _imported_as(folder: str | None, *there: str | None) -> tuple[str, str] | None:
    module = sys.modules.get("onnxruntime")
    file, name = getattr(module, "__file__", None), getattr(module, "package_name", None)
    version = getattr(module, "version", None)
    is_identified = isinstance(file, str) and isinstance(name, str) and isinstance(version, str) and name and version
    if not is_identified or not folder or not all(there):
        return None  # It is not imported, or a mock, or a release without the file that names the build.
    same = os.path.realpath(os.path.dirname(str(file))) == os.path.realpath(folder)
    return (str(name), str(version)) if same and (name, version) != there else None


def _is_home(folder: str, dist: MetadataFolder) -> bool:
    return _is_same(os.path.join(dist.location, "onnxruntime"), folder)


def _claims(
    found: Sequence[MetadataFolder], *, thorough: bool
) -> list[tuple[MetadataFolder, tuple[RecordEntry, ...] | None]]:
    """Return the distributions that claim to have installed an `onnxruntime` folder, with their RECORD."""
    claims: list[tuple[MetadataFolder, tuple[RecordEntry, ...] | None]] = []
    for dist in found:
        top_level = (dist.read("top_level.txt") or b"").split()
        is_named = b"onnxruntime" in top_level or (not top_level and _ENGINE_NAME.fullmatch(dist.name) is not None)
        if not (is_named or thorough or dist.name.startswith(("onnxruntime", "ort-"))):
            continue
        record = dist.read("RECORD")
        entries = parse_record(record) if record is not None else None
        if entries and any(entry.path.startswith("onnxruntime/") for entry in entries):
            claims.append((dist, entries))
        # An empty metadata folder is no installation, and neither is a RECORD of other files.
        elif is_named and entries is None and (record or dist.read("METADATA") or dist.read("PKG-INFO")):
            claims.append((dist, None))
    return claims


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _first_of(folder: str | None, names: frozenset[str], wanted: Iterable[str]) -> str | None:
    for name in wanted:
        path = os.path.join(folder or "", name)
        if name in names and os.path.isfile(path):  # The listing has broken links, too.
            return path
    return None


def _read_torch(places: Sequence[Place], found: Sequence[MetadataFolder]) -> Torch | None:
    installed = {dist.location: dist for dist in found if dist.name == "torch"}
    home = next(iter(installed), None)
    for place in places:
        if "torch" in place.names and os.path.isfile(os.path.join(place.folder, "torch", "version.py")):
            home = place.folder
            break
    if home is None:
        return None
    folder = os.path.join(home, "torch")
    assignments = parse_assignments(read_text(os.path.join(folder, "version.py")))
    version = assignments.get("__version__") or (installed[home].read_version() if home in installed else None)
    return Torch(version, parse_cuda_version(assignments.get("cuda")), folder)


_LIBRARIES: Final = (".so", ".dll", ".pyd")  # parts of names: libcublas.so.13
_HASHED: Final = re.compile(r"onnxruntime/(__init__|capi/[^/]+)\.py")
_HASHED_BELOW: Final = 64 * 1024  # bytes


def _missing_and_altered(
    entries: Iterable[RecordEntry], one: MetadataFolder, *, by_content: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    missing: list[str] = []
    altered: list[str] = []
    for entry in entries:
        fault = _fault_of(entry, one, by_content=by_content)
        if fault is not None:
            (missing if fault == "missing" else altered).append(entry.path)
    return tuple(missing), tuple(altered)


def _fault_of(entry: RecordEntry, one: MetadataFolder, *, by_content: bool) -> Literal["missing", "altered"] | None:
    """Compare a file's size with RECORD. Small Python files, and libraries if ``by_content``, are compared by hash too.

    The result is None also for files that may not be read, and for scripts, caches and metadata.
    """
    path = entry.path
    # Images are often built by copying site-packages alone. Scripts lie outside, and nothing here needs them.
    if path.startswith(("../", one.folder + "/")) or os.path.isabs(path):
        return None
    if "/__pycache__/" in path or path.endswith(".pyc"):
        return None
    target = os.path.join(one.location, path)
    try:
        size = os.stat(target).st_size
    except OSError as error:
        # A link to itself or to nothing counts as missing. Nothing is known about a folder that may not be entered.
        return "missing" if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else None
    except ValueError:
        return None
    if entry.size is not None and size != entry.size:
        return "altered"
    algorithm, _, expected = entry.digest.partition("=")
    is_small = size < _HASHED_BELOW and _HASHED.fullmatch(path) is not None
    is_library = by_content and any(end in path for end in _LIBRARIES)
    # Conda edits libraries after it has written RECORD.
    is_as_made = is_library and b"conda" not in (one.read("INSTALLER") or b"")
    if algorithm == "sha256" and (is_small or is_as_made):
        return "altered" if _hash_of(target) not in (None, expected.rstrip("=")) else None
    return None


def _hash_of(path: str) -> str | None:
    try:
        digest, block = hashlib.sha256(), 1 << 20
        with open(path, "rb") as file:
            while data := file.read(block):
                digest.update(data)
    except (ImportError, OSError, ValueError):  # ImportError: this process can import nothing any more.
        return None
    return base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")


# Installing ortgpu puts these files beside it, for ORTGPU_ENFORCE.
START_FILES: Final = ("ortgpu_enforce.pth", "_ortgpu_waiting.py", "_ortgpu_hook.py")


def read_refused(places: Iterable[str], package: str | None) -> tuple[RefusedPath, ...]:
    """Return the unreadable paths of the search path, NVIDIA wheels, the guard, and a package with ``capi``."""
    return tuple(filter(None, map(_refused, dict.fromkeys(_looked_at(places, package)))))


def _looked_at(places: Iterable[str], package: str | None) -> Iterator[str]:
    for place in map(absolute, places):
        wheels = os.path.join(place, "nvidia")
        yield from (place, wheels)
        for name in START_FILES:
            yield os.path.join(place, name)
        for component in _paths_in(wheels):
            libraries = os.path.join(component, "lib")
            yield from (component, libraries, *_paths_in(libraries))
    if package is not None:
        yield from (package, *_paths_in(package), *_paths_in(os.path.join(package, "capi")))


def _paths_in(folder: str) -> Iterable[str]:
    return map(functools.partial(os.path.join, folder), sorted(list_names(folder)))


def _refused(path: str) -> RefusedPath | None:
    if not hasattr(os, "geteuid"):  # On Windows the mode does not tell the permissions.
        return None
    try:
        info = os.stat(path)
        access = os.R_OK | os.X_OK if stat.S_ISDIR(info.st_mode) else os.R_OK
        readable = os.access(path, access)
    except (OSError, ValueError):  # It is absent, or below a folder that is refused itself.
        return None
    return None if readable else RefusedPath(path, stat.filemode(info.st_mode), info.st_uid == os.geteuid())
