"""The program of a preflight's child: inspect the GPU, join NCCL's communicator, run the operations, check the values.

Any step may hang, or end the process. The child announces each to its parent before it begins. Only the parent talks to
the other ranks.

NCCL is called through nccl4py: only this module imports it. Its low-level bindings take addresses of device memory,
and need neither torch nor cupy nor cuda.core. They release the interpreter lock and accept ncclInProgress. A call may
return before it is done. :meth:`Communicator.is_ready` says when the next one is allowed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..diagnosis.checks.classifier import explain_opening_code
from ..diagnosis.facts import Facts
from ..diagnosis.remedies import fixes as remedies
from ..environment.gpu.cuda import CudaDevice, initialise
from ..environment.gpu.driver import read_driver
from ..environment.inspection import inspect_environment
from ..environment.libraries.catalogue import BY_STEM
from ..environment.packages.installed import locate_packages
from ..environment.ranks import Rank
from ..errors import (
    CollectiveTimeoutError,
    DeviceError,
    DistributedError,
    DriverError,
    GPUError,
    LibraryNotFoundError,
    NCCLError,
    manual,
)
from ..process.late import late
from ..provider.preloading import load, plan
from ..provider.rank_devices import own_device
from ..running.cudart import CudaCallError, CudaRuntime
from .reports import Collective, RankFacts
from .wire import Connection, Message, error_to_message

if TYPE_CHECKING:
    from nccl.bindings import nccl

    from ..diagnosis import diagnosing
    from ..provider import runtime
else:
    nccl = late("nccl.bindings.nccl")
    diagnosing = late("ortgpu.diagnosis.diagnosing")
    runtime = late("ortgpu.provider.runtime")

_RUNTIME = "libcudart"
COMMUNICATOR = "setting up the communicator"
_REPEATS = 5  # Timed calls of each operation, after a call with checked values.
_PAUSE = 0.0001  # seconds between two questions to NCCL or the GPU
_IOLBF = 1  # stdio.h: line by line
REQUIREMENT = "nccl4py>=0.6,<0.7"  # The next minor release of a 0.x may change these functions.

# nccl.h: ncclResult_t, ncclRedOp_t, ncclDataType_t
_SUCCESS, _SYSTEM_ERROR, _INVALID_USAGE, _REMOTE_ERROR, _IN_PROGRESS = 0, 2, 5, 6, 7
_SUM = 0
_DATA_TYPES = {"int32": 2, "float16": 6, "float32": 7, "bfloat16": 9}

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


class Channel(Connection):
    """The connection to the parent, the standard input. It blocks, because a child has nothing else to do."""

    def __init__(self) -> None:
        super().__init__(socket.socket(fileno=os.dup(0)))  # Processes that a library starts do not inherit it.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self.socket.setblocking(True)
        self._arrived: list[Message] = []

    def begin(self, step: str) -> None:
        self.send({"begin": step})

    def fail(self, error: GPUError) -> None:
        self.send({"error": error_to_message(error)})

    def wait(self) -> Message:
        """Return the next message. Ends the process if the parent is gone."""
        while not self._arrived:
            self._arrived = self.receive()
            if not self.is_open:
                os._exit(1)
        return self._arrived.pop(0)


@dataclass(frozen=True, slots=True)
class Task:
    rank: Rank
    calls: tuple[Collective, ...]


def main(parent: int) -> None:
    """Do everything, in order."""
    if os.getppid() != parent:  # it was gone before the kernel was asked to kill this process with it
        os._exit(1)
    # NCCL's warnings go through C's stdout. It keeps lines back for a pipe, and this process may never flush it.
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, ctypes.c_size_t(0))
    channel = Channel()
    message = channel.wait()
    task = Task(Rank(**message["rank"]), tuple(Collective(*call) for call in message["calls"]))
    try:
        channel.begin("looking at the GPU")
        device = _describe(channel, task.rank)
        message = channel.wait()
        if "make_id" in message:
            channel.begin("making NCCL's unique id")
            channel.send({"id": make_unique_id().hex()})
            message = channel.wait()
        assert device is not None  # Otherwise the ranks would have stopped before this.
        until = time.monotonic() + message["seconds"]
        run_collectives(channel, task, device.ordinal, bytes.fromhex(message["id"]), until)
    except GPUError as error:
        channel.fail(error)
        channel.wait()  # the others may still need what this process has in NCCL's bootstrap
    except BaseException:  # noqa: BLE001 - the parent reads the traceback as evidence
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # libraries may hang at exit


def _describe(channel: Channel, rank: Rank) -> CudaDevice | None:
    """Report this rank's facts and faults. Return its GPU, if it has one. Creates no CUDA context."""
    device: CudaDevice | None = None
    problem: GPUError | None = None
    state = initialise()
    if state.code == 0 and state.devices is None:  # the driver works and does not tell of its devices
        device = CudaDevice(rank.local_rank, None, None, None, None, None)
    elif state.devices:
        try:
            device = own_device(rank, state)
        except DistributedError as error:
            problem = error
    else:
        problem = _why_no_device()
    version, path, nccl_problem = None, None, None
    try:
        version, path = load_nccl()
    except GPUError as error:
        nccl_problem = error
    driver = read_driver()
    facts = RankFacts(
        rank.rank,
        socket.gethostname(),
        device.name if device is not None else None,
        device.uuid if device is not None else None,
        driver.version,
        f"{driver.cuda_version[0]}.{driver.cuda_version[1]}" if driver.cuda_version else None,
        version,
        path,
        _onnxruntime(),
    )
    channel.send(
        {
            "facts": asdict(facts),
            "problem": error_to_message(problem) if problem is not None else None,
            "nccl_problem": error_to_message(nccl_problem) if nccl_problem is not None else None,
        }
    )
    return device


