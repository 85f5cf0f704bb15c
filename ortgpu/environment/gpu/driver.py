"""Facts about the NVIDIA driver and its GPUs. Nothing here initialises CUDA or creates a context."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..libraries.library_file import defines
from ..packages.metadata import (
    DEFAULT_FOLDERS,
    LINUX_ROOT,
    list_names,
    mapped_libraries,
    read_below,
    read_maps,
    read_text,
)
from ..variables import entries_of

LIBCUDA: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

TEGRA_MEMORY: Final = "/dev/nvmap"

_COMPUTE_MODES: Final = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU in NVML's report. NVML reports every GPU of the machine, and ignores CUDA_VISIBLE_DEVICES."""

    index: int  # NVML's index (PCI bus order); CUDA's ordinal may differ
    uuid: str | None  # "GPU-..."
    name: str | None
    compute_capability: tuple[int, int] | None
    memory_total: int | None  # bytes
    memory_free: int | None  # bytes, when it was read
    compute_mode: str | None  # "default", "exclusive-process", "prohibited", "exclusive-thread"
    mig_enabled: bool | None
    mig_uuids: tuple[str, ...]  # "MIG-...", one for each instance
    pci_bus_id: str | None


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """An existing device file that this process may not open."""

    path: str
    error: str  # errno's name: "EACCES" for its mode and owner, "EPERM" for a devices cgroup of a container or job
    group: str | None  # name or number of its group
    by_mode: bool = True  # False: its mode and owner would allow it, but something else (SELinux) does not


@dataclass(frozen=True, slots=True)
class Nvml:
    """The answers of NVML. ``available`` False with ``error`` is one fact, a machine without GPUs another."""

    available: bool
    error: str | None  # reason why NVML is not available, or why it opens no GPU; in NVML's words or the loader's
    driver_version: str | None  # "580.159.04"
    cuda_version: tuple[int, int] | None  # newest CUDA that the driver supports
    gpus: tuple[GPU, ...]
    code: int | None = None  # nvmlReturn_t behind the error, if it is NVML's own: 15, "GPU is lost"


