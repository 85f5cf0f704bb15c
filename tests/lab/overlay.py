"""A virtual environment made of links, to break without breaking the one it was made of."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath

from tests.lab.installed import GPU_DISTRIBUTION

#: Folders whose files are linked one by one from the start: ``/proc/self/maps`` then names the overlay's paths.
TAKEN_APART = ("onnxruntime", "onnxruntime/capi", "nvidia", "nvidia/*", "nvidia/*/lib")


#: Bytes of a wheel, packed. Smaller ones stay unpacked as long as the process; those with CUDA in them have gigabytes.
_KEPT_WHEELS = 64 << 20


class LabError(Exception):
    """The lab itself cannot do what a test asks of it: never the fault that a test is about."""


def site_of(root: Path) -> Path:
    """The site-packages of a virtual environment of this Python."""
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # 3.10 has no name for it
    return Path(sysconfig.get_path("purelib", scheme, vars={"base": str(root), "platbase": str(root)}))


def installed_site() -> Path:
    """The site-packages that holds the real ``onnxruntime-gpu`` of this interpreter."""
    try:
        distribution = metadata.distribution(GPU_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise LabError(
            f"{GPU_DISTRIBUTION} is not installed for {sys.executable}: the lab breaks copies of the real one, "
            "so install it with its CUDA libraries first (pip install -e '.[cuda,test]')"
        ) from None
    return Path(str(distribution.locate_file(""))).resolve()


class Overlay:
    """A virtual environment in ``root`` whose site-packages consists of links to those of ``source``.

    Files are hard links where both are on one filesystem and the system allows it, else symbolic links; folders become
    real ones when something in them changes. A library found through a link looks for its neighbours in the overlay,
    since the loader takes ``$ORIGIN`` from the path it opened. Every change first cuts the link that it would write
    through, and a pattern that matches nothing is an error, so no test breaks less than it says.

    Methods that change the overlay return it, to be chained. Paths are relative to site-packages.
    """

    def __init__(self, root: Path, source: Path | None = None) -> None:
        self.root = root
        self.source = source or installed_site()
        self.site = site_of(root)
        self.python = root / "bin" / "python"
        self._make_environment()
        for entry in self.source.iterdir():
            self._link(entry, self.site / entry.name)
        for pattern in TAKEN_APART:
            for folder in self.site.glob(pattern):
                if folder.is_symlink() and folder.is_dir():
                    self._take_apart(folder)
        self._link_library_under_test()

    def __fspath__(self) -> str:
        return str(self.site)

    def path(self, relative: str) -> Path:
        """The one path that a pattern matches."""
        matches = self._matches(relative)
        if len(matches) != 1:
            raise LabError(f"{relative} matches {len(matches)} paths: {[str(match) for match in matches]}")
        return matches[0]

    def files(self, distribution: str) -> list[str]:
        """The files of a distribution that its RECORD names and that exist, relative to site-packages."""
        return [name for name in _recorded_files(self.site, distribution) if os.path.lexists(self.site / name)]

    def remove(self, *patterns: str) -> Overlay:
        """Delete what the patterns match, folders with their contents."""
        for pattern in patterns:
            for match in self._matches(pattern):
                self._delete(self._own(match))
        return self

    def replace(self, relative: str, content: bytes | Path) -> Overlay:
        """Put other content, or a copy of another file, where a file is or is not yet."""
        target = self._own(self.site / relative)
        self._delete(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copy2(content, target)
        return self

    def truncate(self, pattern: str, size: int) -> Overlay:
        """Keep the first ``size`` bytes of a file, as an interrupted download or a full disk does."""
        path = self.path(pattern)
        with path.open("rb") as file:
            kept = file.read(size)
        return self.replace(path.relative_to(self.site).as_posix(), kept)

    def duplicate(self, pattern: str, relative: str) -> Overlay:
        """Link a file or folder a second time under another path."""
        original = self.path(pattern)
        copy = self._own(self.site / relative)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if original.is_dir():
            shutil.copytree(original, copy, symlinks=True, copy_function=self._link)
        else:
            self._link(original, copy)
        return self

    def rename(self, pattern: str, relative: str) -> Overlay:
        """Move a file or folder."""
        original = self._own(self.path(pattern))
        moved = self._own(self.site / relative)
        moved.parent.mkdir(parents=True, exist_ok=True)
        original.rename(moved)
        return self

    def take_apart(self, relative: str, *, whole: bool = False) -> Overlay:
        """Make a folder that is a link a real one, of links to what is in it; and if ``whole`` all folders in it."""
        folder = self._own(self.site / relative)
        if folder.is_symlink() and folder.is_dir():
            self._take_apart(folder, whole=whole)
        return self

    def add_wheel(self, wheel: Path) -> Overlay:
        """Put a wheel's files over what is there, as pip does: the last writer of a file wins."""
        if wheel.stat().st_size < _KEPT_WHEELS:
            return self._add(*_kept(wheel))
        with tempfile.TemporaryDirectory(prefix="ortgpu-wheel-") as folder:
            return self._add(Path(folder), _unpack(wheel, Path(folder)))

    def uninstall(self, distribution: str) -> Overlay:
        """Delete, as pip does, a distribution, the files that its RECORD names, also those of a twin, and bytecode."""
        names = self.files(distribution)
        sources = [PurePosixPath(name) for name in names if name.endswith(".py")]
        compiled = [file for path in sources for file in self.site.glob(f"{path.parent}/__pycache__/{path.stem}.*.pyc")]
        names += [file.relative_to(self.site).as_posix() for file in compiled]
        folder = _find_dist_info(self.site, distribution)
        for name in names:
            path = self._own(self.site / name)
            if os.path.lexists(path):
                self._delete(path)
        if folder.exists():
            self._delete(self._own(folder))
        for parent in sorted({above for name in names for above in PurePosixPath(name).parents}, reverse=True):
            above = self.site / parent
            if above != self.site and above.is_dir() and not any(above.iterdir()):
                above.rmdir()
        return self

    def reinstall(self, distribution: str) -> Overlay:
        """Write a distribution's files again from the source, over whatever is there now."""
        for name in _recorded_files(self.source, distribution):
            if not (self.source / name).exists():
                continue
            target = self._own(self.site / name)
            self._delete(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._link(self.source / name, target)
        return self

    def _add(self, folder: Path, names: list[str]) -> Overlay:
        """Link files of a folder, or copy them from another filesystem, over what is there."""
        for name in names:
            target = self._own(self.site / name)
            self._delete(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(folder / name, target)
            except OSError:  # as in _link; a symbolic link would lead out of the overlay
                shutil.copy2(folder / name, target)
        return self

    def _make_environment(self) -> None:
        base = Path(getattr(sys, "_base_executable", None) or sys.executable)
        self.site.mkdir(parents=True)
        self.python.parent.mkdir(parents=True)
        self.python.symlink_to(base)
        settings = f"home = {base.parent}\ninclude-system-site-packages = false\n"
        (self.root / "pyvenv.cfg").write_text(settings, encoding="utf-8")

    def _link_library_under_test(self) -> None:
        """Link the ``ortgpu`` that the tests import, wherever it lies."""
        spec = importlib.util.find_spec("ortgpu")
        if spec is None or not spec.submodule_search_locations:
            raise LabError("ortgpu cannot be imported: run the tests from the repository root, or install it")
        target = self.site / "ortgpu"
        self._delete(target)
        target.symlink_to(next(iter(spec.submodule_search_locations)), target_is_directory=True)

    def _matches(self, pattern: str) -> list[Path]:
        matches = sorted(self.site.glob(pattern))
        if not matches:
            raise LabError(f"nothing in {self.site} matches {pattern}")
        return matches

    def _own(self, path: Path) -> Path:
        """The same path, after every folder above it inside the overlay has become a real one."""
        for folder in reversed(path.relative_to(self.site).parents):
            above = self.site / folder
            if above.is_symlink() and above.is_dir():
                self._take_apart(above)
        return path

    def _take_apart(self, folder: Path, *, whole: bool = False) -> None:
        original = folder.resolve()
        folder.unlink()
        self._fill(folder, original, whole=whole)

    def _fill(self, folder: Path, original: Path, *, whole: bool) -> None:
        folder.mkdir()
        for entry in original.iterdir():
            if whole and entry.is_dir():
                self._fill(folder / entry.name, entry, whole=True)
            else:
                self._link(entry, folder / entry.name)

    @staticmethod
    def _link(original: str | Path, link: str | Path) -> None:
        original, link = Path(original), Path(link)
        if original.is_dir():
            link.symlink_to(original, target_is_directory=True)
            return
        try:
            os.link(original, link)
        except OSError:  # another filesystem, or a system that lets only owners link (fs.protected_hardlinks)
            link.symlink_to(original)

    @staticmethod
    def _delete(path: Path) -> None:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)


@functools.cache
def _kept(wheel: Path) -> tuple[Path, list[str]]:
    """A folder with a wheel's files, which goes with this process, and their names.

    To unpack one takes longer than most of what is asked of the environment.
    """
    folder = Path(tempfile.mkdtemp(prefix="ortgpu-wheel-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, _unpack(wheel, folder)


def _unpack(wheel: Path, folder: Path) -> list[str]:
    names = []
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or ".data/" in member.filename:
                continue
            names.append(member.filename)
            path = Path(archive.extract(member, folder))
            if mode := member.external_attr >> 16:
                path.chmod(mode & 0o777 | 0o600)
    return names


def _recorded_files(site: Path, distribution: str) -> list[str]:
    """What a distribution's RECORD names inside site-packages."""
    files = metadata.Distribution.at(_find_dist_info(site, distribution)).files or ()
    return [name for file in files if not (name := PurePosixPath(*file.parts).as_posix()).startswith("..")]


def _find_dist_info(site: Path, name: str) -> Path:
    wanted = name.lower().replace("-", "_")
    for folder in sorted(site.glob("*.dist-info")):
        if folder.name.partition("-")[0].lower() == wanted:
            return folder
    raise LabError(f"no distribution {name} in {site}")
