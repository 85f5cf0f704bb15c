"""NCCL through nccl4py, which only this module imports. For child processes: a call that hangs is killed from outside.

The low-level bindings take addresses of device memory, and need neither torch nor cupy nor cuda.core. They release the
interpreter lock and accept ncclInProgress. A call of a non-blocking communicator may return before it is done.
:meth:`Communicator.is_ready` says when the next call is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..diagnosis.remedies import commands as remedies
from ..environment.inspection import inspect_environment
from ..errors import LibraryNotFoundError, NCCLError, manual
from .environment import parse_version_number
from .reports import Collective

REQUIREMENT = "nccl4py>=0.6,<0.7"  # of a 0.x, the next minor release may change what is used here

# nccl.h: ncclResult_t, ncclRedOp_t, ncclDataType_t
_SUCCESS, _SYSTEM_ERROR, _INVALID_USAGE, _REMOTE_ERROR, _IN_PROGRESS = 0, 2, 5, 6, 7
_SUM = 0
_DATA_TYPES = {"int32": 2, "float16": 6, "float32": 7, "bfloat16": 9}

_MEANINGS = {
    1: "a call of CUDA failed (ncclUnhandledCudaError)",
    _SYSTEM_ERROR: "a call of the system failed (ncclSystemError)",
    3: "an internal check failed (ncclInternalError)",
    4: "an argument has an invalid value (ncclInvalidArgument)",
    _INVALID_USAGE: "it was used in a way that cannot work (ncclInvalidUsage)",
    _REMOTE_ERROR: "another rank failed, or cannot be reached (ncclRemoteError)",
    8: "it gave up waiting (ncclTimeout)",
}
# Into files, because output below the weight of a warning is lost with the process of the preflight
_SEE_WARNINGS = (
    "read the lines NCCL WARN above, if there are any; NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p has it write more, a "
    "file for each process"
)
# From NCCL's own page on troubleshooting
_FIXES = {
    _SYSTEM_ERROR: (
        "in a container: give it more shared memory, docker run --shm-size=1g",
        "check that NCCL can use the network: NCCL_SOCKET_IFNAME names the interface",
        _SEE_WARNINGS,
    ),
    _INVALID_USAGE: (
        "correct NCCL_SOCKET_IFNAME, if it is set: it has to name a network interface of this machine",
        _SEE_WARNINGS,
    ),
    _REMOTE_ERROR: ("look at the other ranks first", "check that no firewall lies between the hosts"),
}

Result = TypeVar("Result")


def load() -> tuple[str, str]:
    """Load libnccl into this process. Return its version and path.

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
    except RuntimeError as error:  # cuda.pathfinder found no library, or could not load it
        environment = inspect_environment()
        raise LibraryNotFoundError(
            "the library of NCCL cannot be loaded",
            evidence=str(error).splitlines(),
            fixes=[remedies.install(environment, [f"nvidia-nccl-cu{environment.cuda_major or 13}"])],
            missing=("libnccl.so.2",),
        ) from error
    return ".".join(map(str, parse_version_number(number))), path


def make_unique_id() -> bytes:
    """Return the id that the ranks of a communicator share. This process must live until all of them have joined.

    Raises:
        NCCLError: no network interface can be used, for instance.
    """
    from nccl.bindings import nccl

    return bytes(_checked(nccl.get_unique_id))


class Communicator:
    """One rank's end of the connection between all ranks. The current device must be the rank's own.

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
        """Return True once NCCL has taken the last call in. The stream says when the GPU is done."""
        status = int(_checked(lambda: self._nccl.comm_get_async_error(self._handle)))
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise error_for(status, self._last_error())
        return status == _SUCCESS

    def call(self, collective: Collective, send: int, receive: int, stream: int) -> None:
        """Begin an operation on buffers at these addresses."""
        reduction = () if collective.operation == "all_gather" else (_SUM,)
        data_type = _DATA_TYPES[collective.dtype]
        function = getattr(self._nccl, collective.operation)
        try:
            _checked(lambda: function(send, receive, collective.count, data_type, *reduction, self._handle, stream))
        except NCCLError as error:
            raise error_for(error.status, self._last_error()) from error

    def abort(self) -> None:
        """Give up the operations under way, and the communicator."""
        _checked(lambda: self._nccl.comm_abort(self._handle))

    def _last_error(self) -> str | None:
        try:
            return str(self._nccl.get_last_error(self._handle)) or None
        except Exception:  # noqa: BLE001 - only words to add to an error
            return None


def error_for(status: int | None, words: str | None = None) -> NCCLError:
    """Return the error for an ncclResult_t. ``words`` are NCCL's own."""
    return NCCLError(
        f"NCCL failed: {_MEANINGS.get(status or 0, 'a code that ortgpu does not know')}",
        evidence=[f"ncclResult_t {status}", *([f"ncclGetLastError: {words.strip()}"] if words else [])],
        fixes=map(manual, _FIXES.get(status or 0, (_SEE_WARNINGS,))),
        status=status,
    )


def _checked(call: Callable[[], Result]) -> Result:
    """Return the result of a call of nccl4py. Raises the NCCLError of ortgpu for its own."""
    from nccl.bindings import nccl

    try:
        return call()
    except nccl.NCCLError as error:
        raise error_for(int(error.status), str(error)) from error