@dataclass(frozen=True, slots=True)
class Driver:
    libcuda: str | None  # path of the loader's libcuda.so.1; None: it cannot be loaded
    libcuda_error: str | None  # the loader's words if it cannot be loaded
    cuda_version: tuple[int, int] | None  # cuDriverGetVersion: it needs no initialisation
    kernel_version: str | None  # version of the kernel module in /proc/driver/nvidia/version
    device_nodes: tuple[str, ...]  # /dev/nvidia*, /dev/dxg, /dev/nvmap
    nvml: Nvml
    refused_nodes: tuple[RefusedNode, ...] = ()  # device_nodes that this process may not open
    libcuda_elsewhere: tuple[str, ...] = ()  # files that the loader does not search; empty if libcuda is loaded
    libcuda_unlinked: tuple[UnlinkedFile, ...] = ()  # files without a link; empty if libcuda is loaded
    libcuda_entry: str | None = None  # entry of LD_LIBRARY_PATH that leads to libcuda; links are followed
    libcuda_preload: str | None = None  # entry of LD_PRELOAD that is libcuda
    interposed: tuple[str, ...] = ()  # preloaded libraries that replace functions of the driver; see find_interposed

    @property
    def is_absent(self) -> bool:
        """True if no part of a driver is there: neither libcuda nor NVML nor the kernel module nor device files."""
        of_libcuda = self.libcuda or self.libcuda_elsewhere or self.libcuda_unlinked
        return not (of_libcuda or self.nvml.available or self.kernel_version or self.device_nodes)

    @property
    def version(self) -> str | None:
        """The version of the driver in the kernel. It does not depend on the loaded libcuda."""
        return self.kernel_version or self.nvml.driver_version

    @property
    def supported_cuda(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver supports. A libcuda for compatibility is newer than the kernel's."""
        return self.cuda_version or self.nvml.cuda_version

    @property
    def libcuda_version(self) -> str | None:
        """The version of the driver that the loaded libcuda belongs to, from its file name."""
        return parse_library_version(self.libcuda or "")

    @property
    def is_tegra(self) -> bool:
        """True on a Jetson: its memory is opened through /dev/nvmap, and there need not be a /dev/nvidia-uvm."""
        return TEGRA_MEMORY in self.device_nodes


Asked = Literal["libcuda", "nvml"]


def read_driver(root: Path | None = LINUX_ROOT, *, unasked: Collection[Asked] = ()) -> Driver:
    """Read the driver's facts without initialising CUDA. Nothing raises.

    ``root`` is the parent of /proc and /dev, None on systems without them. libcuda and NVML are always this process's
    own. libcuda is loaded, and stays loaded as in a process with a session. It is not initialised, so a fork
    afterwards is harmless. A libcuda that loads need not work. Parts in ``unasked`` are known to end the process, or
    never to return. They are not called, and count as present without an answer.
    """
    path, error, version = (LIBCUDA, None, None) if "libcuda" in unasked else load_libcuda()
    names = sorted(list_names(root / "dev")) if root is not None else ()  # NVML may create them, so they come first.
    nodes = tuple(f"/dev/{name}" for name in names if name.startswith("nvidia") or name in ("dxg", "nvmap"))
    nvml = Nvml(False, "not asked", None, None, ()) if "nvml" in unasked else read_nvml()
    if root is None:
        return Driver(path, error, version, kernel_version=None, device_nodes=(), nvml=nvml)
    elsewhere = (f"/{folder}/{LIBCUDA}" for folder in _FOLDERS_OF_DRIVERS if (root / folder / LIBCUDA).is_file())
    return Driver(
        libcuda=path,
        libcuda_error=error,
        cuda_version=version,
        kernel_version=parse_kernel_version(read_below(root, "proc/driver/nvidia/version")),
        device_nodes=nodes,
        nvml=nvml,
        refused_nodes=tuple(filter(None, map(functools.partial(_refused, root), nodes))),
        libcuda_elsewhere=tuple(elsewhere) if path is None else (),
        libcuda_unlinked=find_unlinked(root) if path is None else (),
        libcuda_entry=_entry_of(path, "LD_LIBRARY_PATH", LIBCUDA),
        libcuda_preload=_entry_of(path, "LD_PRELOAD"),
    )


def read_nvml() -> Nvml:
    """Ask NVML for the driver and for every GPU. A field that NVML does not answer is None; nothing raises.

    NVML is started and shut down again within the call: it creates no context and survives fork. In a container it
    shows the container's GPUs only.
    """
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    refusals: list[Exception] = []
    try:
        with _nvml() as nvml:
            driver = _string(_ask(nvml, "nvmlSystemGetDriverVersion"))
            # nvmlSystemGetCudaDriverVersion_v2 would fail without libcuda. This function does not.
            cuda = parse_cuda_number(_ask(nvml, "nvmlSystemGetCudaDriverVersion"))
            gpus = tuple(map(functools.partial(_read_gpu, nvml, refusals), range(nvml.nvmlDeviceGetCount())))
    except Exception as error:  # noqa: BLE001 - a broken pynvml or NVML may raise anything
        return Nvml(False, _words(error), driver, cuda, (), _code(error))
    refused = next(iter(refusals), None)
    return Nvml(True, _words(refused) if refused else None, driver, cuda, gpus, _code(refused))


def read_gpu_memory(uuid: str) -> tuple[int, int] | None:
    """Return free and total bytes of one GPU or MIG instance, now. None: no such device, or NVML does not say."""
    try:
        with _nvml() as nvml:
            memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
            return int(memory.free), int(memory.total)
    except Exception:  # noqa: BLE001 - as in read_nvml
        return None


def processes_on(uuid: str) -> dict[int, int | None]:
    """Return the compute processes on one GPU: their ids, and the bytes that each uses (None: unknown).

    The result is empty also if nothing is known. In a container the ids are the host's, or there are none at all.
    """
    used: dict[int, int | None] = {}
    try:
        with _nvml() as nvml:
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid)):
                before, now = used.get(process.pid), process.usedGpuMemory
                # One process on several instances of one GPU is listed once for each.
                used[int(process.pid)] = before if now is None else int(now) + (before or 0)
    except Exception:  # noqa: BLE001 - as in read_nvml
        return {}
    return used


def parse_cuda_number(number: object) -> tuple[int, int] | None:
    """Return the version that CUDA writes as one number: (12, 8) for 12080. None if it is no version."""
    if not isinstance(number, int) or number < 1000:
        return None
    return number // 1000, number % 1000 // 10


