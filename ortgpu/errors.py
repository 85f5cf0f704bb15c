"""The catalogue of errors: one exception class for each cause that keeps a model off the GPU.

A check in :mod:`ortgpu.diagnosis` returns one of these or None, the doctor prints them, and a session raises the first
and attaches the others. The index of ERRORS.md draws the tree of the classes.

``str()`` of an error shows in this order: what failed, in one sentence; the facts behind it, one on a line; the fixes,
one on a line; and the code for ``ortgpu explain``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

FixKind = Literal["shell", "python", "manual"]
Needs = Literal["root", "reboot", "driver", "hardware", "host"]
Severity = Literal["fatal", "warning"]

# Line ends, terminal controls and marks that turn the direction of writing: C0 without the tab, DEL, C1 and Unicode's.
# A name in a model, a path from a client or the words of another host may hold them, and would look like our own words.
_ESCAPES = {
    code: chr(code).encode("unicode_escape").decode()
    for first, last in (
        (0, 8),
        (10, 31),
        (127, 159),
        (0x61C, 0x61C),
        (0x200E, 0x200F),
        (0x2028, 0x202E),
        (0x2066, 0x2069),
    )
    for code in range(first, last + 1)
}


def escape_controls(text: str) -> str:
    """Return a quoted text as one line without control characters; they are written as in a Python literal."""
    return text.translate(_ESCAPES)


def _escape_arguments(record: logging.LogRecord) -> bool:
    """Keep the texts that a record of the log quotes from adding lines to it."""
    if isinstance(record.args, tuple):
        record.args = tuple(escape_controls(value) if isinstance(value, str) else value for value in record.args)
    return True


for _name in ("ortgpu", "ortgpu.pool"):  # A logger does not filter the records of its children.
    logging.getLogger(_name).addFilter(_escape_arguments)


class Fix(str):
    """A fix for an error, as the text that is printed.

    ``kind`` is ``"shell"`` for a command line, ``"python"`` for code to run before the session is made, and
    ``"manual"`` for a sentence. ``needs`` is None if an ordinary user can apply the fix in this environment. Otherwise
    it names the requirement: ``"root"``, ``"reboot"``, ``"driver"``, ``"hardware"``, or ``"host"`` for the place that
    starts this container or job.

    Control characters are escaped. The lines of a command stay lines.
    """

    kind: FixKind
    needs: Needs | None

    def __new__(cls, text: str, *, kind: FixKind = "shell", needs: Needs | None = None) -> Fix:
        lines = [text] if kind == "manual" else text.split("\n")
        self = super().__new__(cls, "\n".join(map(escape_controls, lines)))
        self.kind = kind
        self.needs = needs
        return self

    @property
    def executable(self) -> bool:
        """True if this user can run the text here as it is."""
        return self.kind != "manual" and self.needs is None

    def __repr__(self) -> str:
        return f"Fix({str(self)!r}, kind={self.kind!r}, needs={self.needs!r})"


def shell(command: str, *, needs: Needs | None = None) -> Fix:
    return Fix(command, kind="shell", needs=needs)


def python(code: str) -> Fix:
    return Fix(code, kind="python")


def manual(sentence: str, *, needs: Needs | None = None) -> Fix:
    return Fix(sentence, kind="manual", needs=needs)


class GPUError(RuntimeError):
    """A model cannot run on its GPU. The class itself, not a subclass, means that the model cannot be read.

    Attributes:
        code: a stable kebab-case name, the argument of ``ortgpu explain``.
        summary: one sentence that says what failed.
        evidence: the facts behind the summary, one line each.
        fixes: the fixes, the most likely first; see :class:`Fix`.
        others: further problems that the same diagnosis found, the most likely first.
        consequence_of: the code of the problem that explains this one, or None for a root cause.
        severity: ``"fatal"`` if no session can be opened with this problem, else ``"warning"``.
        fields: the names of the attributes that subclasses annotate.
        explains: the codes of the problems that this one, as a root cause, may bring about.

    Control characters in the summary and the evidence are escaped; the fields hold names and paths as they are. Errors
    pickle with all attributes, but without ``__cause__`` and notes.
    """

    code: ClassVar[str] = "gpu-error"
    fields: ClassVar[tuple[str, ...]] = ()
    explains: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, object]] = {}

    def __init_subclass__(cls) -> None:
        """Make fields of the annotations, and move their defaults out of the class: only instances have them.

        Ray raises an object of its own subclass. That object looks up an attribute in the original error only if its
        class lacks the attribute, so a class attribute would hide the value.
        """
        super().__init_subclass__()
        if cls.__module__ == __name__ and "code" not in vars(cls):  # NoDeviceError has the code no-device.
            words = re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__.removesuffix("Error"))
            cls.code = words.lower()
        # Python 3.14 has this attribute too, thanks to the __future__ import.
        annotations = tuple(vars(cls).get("__annotations__", ()))
        cls.fields = (*cls.fields, *annotations)
        cls._defaults = dict(cls._defaults)
        for name in annotations:
            if name in vars(cls):
                cls._defaults[name] = vars(cls)[name]
                delattr(cls, name)

    def __init__(
        self,
        summary: str,
        *,
        evidence: Iterable[str] = (),
        fixes: Iterable[Fix | str] = (),
        others: Iterable[GPUError] = (),
        consequence_of: str | None = None,
        severity: Severity = "fatal",
        **details: object,
    ) -> None:
        summary = escape_controls(summary)
        super().__init__(summary)
        self.summary = summary
        self.evidence: tuple[str, ...] = tuple(map(escape_controls, evidence))
        self.fixes: tuple[Fix, ...] = tuple(f if isinstance(f, Fix) else Fix(f) for f in fixes)
        self.others: tuple[GPUError, ...] = tuple(others)
        self.consequence_of = consequence_of
        self.severity: Severity = severity
        unknown = set(details) - set(self.fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        for name in self.fields:
            setattr(self, name, details.get(name, self._defaults.get(name)))

    def __str__(self) -> str:
        lines = [self.summary]
        lines += [f"  - {fact}" for fact in self.evidence]
        if self.fixes:
            lines.append("To fix it:")
            lines += ["    " + line for fix in self.fixes for line in fix.splitlines()]
        for label, following in (("This explains", True), ("Also found", False)):
            problems = [f"{e.code} ({e.summary})" for e in self.others if (e.consequence_of is not None) == following]
            if problems:
                lines.append(f"{label}: " + "; ".join(problems))
        lines.append(f"More: ortgpu explain {self.code}")
        return "\n".join(lines)

    def details(self) -> dict[str, object]:
        """Return the fields that this class adds to its base, by name."""
        return {name: getattr(self, name) for name in self.fields}

    def as_dict(self) -> dict[str, object]:
        """Return the facts that ``str()`` shows as plain data for JSON."""
        return {
            "type": type(self).__name__,
            "code": self.code,
            "severity": self.severity,
            "summary": self.summary,
            "evidence": list(self.evidence),
            "fixes": [{"text": str(f), "kind": f.kind, "needs": f.needs} for f in self.fixes],
            "consequence_of": self.consequence_of,
            "others": [other.code for other in self.others],
            "details": {name: _plain(value) for name, value in self.details().items()},
        }

    def with_others(self, others: Iterable[GPUError]) -> GPUError:
        """Attach the other problems that were found. Returns this error."""
        self.others = tuple(other for other in others if other is not self)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        state = {
            "evidence": self.evidence,
            "fixes": self.fixes,
            "others": self.others,
            "consequence_of": self.consequence_of,
            "severity": self.severity,
            **self.details(),
        }
        return _rebuild, (type(self), self.summary, state)


def _rebuild(cls: type[GPUError], summary: str, state: dict[str, Any]) -> GPUError:
    return cls(summary, **state)


def _plain(value: object) -> object:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)


class PackageError(GPUError, ImportError):
    """The ``onnxruntime`` that this process would import cannot use a GPU.

    The class itself means that a package needed by an integration is not installed.
    """

    code = "package-error"


class OnnxRuntimeNotInstalledError(PackageError):
    """No distribution provides ``onnxruntime``."""

    code = "onnxruntime-not-installed"


class CPUOnlyPackageError(PackageError):
    """The package that provides ``onnxruntime`` was built without CUDA. ``package`` and ``version`` name it."""

    package: str | None
    version: str | None


class ConflictingPackagesError(PackageError):
    """Several installed packages, named in ``packages``, own the same ``onnxruntime`` folder. The last one wins."""

    explains = ("cpu-only-package", "broken-package", "training-unavailable")
    packages: tuple[str, ...] = ()


class BrokenPackageError(PackageError):
    """Files of the installed package are missing, altered, or cannot be loaded.

    ``files`` lists the known files, by path or as the record of ``package`` names them.
    """

    explains = ("broken-package", "onnxruntime-not-installed", "provider-fallback", "training-unavailable")
    package: str | None
    files: tuple[str, ...] = ()


class UnsupportedPlatformError(PackageError):
    """There is no CUDA build of ONNX Runtime for this operating system, ``system``, or architecture, ``machine``."""

    explains = ("cpu-only-package", "driver-not-found", "onnxruntime-not-installed")
    system: str | None
    machine: str | None


class LibraryError(GPUError, OSError):
    """A CUDA or cuDNN library that the provider needs is not usable."""

    code = "library-error"


class LibraryNotFoundError(LibraryError):
    """Libraries that the provider needs were not found. ``missing`` lists the sonames or DLLs of all of them."""

    explains = ("provider-fallback",)
    missing: tuple[str, ...] = ()


class LibraryVersionError(LibraryError):
    """Only other major versions of needed libraries were found.

    ``needed`` lists the needed names. ``found`` maps the name of each found library to its path.
    """

    needed: tuple[str, ...] = ()
    found: dict[str, str] | None


class LibraryConflictError(LibraryError):
    """Libraries that exclude each other are, or would be, in this process. ``libraries`` lists the known files."""

    libraries: tuple[str, ...] = ()


class RuntimeConflictError(LibraryError):
    """The CUDA provider would call into another ONNX Runtime of this process. ``libraries`` lists its known files."""

    libraries: tuple[str, ...] = ()


class DriverError(GPUError):
    """The NVIDIA driver is the problem."""

    code = "driver-error"


class DriverNotFoundError(DriverError):
    """``libcuda.so.1`` (``nvcuda.dll``) cannot be loaded: there is no driver, or this container was not given it."""

    explains = ("no-device", "driver-too-old")


class DriverTooOldError(DriverError):
    """The driver supports an older CUDA than the installed ONNX Runtime needs.

    ``driver_version`` is a text like "535.104.05". ``driver_cuda`` and ``needed_cuda`` are (major, minor). None means
    unknown.
    """

    explains = ("driver-unusable", "no-device")
    driver_version: str | None
    driver_cuda: tuple[int, int] | None
    needed_cuda: tuple[int, int] | None


class DriverUnusableError(DriverError):
    """The driver is there and does not work. ``cuda_code`` is the code that ``cuInit`` or the CUDA runtime returned."""

    explains = ("driver-too-old", "driver-unusable", "no-device")
    cuda_code: int | None


class DeviceError(GPUError):
    """The GPU is the problem."""

    code = "device-error"


class NoDeviceError(DeviceError):
    """CUDA sees no GPU: there is none, or this process is not allowed to see it."""

    explains = ("device-not-found",)


class DeviceNotFoundError(DeviceError, LookupError):
    """The requested GPU is not among those that this process sees.

    ``requested`` is the request. ``available`` describes the GPUs that the process sees; it is empty if unknown.
    """

    requested: object
    available: tuple[str, ...] = ()


class DeviceBusyError(DeviceError):
    """The GPU accepts no further process (compute mode), or another process holds it. ``uuid`` names it, if known."""

    uuid: str | None


class UnsupportedDeviceError(DeviceError):
    """The installed ONNX Runtime, or the cuDNN that it uses, contains no code for this generation of GPU.

    ``device`` is the name of the GPU, ``compute_capability`` is (major, minor). ``architectures`` lists the
    architectures with code; it is empty if they were not read.
    """

    device: str | None
    compute_capability: tuple[int, int] | None
    architectures: tuple[str, ...] = ()


class InsufficientDeviceMemoryError(DeviceError, MemoryError):
    """The GPU has too little free memory to open the session. Sizes are in bytes; None means unknown."""

    requested: int | None
    free: int | None
    total: int | None


class ProviderError(GPUError):
    """ONNX Runtime's execution providers cannot do what was requested.

    The class itself means that the installed ONNX Runtime lacks a feature of the model. Only a diagnosis reports it.
    """

    code = "provider-error"


class ProviderRequestError(ProviderError, ValueError):
    """The request for a session is malformed, contradicts itself, or names something that does not exist.

    Also, an argument may be impossible together with another one, or with this model. ``requested`` is the request.
    """

    requested: object


class ProviderOptionError(ProviderError, ValueError):
    """The installed provider does not know the name or value of an option.

    ``provider``, ``option`` and ``value`` name the option.
    """

    provider: str | None
    option: str | None
    value: str | None


class ProviderFallbackError(ProviderError):
    """ONNX Runtime left the GPU and no check knows why. ``bound`` lists the providers that it took."""

    bound: tuple[str, ...] = ()


class PlacementError(GPUError):
    """Compute nodes are on the CPU. ``nodes`` lists them, each a ``PlacedNode``; it is empty if they are unknown."""

    nodes: tuple[Any, ...] = ()


class ExecutionError(GPUError):
    """A session on the GPU failed while running.

    The class itself means that the session or pool is closed, or that no GPU of the pool can be used any more.
    """

    code = "execution-error"


class GPUOutOfMemoryError(ExecutionError, MemoryError):
    """A run needed more GPU memory than there was. Sizes are in bytes; None means unknown."""

    requested: int | None
    free: int | None
    total: int | None


class PoisonedContextError(ExecutionError):
    """A sticky CUDA error ended this process's use of the GPU. ``cuda_code`` is the first such error."""

    cuda_code: int | None