def _why_no_device() -> GPUError:
    error = diagnosing.why_unusable(runtime.load_runtime(), cuda=initialise())
    assert error is not None  # a process without a device has a cause
    errors = (error, *error.others)  # Faults of ONNX Runtime or its libraries do not matter here.
    return next((failure for failure in errors if isinstance(failure, (DriverError, DeviceError))), error)


def _onnxruntime() -> str | None:
    build = locate_packages().onnxruntime
    if build.build_name is None:
        return None
    cuda = f" (CUDA {build.cuda_version[0]}.{build.cuda_version[1]})" if build.cuda_version else ""
    if build.cuda_is_plugin:
        cuda = f" (CUDA from a {build.arrival})"
    return f"{build.build_name} {build.build_version}{cuda}"


# The CUDA runtime: the same library that ONNX Runtime would use


def open_gpu(ordinal: int) -> CudaRuntime:
    """Create a CUDA context on this GPU, as the current device of this thread."""
    runtime = CudaRuntime(_load_library(), ordinal)
    runtime.use_device()
    runtime.free(0)  # before CUDA 12, to choose the device alone creates no context
    return runtime


@contextlib.contextmanager
def typed_cuda_errors() -> Iterator[None]:
    """Raise the GPUError for a failed CUDA call."""
    try:
        yield
    except CudaCallError as failure:
        raise explain_opening_code(failure.code, Facts(inspect_environment()), [str(failure)]) from failure


def _load_library() -> str:
    found = plan(locate_packages())
    cudart = tuple(resolution for resolution in found.resolutions if resolution.spec.stem == _RUNTIME)
    report = load(replace(found, resolutions=cudart))
    path = report.path_of(_RUNTIME)
    if path is not None:
        return path
    refused = [f"{file.path}: {file.problem}" for library in report.missing for file in library.rejected]
    environment = inspect_environment()
    wheel = remedies.wheel_of(f"{_RUNTIME}.so", environment.cuda_major)
    raise LibraryNotFoundError(
        "the CUDA runtime, which the collective operations need, was not found",
        evidence=refused or ["there is no file of it in any place where libraries are looked for"],
        fixes=[
            remedies.install_libraries(environment, [wheel])
            if wheel is not None
            else manual("install an ONNX Runtime that is built with CUDA")
        ],
        missing=(BY_STEM[_RUNTIME].sonames.get(environment.cuda_major or 0, f"{_RUNTIME}.so"),),
    )