def parse_kernel_version(text: str) -> str | None:
    """Return the version in /proc/driver/nvidia/version, as the proprietary and the open kernel module write it."""
    match = re.search(r"^NVRM version:[^\n]*?\s(\d+\.\d+(?:\.\d+)*)(?=\s|$)", text, re.MULTILINE)
    return match[1] if match else None


def parse_library_version(path: str) -> str | None:
    """Return the driver version of a libcuda: "580.65.06" of libcuda.so.580.65.06, None of WSL's libcuda.so.1.1."""
    match = re.search(r"libcuda\.so\.(\d{3,}\.\d+(?:\.\d+)*)$", path)
    return match[1] if match else None


def load_libcuda() -> tuple[str | None, str | None, tuple[int, int] | None]:
    """Load libcuda. Return its path, or else the loader's words, and the CUDA that it supports."""
    if sys.platform == "darwin":
        return None, "no CUDA on macOS", None
    try:
        library = ctypes.CDLL(LIBCUDA)
    except OSError as error:
        # PyInstaller replaces the loader's words by a guess of its own: the library should have been bundled.
        # Only the text is kept, because a name for the error would keep all frames that led here.
        return None, _words(error.__cause__ if isinstance(error.__cause__, OSError) else error), None
    address = version = None
    try:
        function = library.cuDriverGetVersion
    except AttributeError:
        pass
    else:
        address = ctypes.cast(function, ctypes.c_void_p).value
        number = ctypes.c_int(0)
        if function(ctypes.byref(number)) == 0:
            version = parse_cuda_number(number.value)
    return _library_path(library, address) or LIBCUDA, None, version


def _entry_of(path: str | None, variable: str, name: str = "") -> str | None:
    """Return the entry of a variable that leads to a library: a folder that holds ``name``, or the file itself."""
    if path is None or not os.path.isabs(path):
        return None
    entries = entries_of(variable, os.environ.get(variable, ""))
    return next((entry for entry in entries if entry and os.path.realpath(os.path.join(entry, name)) == path), None)


def _library_path(library: ctypes.CDLL, address: int | None) -> str | None:
    if sys.platform == "win32":
        buffer = ctypes.create_unicode_buffer(32768)
        ctypes.windll.kernel32.GetModuleFileNameW(ctypes.c_void_p(library._handle), buffer, len(buffer))
        return buffer.value or None
    maps = read_maps()
    libcudas = [path for path in mapped_libraries(maps) if os.path.basename(path).startswith("libcuda.so")]
    there = mapped_libraries(maps, address) if address is not None else ()
    # WSL maps two files of this name. HAMi's library provides functions of its own: they lie in no libcuda.
    for path in (*there, *libcudas):
        if path in libcudas or not libcudas:
            return path
    return None


@functools.cache
def read_driver_version() -> str | None:
    """Return the driver's version as "580.159.04", from the kernel module if it says so, else from NVML."""
    return parse_kernel_version(read_below(LINUX_ROOT, "proc/driver/nvidia/version")) or read_nvml().driver_version


def _refused(root: Path, path: str) -> RefusedNode | None:
    file = root / path.lstrip("/")
    try:
        if re.fullmatch(r"/dev/(nvidiactl|nvidia-uvm)", path):
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))  # The devices cgroup answers only when it is opened.
        elif re.fullmatch(r"/dev/(nvidia\d+|nvmap)", path) and not os.access(file, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, "not opened: that would wake the GPU")
    except PermissionError as error:
        group = None
        with suppress(OSError, KeyError, NotImplementedError):
            group = file.group()
        return RefusedNode(path, errno.errorcode[error.errno or errno.EACCES], group, _mode_refuses(file))
    except OSError:
        pass  # There is no driver behind it. The driver's own words tell that fault.
    return None


def _mode_refuses(file: Path) -> bool:
    try:
        info = file.stat()
    except PermissionError:  # Its folder could be listed, so its mode is not the cause.
        return False
    except OSError:
        return True
    shift = 6 if info.st_uid == os.geteuid() else 3 if info.st_gid in (os.getegid(), *os.getgroups()) else 0
    return info.st_mode >> shift & 0o6 != 0o6


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml  # Programs that freeze Python look for import statements in the code.

    nvml: Any = pynvml
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        with suppress(Exception):  # The answers stay true if the shutdown fails.
            nvml.nvmlShutdown()


def _ask(nvml: Any, name: str, *arguments: object) -> Any:
    try:
        return getattr(nvml, name)(*arguments)
    except Exception:  # noqa: BLE001 - not supported by this GPU, driver or pynvml: unknown
        return None