class ForkedSessionError(ExecutionError):
    """CUDA was used before this process was forked, and does not survive a fork.

    ``creator_pid`` is the process that used CUDA, ``pid`` this process.
    """

    creator_pid: int | None
    pid: int | None


class ProviderFailureError(ExecutionError):
    """The CUDA provider, cuDNN, cuBLAS or TensorRT failed. ``library`` and ``status`` are set if known."""

    library: str | None
    status: str | None


class QueueFullError(ExecutionError):
    """The batching service already has ``limit`` waiting requests."""

    limit: int | None


class WorkerLostError(ExecutionError):
    """A worker process of a pool died or exceeded the deadline, and so did the worker that ran the request again.

    ``worker`` is the index of the worker in ``pool.health()``, and ``device`` is its device as text. ``cause`` is the
    name of the signal that ended it, its exit status, its last error, or the deadline.
    """

    worker: int | None
    device: str | None
    cause: str | None


class DistributedError(GPUError):
    """Processes cannot work together. ``ranks`` lists the ranks concerned, ``phase`` names their work at that time."""

    code = "distributed-error"
    ranks: tuple[int, ...] = ()
    phase: str | None


class LauncherConflictError(DistributedError):
    """The variables of two launchers contradict each other, or the variables of one launcher are incomplete."""