def load_nccl() -> tuple[str, str]:
    """Load libnccl into this process. Return its version and path."""
    try:
        get_version = nccl.get_version  # The attribute imports NCCL.
    except ImportError as error:
        raise NCCLError(
            "the collective operations need nccl4py, which cannot be imported",
            evidence=[f"{type(error).__name__}: {error}"],
            fixes=[remedies.install(inspect_environment(), [REQUIREMENT])],
        ) from error
    try:
        number = _checked(get_version)
        path = str(nccl.get_library_path())
    except RuntimeError as error:  # cuda.pathfinder found no library, or could not load it
        environment = inspect_environment()
        raise LibraryNotFoundError(
            "the library of NCCL cannot be loaded",
            evidence=str(error).splitlines(),
            fixes=[remedies.install(environment, [f"nvidia-nccl-cu{environment.cuda_major or 13}"])],
            missing=("libnccl.so.2",),
        ) from error
    return f"{number // 10_000}.{number % 10_000 // 100}.{number % 100}", path  # NCCL_VERSION in nccl.h


def make_unique_id() -> bytes:
    """Return the id that the ranks of a communicator share. This process must live until all of them have joined."""
    return bytes(_checked(nccl.get_unique_id))


class Communicator:
    """One rank's end of the connection between all ranks. The current device must be the rank's own."""

    def __init__(self, rank: int, world_size: int, unique_id: bytes) -> None:
        config = nccl.Config()
        config.blocking = 0
        shared = nccl.UniqueId.from_buffer(bytearray(unique_id))
        self._handle: Any = _checked(lambda: nccl.comm_init_rank_config(world_size, shared, rank, config))

    def is_ready(self) -> bool:
        """Return True once NCCL has taken the last call in. The stream says when the GPU is done."""
        status = int(_checked(lambda: nccl.comm_get_async_error(self._handle)))
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise nccl_error(status)
        return status == _SUCCESS

    def call(self, collective: Collective, send: int, receive: int, stream: int) -> None:
        reduction = () if collective.operation == "all_gather" else (_SUM,)
        data_type = _DATA_TYPES[collective.dtype]
        function = getattr(nccl, collective.operation)
        _checked(lambda: function(send, receive, collective.count, data_type, *reduction, self._handle, stream))

    def abort(self) -> None:
        _checked(lambda: nccl.comm_abort(self._handle))


def nccl_error(status: int) -> NCCLError:
    """Return the error for an ncclResult_t, in NCCL's own words."""
    meaning, last = str(nccl.get_error_string(status)), ""
    with contextlib.suppress(Exception):  # An old library has no such function.
        last = str(nccl.get_last_error(nccl.Comm())).strip()  # of the process: NCCL ignores the communicator
    return NCCLError(
        f"NCCL failed: {meaning.partition(' (')[0]}",  # in brackets: what to set, for a developer of the program
        evidence=[f"ncclResult_t {status}: {meaning}", *([f"ncclGetLastError: {last}"] if last else [])],
        fixes=map(manual, _FIXES.get(status, (_SEE_WARNINGS,))),
        status=status,
    )


def _checked(call: Callable[[], Result]) -> Result:
    """Return the result of a call of nccl4py. Raises the NCCLError of ortgpu for its own."""
    try:
        return call()
    except nccl.NCCLError as error:
        raise nccl_error(int(error.status)) from error