def _read_gpu(nvml: Any, refusals: list[Exception], index: int) -> GPU:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:  # noqa: BLE001 - lost, or not ours to open: it is there all the same
        refusals.append(error)
        return GPU(index, None, None, None, None, None, None, None, (), None)
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", device)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", device)
    mig = _ask(nvml, "nvmlDeviceGetMigMode", device)
    slots = (_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", device) or 0) if mig and mig[0] else 0
    instances = []
    for slot in range(slots):
        part = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device, slot)
        if part is not None and (uuid := _string(_ask(nvml, "nvmlDeviceGetUUID", part))) is not None:
            instances.append(uuid)  # Other slots are empty.
    return GPU(
        index=index,
        uuid=_string(_ask(nvml, "nvmlDeviceGetUUID", device)),
        name=_string(_ask(nvml, "nvmlDeviceGetName", device)),
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_total=int(memory.total) if memory else None,
        memory_free=int(memory.free) if memory else None,
        compute_mode=_COMPUTE_MODES.get(_ask(nvml, "nvmlDeviceGetComputeMode", device)),
        mig_enabled=bool(mig[0]) if mig else None,
        mig_uuids=tuple(instances),
        pci_bus_id=_string(getattr(_ask(nvml, "nvmlDeviceGetPciInfo", device), "busId", None)),
    )


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _code(error: Exception | None) -> int | None:
    value = getattr(error, "value", None)  # pynvml.NVMLError has it.
    return value if isinstance(value, int) else None


def _string(value: object) -> str | None:
    if isinstance(value, bytes):  # Older releases of nvidia-ml-py return bytes.
        value = value.decode("utf-8", "replace")
    return value if isinstance(value, str) and value else None


# Folders of drivers that the loader finds by LD_LIBRARY_PATH alone: Kubernetes Engine and nvidia-docker 1, WSL, NixOS,
# Debian, Jetson.
_FOLDERS_OF_DRIVERS: Final = (
    "usr/local/nvidia/lib64",
    "usr/lib64-nvidia",  # Google Colab, where a notebook may change LD_LIBRARY_PATH
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia",
    "usr/lib/aarch64-linux-gnu/tegra",
)

_OF_A_DRIVER: Final = re.compile(r"libcuda\.so\.\d{3,}(\.\d+)+")


@dataclass(frozen=True, slots=True)
class UnlinkedFile:
    """A libcuda.so.580.65.06 in a folder that the loader searches, without the link libcuda.so.1 to it.

    ldconfig makes the link after an installation. It is also a hook of container engines, and fails if the root is
    read-only.
    """

    path: str
    writable: bool  # True: this user may write to its folder.


def find_unlinked(root: Path) -> tuple[UnlinkedFile, ...]:
    """Return at most one file for each folder. Empty files do not count: a container engine mounts others over them."""
    entries = filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    unlinked: dict[str, UnlinkedFile] = {}
    searched: list[str | Path] = [*entries, *map(root.joinpath, DEFAULT_FOLDERS)]
    # On most systems /lib is a link to /usr/lib, whose folders have thousands of names.
    for folder in map(Path, dict.fromkeys(map(os.path.realpath, searched))):
        try:
            names = sorted(filter(_OF_A_DRIVER.fullmatch, os.listdir(folder)))
            whole = [file for file in map(folder.joinpath, names) if file.is_file() and file.stat().st_size]
            if whole and not (folder / LIBCUDA).exists():
                path = os.path.realpath(whole[-1])
                unlinked.setdefault(path, UnlinkedFile(path, os.access(os.path.dirname(path), os.W_OK)))
        except (OSError, ValueError):
            continue
    return tuple(unlinked.values())


def find_interposed(root: Path | None = LINUX_ROOT) -> tuple[str, ...]:
    """Return the libraries loaded before the program that replace functions of the driver: HAMi's libvgpu.so."""
    if root is None:
        return ()
    text = read_text(root / "etc/ld.so.preload")
    entries = [*entries_of("LD_PRELOAD", os.environ.get("LD_PRELOAD", "")), *re.split(r"[:\s]+", text)]
    interposed: dict[str, None] = {}
    for path in filter(os.path.isabs, entries):
        if not os.path.basename(path).startswith("libcuda.so") and defines(path, ("cuInit", "dlsym")):
            interposed[path] = None
    return tuple(interposed)
