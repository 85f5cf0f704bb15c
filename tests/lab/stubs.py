"""A CUDA driver and an NVML that answer what a test tells them to.

The C sources beside this file are compiled once per test run. The dataclasses say what the answers are, and turn into
the environment variables that the libraries read; the sources document those.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.installed import soname
from tests.lab.overlay import LabError

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class GPU:
    """One GPU, as NVML and the driver describe it. Sizes in bytes."""

    uuid: str = "GPU-00000000-0000-0000-0000-000000000001"
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    total: int = 141 << 30
    free: int = 140 << 30
    compute_mode: int = 0
    mig: bool | None = None
    mig_uuids: tuple[str, ...] = ()
    processes: tuple[tuple[int, int], ...] = ()
    handle: int = 0  # what NVML returns when it is asked for the GPU: 15, lost


@dataclass(frozen=True)
class Cuda:
    """What ``libcuda.so.1`` answers. ``init`` is a CUresult, ``version`` 1000 * major + 10 * minor.

    ``files``: how many it keeps open, without which it is not initialised.
    """

    init: int = 0
    version: int = 13000
    devices: tuple[GPU, ...] = ()
    files: int = 0

    def variables(self) -> dict[str, str]:
        return {
            "STUB_CUDA_INIT": str(self.init),
            "STUB_CUDA_VERSION": str(self.version),
            "STUB_CUDA_FILES": str(self.files),
            "STUB_CUDA_DEVICES": ";".join(
                f"{gpu.uuid}|{gpu.name}|{gpu.capability[0]}.{gpu.capability[1]}|{gpu.total}" for gpu in self.devices
            ),
        }


@dataclass(frozen=True)
class NVML:
    """What ``libnvidia-ml.so.1`` answers. ``init`` and ``error`` are codes of nvmlReturn_t."""

    gpus: tuple[GPU, ...] = (GPU(),)
    driver: str = "580.65.06"
    cuda: int = 13000
    init: int = 0
    error: int = 0

    def variables(self) -> dict[str, str]:
        return {
            "STUB_NVML_GPUS": ";".join(_nvml_entry(gpu) for gpu in self.gpus),
            "STUB_NVML_DRIVER": self.driver,
            "STUB_NVML_CUDA": str(self.cuda),
            "STUB_NVML_INIT": str(self.init),
            "STUB_NVML_ERROR": str(self.error),
        }


def _nvml_entry(gpu: GPU) -> str:
    fields = {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "total": str(gpu.total),
        "free": str(gpu.free),
        "mode": str(gpu.compute_mode),
        "migs": ",".join(gpu.mig_uuids),
        "processes": ",".join(f"{pid}:{used}" for pid, used in gpu.processes),
        "handle": str(gpu.handle),
    }
    if gpu.mig is not None:
        fields["mig"] = str(int(gpu.mig))
    return "|".join(f"{key}={value}" for key, value in fields.items() if value)


def why_not_here() -> str | None:
    """Why the stubs cannot be built on this machine, or None when they can."""
    if sys.platform != "linux":
        return f"the stub driver is built for Linux, and this is {sys.platform}"
    if compiler() is None:
        return f"no C compiler: neither $CC nor {', '.join(COMPILERS)} is on PATH"
    return None


def compiler() -> str | None:
    """The C compiler of this machine."""
    names = [*filter(None, [os.environ.get("CC")]), *COMPILERS]
    return next(filter(None, map(shutil.which, names)), None)


class Stubs:
    """The stub libraries, compiled into ``folder``, each in a folder of its own so that any of them can be absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, tuple[str, ...]] = {}  # by name, what was compiled last

    @functools.cached_property
    def cuda(self) -> Path:
        """``libcuda.so.1``."""
        return self._build("libcuda_stub.c", "cuda/libcuda.so.1", "-Wl,-soname,libcuda.so.1")

    @functools.cached_property
    def nvml(self) -> Path:
        """``libnvidia-ml.so.1``."""
        return self._build("libnvidia_ml_stub.c", "nvml/libnvidia-ml.so.1", "-Wl,-soname,libnvidia-ml.so.1")

    @functools.cached_property
    def cudart(self) -> Path:
        """The runtime of the CUDA in use, whose memory is the host's; the source says what it counts."""
        name = soname("libcudart")
        return self._build("libcudart_stub.c", f"cudart/{name}", f"-Wl,-soname,{name}", "-pthread")

    def toolkit(self, *providers: str) -> dict[str, Path]:
        """What provider files link of CUDA's toolkit, and what ortgpu calls of it, by soname: sessions open with it,
        and compute nothing."""
        source = (SOURCES / "cuda_toolkit_stub.c").read_text(encoding="utf-8")
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", *providers], capture_output=True, text=True, check=True
        )
        linked = re.findall(r"(\w+)@(libcu\S+)", listed.stdout)
        calls = SOURCES.parents[1] / "ortgpu" / "running" / "cudart.py"
        called = re.findall(r"\b(cuda[A-Z]\w+)", calls.read_text(encoding="utf-8"))
        names = {*called, *(name for name, _ in linked)}
        others = sorted(name for name in names if not re.search(rf"\b{name}\(", source))
        code = source + "".join(f"int {name}(void) {{ return 0; }}\n" for name in others)
        libraries = {soname("libcurand")} | {library for _, library in linked}
        # The provider asks for functions of a version, which is called as the library
        options = ("-Wl,--default-symver", "-Wno-builtin-declaration-mismatch")
        return {
            name: self.compile(f"toolkit/{name}", code, f"-Wl,-soname,{name}", *options) for name in sorted(libraries)
        }

    @functools.cached_property
    def nccl(self) -> Path:
        """``libnccl.so.2``."""
        return self._build("libnccl_stub.c", "nccl/libnccl.so.2", "-Wl,-soname,libnccl.so.2", "-pthread")

    @functools.cached_property
    def tensorrt(self) -> Path:
        """A folder with libraries where TensorRT's wheels have theirs; it goes on the path of Python."""
        for name in ("libnvinfer.so.10", "libnvonnxparser.so.10"):
            self._build("libnvinfer_stub.c", f"tensorrt/tensorrt_libs/{name}", f"-Wl,-soname,{name}")
        return self.folder / "tensorrt"

    @functools.cached_property
    def hide_from_loader(self) -> Path:
        """The ``LD_AUDIT`` library after which the loader finds nothing of what this machine has of CUDA."""
        return self._build("hide_system_libraries.c", "hide_system_libraries.so", "-nostdlib", "-ffreestanding")

    @functools.cached_property
    def hide_from_search(self) -> Path:
        """The ``LD_PRELOAD`` library after which files and folders of it do not exist."""
        return self._build("hide_system_files.c", "hide_system_files.so")

    def library(self, soname: str, functions: Mapping[str, int] | None = None) -> Path:
        """A library with a name of its own and functions that return a number: something to be found and not usable."""
        code = [f"long {name}(void) {{ return {value}; }}" for name, value in (functions or {}).items()]
        return self.compile(soname, "\n".join([*code, "extern int made_by_the_lab;\n"]), f"-Wl,-soname,{soname}")

    def compile(self, name: str, code: str, *options: str) -> Path:
        """A library out of a text in C."""
        with _one_at_a_time:  # under a name that several cases may use
            target = self.folder / "made" / name
            source = target.with_name(f"{target.name}.c")
            if self._made.get(name) != (code, *options) or not target.exists():
                source.parent.mkdir(parents=True, exist_ok=True)
                source.write_text(code, encoding="utf-8")
                self._build(str(source), f"made/{name}", *options)
                self._made[name] = (code, *options)
            return target

    def _build(self, source: str, relative: str, *options: str) -> Path:
        found = compiler()
        if found is None:
            raise LabError(str(why_not_here()))
        target = self.folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", *options]
        command = [found, *flags, "-o", str(partial), str(SOURCES / source), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise LabError(f"{' '.join(command)} failed:\n{done.stderr}")
        partial.replace(target)
        return target