def run_collectives(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Run each call once with values checked, then timed. Report the seconds of each, or the error.

    Raises a GPUError that comes before there is a communicator.
    """
    channel.begin("opening the GPU")
    with typed_cuda_errors():
        gpu = open_gpu(ordinal)
        stream = gpu.new_stream()
    channel.begin(COMMUNICATOR)
    communicator = Communicator(task.rank.rank, task.rank.world_size, unique_id)
    try:
        _wait(communicator.is_ready, COMMUNICATOR, until)
        seconds = []
        for call in task.calls:
            channel.begin(str(call))
            with typed_cuda_errors():
                seconds.append(_run(call, task.rank, gpu, stream, communicator, until))
        channel.send({"results": seconds})
        channel.begin("waiting for the other ranks")  # after the results: a rank that hangs before is behind the others
        channel.wait()  # the end: no other rank needs this one any more
    except GPUError as error:
        channel.fail(error)  # The next line may hang as well.
    communicator.abort()


def _run(
    call: Collective, rank: Rank, gpu: CudaRuntime, stream: int, communicator: Communicator, until: float
) -> float:
    def wait() -> None:
        _wait(communicator.is_ready, str(call), until)
        _wait(lambda: gpu.is_done(stream), str(call), until)

    sent, expected = values(call, rank)
    received = np.zeros_like(expected)
    send, receive = gpu.allocate(sent.nbytes), gpu.allocate(received.nbytes)
    gpu.copy(send, sent.ctypes.data, sent.nbytes, stream)
    gpu.copy(receive, received.ctypes.data, received.nbytes, stream)
    communicator.call(call, send, receive, stream)
    wait()
    gpu.copy(received.ctypes.data, receive, received.nbytes, stream)
    wait()
    check(call, rank, received, expected)
    start, end = gpu.new_event(), gpu.new_event()
    gpu.record(start, stream)
    for _ in range(_REPEATS):
        communicator.call(call, send, receive, stream)
        _wait(communicator.is_ready, str(call), until)
    gpu.record(end, stream)
    wait()
    gpu.free(send)
    gpu.free(receive)
    return gpu.seconds_between(start, end) / _REPEATS


def _wait(is_done: Callable[[], bool], step: str, until: float) -> None:
    while not is_done():
        if time.monotonic() > until:
            raise CollectiveTimeoutError(f"{step} did not end before the deadline", phase=step)
        time.sleep(_PAUSE)


# Values: small whole numbers, each sent by one rank alone, so that every type holds the sum exactly


def values(call: Collective, rank: Rank) -> tuple[Any, Any]:
    """Return the array that a rank sends and the one that it must receive. bfloat16 is in uint16."""
    number, world_size = rank.rank, rank.world_size
    sent, received = (np.arange(size, dtype=np.int32) for size in call.sizes(world_size))
    if call.operation == "all_gather":
        everyone = received // call.count
        return _typed(call, _mark(sent, number)), _typed(call, _mark(received % call.count, everyone))
    numbers = np.where(sent % world_size == number, _mark(sent, 0), 0)
    first = number * call.count if call.operation == "reduce_scatter" else 0
    return _typed(call, numbers), _typed(call, _mark(received + first, 0))


def _mark(index: Any, rank: Any) -> Any:
    return 1 + (index + 3 * rank) % 7


def _typed(call: Collective, array: Any) -> Any:
    if call.dtype != "bfloat16":
        return array.astype(call.dtype)
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # the upper half of a float32


def check(call: Collective, rank: Rank, received: Any, expected: Any) -> None:
    wrong = np.flatnonzero(received != expected)
    if wrong.size:
        first = int(wrong[0])
        raise NCCLError(
            f"{call} gave wrong values on rank {rank.rank}",
            evidence=[
                f"{wrong.size} of {expected.size} elements are wrong",
                f"element {first}: {received[first]} instead of {expected[first]}",
            ],
            fixes=[manual("look for faults of the GPUs and of the links between them: dmesg names them as Xid")],
            ranks=(rank.rank,),
            phase=str(call),
        )