class RankDeviceError(DistributedError):
    """A rank has no GPU of its own."""


class RendezvousError(DistributedError):
    """Ranks did not meet before the deadline, over the network or in a folder."""


class CollectiveTimeoutError(DistributedError):
    """A collective operation did not end before the deadline."""


class CollectiveMismatchError(DistributedError):
    """Ranks planned different collective operations, or planned them in another order."""


class NCCLError(DistributedError):
    """NCCL cannot be used, gave wrong values or returned an error. ``status`` is its ncclResult_t, or None."""

    status: int | None


class MPIInitError(DistributedError):
    """MPI cannot be started, or a part of MPI is missing."""


class TrainingUnavailableError(DistributedError):
    """ONNX Runtime's training API, or a part of it, is not available in this environment.

    ``reason`` is "not installed", "shadowed", "no torch", "onnx too new", "no ORTModule" or "import fails". For a
    feature that no published package has, it is "nccl", "horovod", "cuda", "checkpoint shards" or "model parallelism".
    """

    reason: str | None


class CollectiveOpsUnavailableError(DistributedError):
    """The installed ONNX Runtime was built without collective operators."""


class CPUExecutionWarning(UserWarning):
    """A warning that ``allow_cpu`` let a session run on the CPU.

    ``error`` is the exception that would have been raised. ``model`` is the path of the model, or "<bytes>".
    """

    def __init__(self, error: GPUError, model: str = "<bytes>") -> None:
        super().__init__(
            f"{escape_controls(model)} is running on the CPU, as allow_cpu or ORTGPU_ALLOW_CPU allows. "
            f"Otherwise it would have raised {type(error).__name__}:\n{error}"
        )
        self.error = error
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return CPUExecutionWarning, (self.error, self.model)


class PerformanceWarning(UserWarning):
    """A warning that ONNX Runtime loses time silently, for instance by planning convolutions again and again."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun for a message: 1 file, 2 files."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def catalogue() -> dict[str, type[GPUError]]:
    """Return every error class of this module, by code."""
    classes = [cls for cls in globals().values() if isinstance(cls, type)]
    return {cls.code: cls for cls in classes if issubclass(cls, GPUError)}


if not TYPE_CHECKING:  # Type checkers read no computed list, and take every name without an underscore.
    __all__ = sorted(
        ["CPUExecutionWarning", "Fix", "PerformanceWarning", *(cls.__name__ for cls in catalogue().values())]
    )
