"""NCCL through nccl4py: the only module that imports it. For child processes: what hangs here is killed from outside.

The low-level bindings take addresses of device memory, and need neither torch nor cupy nor cuda.core. They are called
without the interpreter lock and let ncclInProgress pass. Every call of a non-blocking communicator may return before it
is done: :meth:`Communicator.is_ready` says when the next one may be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..diagnosis.remedies import commands as remedies
from ..environment.inspection import inspect_environment
from ..errors import GPUError, LibraryNotFoundError, NCCLError, manual
from .environment.nccl import parse_version_number
from .reports import Collective

REQUIREMENT = "nccl4py>=0.6,<0.7"  # 0.x: what is used here may be another in 0.7

# ncclResult_t, nccl.h
_SUCCESS, _SYSTEM_ERROR, REMOTE_ERROR, _IN_PROGRESS = 0, 2, 6, 7
_SUM = 0  # ncclRedOp_t
_DATA_TYPES = {"int32": 2, "float16": 6, "float32": 7, "bfloat16": 9}  # ncclDataType_t

Result = TypeVar("Result")


def load() -> tuple[str, str]:
    """Version and path of the libnccl that this process uses from now on.

    Raises:
        NCCLError: nccl4py is not installed, or broken.
        LibraryNotFoundError: there is no libnccl.so.2.
    """
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise NCCLError(
            "the collective operations need nccl4py, which cannot be imported",
            evidence=[f"{type(error).__name__}: {error}"],
            fixes=[remedies.install(inspect_environment(), [REQUIREMENT])],
        ) from error
    try:
        number = _checked(nccl.get_version)
        path = str(nccl.get_library_path())
    except RuntimeError as error:  # cuda.pathfinder's, for a library that it does not find or that does not load
        raise _library_not_found(error) from error
    return ".".join(map(str, parse_version_number(number))), path


def make_unique_id() -> bytes:
    """What the ranks of a communicator have in common. This process has to live until all of them have joined.

    Raises:
        NCCLError: no network interface can be used, for instance.
    """
    from nccl.bindings import nccl

    return bytes(_checked(nccl.get_unique_id))


class Communicator:
    """One rank's end of the connection between all of them. The current device is the rank's own.

    Raises:
        NCCLError: from every method.
    """

    def __init__(self, rank: int, world_size: int, unique_id: bytes) -> None:
        from nccl.bindings import nccl

        self._nccl: Any = nccl
        config = nccl.Config()
        config.blocking = 0
        shared = nccl.UniqueId.from_buffer(bytearray(unique_id))
        self._handle: Any = _checked(lambda: nccl.comm_init_rank_config(world_size, shared, rank, config))

    def is_ready(self) -> bool:
        """Whether the last call has been taken in; for the work on the GPU, ask the stream."""
        status = int(_checked(lambda: self._nccl.comm_get_async_error(self._handle)))
        if status == _IN_PROGRESS:
            return False
        if status != _SUCCESS:
            raise error_for(status, self._said())
        return True

    def call(self, collective: Collective, send: int, receive: int, stream: int) -> None:
        """Begin an operation on buffers at these addresses."""
        data_type, count = _DATA_TYPES[collective.dtype], collective.count
        if collective.operation == "all_gather":
            arguments: tuple[Any, ...] = (send, receive, count, data_type, self._handle, stream)
        else:
            arguments = (send, receive, count, data_type, _SUM, self._handle, stream)
        function = getattr(self._nccl, collective.operation)
        try:
            _checked(lambda: function(*arguments))
        except NCCLError as error:
            raise error_for(error.status, self._said()) from error

    def abort(self) -> None:
        """Give up whatever is under way, and the communicator."""
        _checked(lambda: self._nccl.comm_abort(self._handle))

    def _said(self) -> str | None:
        try:
            return str(self._nccl.get_last_error(self._handle)) or None
        except Exception:  # noqa: BLE001 - what is asked for is only the words that go with an error
            return None


def error_for(status: int | None, said: str | None = None) -> NCCLError:
    """The error of an ncclResult_t."""
    name, fixes = _MEANINGS.get(status or 0, ("a code that ortgpu does not know", ()))
    return NCCLError(
        f"NCCL failed: {name}",
        evidence=[f"ncclResult_t {status}", *([f"ncclGetLastError: {said.strip()}"] if said else [])],
        fixes=[*map(manual, fixes)],
        status=status,
    )


# Into files: what NCCL prints of less weight than a warning ends with the process of the preflight that it runs in
_SEE_WARNINGS = (
    "read the lines NCCL WARN above, if there are any; NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p has it write more, a "
    "file for each process"
)

# nccl.h, and the causes that NCCL's own troubleshooting names
_MEANINGS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("a call of CUDA failed (ncclUnhandledCudaError)", (_SEE_WARNINGS,)),
    _SYSTEM_ERROR: (
        "a call of the system failed (ncclSystemError)",
        (
            "in a container: give it more shared memory, docker run --shm-size=1g",
            "check that NCCL can use the network: NCCL_SOCKET_IFNAME names the interface",
            _SEE_WARNINGS,
        ),
    ),
    3: ("an internal check failed (ncclInternalError)", (_SEE_WARNINGS,)),
    4: ("an argument has an invalid value (ncclInvalidArgument)", (_SEE_WARNINGS,)),
    5: (
        "it was used in a way that cannot work (ncclInvalidUsage)",
        (
            "correct NCCL_SOCKET_IFNAME, if it is set: it has to name a network interface of this machine",
            _SEE_WARNINGS,
        ),
    ),
    REMOTE_ERROR: (
        "another rank failed, or cannot be reached (ncclRemoteError)",
        ("look at the other ranks first", "check that no firewall lies between the hosts"),
    ),
    8: ("it gave up waiting (ncclTimeout)", (_SEE_WARNINGS,)),
}


def _checked(call: Callable[[], Result]) -> Result:
    """The result of a call of nccl4py, its exceptions as ours."""
    from nccl.bindings import nccl

    try:
        return call()
    except nccl.NCCLError as error:
        raise error_for(int(error.status), str(error)) from error


def _library_not_found(error: RuntimeError) -> GPUError:
    environment = inspect_environment()
    major = environment.provider.cuda_major if environment.provider is not None else None
    return LibraryNotFoundError(
        "the library of NCCL cannot be loaded",
        evidence=str(error).splitlines(),
        fixes=[remedies.install(environment, [f"nvidia-nccl-cu{major or 13}"])],
        missing=("libnccl.so.2",),
    )
