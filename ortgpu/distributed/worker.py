"""What the child of a preflight does: look at its GPU, join NCCL's communicator, run the operations, check the values.

Expendable by design: any step may hang, or end the process. Each is announced to the parent before it begins. Only the
parent talks to the other ranks.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..environment.gpu.cuda import CudaDevice, initialise
from ..environment.ranks import Rank
from ..errors import (
    CollectiveTimeoutError,
    DeviceError,
    DistributedError,
    DriverError,
    GPUError,
    NCCLError,
    manual,
)
from ..provider.rank_devices import own_device
from . import nccl
from .cuda_runtime import DeviceQueue
from .reports import Collective, RankFacts
from .wire import FROM_A_RANK, Decoder, Message, encode, error_to_message

COMMUNICATOR = "setting up the communicator"
_REPEATS = 5  # timed calls of each operation, after the one whose values are checked
_PAUSE = 0.0001  # seconds between two looks at whether NCCL or the GPU is done
_IOLBF = 1  # stdio.h: line by line


class Channel:
    """To the parent and back. Blocking: there is nothing else for a child to do."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decoder = Decoder(FROM_A_RANK)
        self._arrived: list[Message] = []

    def send(self, message: Message) -> None:
        data = encode(message)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def begin(self, step: str) -> None:
        self.send({"begin": step})

    def fail(self, error: GPUError) -> None:
        self.send({"error": error_to_message(error)})

    def receive(self) -> Message:
        """The next message; ends the process when the parent is gone."""
        while not self._arrived:
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                os._exit(1)
            self._arrived += self._decoder.feed(data)
        return self._arrived.pop(0)


@dataclass(frozen=True, slots=True)
class Task:
    rank: Rank
    calls: tuple[Collective, ...]


Run = Callable[[Channel, Task, int, bytes, float], None]


def main(descriptor: int, parent: int, run: Run | None = None) -> None:
    """Everything, in order. ``run`` takes the place of :func:`run_collectives` in tests."""
    _end_with(parent)
    _show_every_line_at_once()
    channel = Channel(descriptor)
    task = _task_of(channel.receive())
    try:
        channel.begin("looking at the GPU")
        device = look(channel, task.rank)
        message = channel.receive()
        if "make_id" in message:
            channel.begin("making NCCL's unique id")
            channel.send({"id": nccl.make_unique_id().hex()})
            message = channel.receive()
        assert device is not None  # else the ranks would have stopped before this
        until = time.monotonic() + message["seconds"]
        (run or run_collectives)(channel, task, device.ordinal, bytes.fromhex(message["id"]), until)
    except GPUError as error:
        channel.fail(error)
        channel.receive()  # the others may still need what this process has in NCCL's bootstrap
    except BaseException:  # noqa: BLE001 - the parent reads what is written, and takes it for evidence
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # what libraries do at exit is of no interest, and may hang


def _end_with(parent: int) -> None:
    """The kernel kills this process with the one that started it, but where that was gone before it was asked to."""
    if os.getppid() != parent:
        os._exit(1)


def _show_every_line_at_once() -> None:
    """NCCL's warnings go through C's stdout, which holds lines for a pipe back; this process may never flush it."""
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, ctypes.c_size_t(0))


def _task_of(message: Message) -> Task:
    return Task(Rank(**message["rank"]), tuple(Collective(*call) for call in message["calls"]))


# Facts


def look(channel: Channel, rank: Rank) -> CudaDevice | None:
    """Report this rank's facts, with what is wrong here; its GPU, if it has one. Makes no CUDA context."""
    device: CudaDevice | None = None
    problem: GPUError | None = None
    state = initialise()
    if state.code == 0 and state.devices is None:  # the driver works and does not tell of its devices
        device = CudaDevice(rank.local_rank, None, None, None, None, None)
    elif state.devices:
        try:
            device = own_device(rank, state.devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except DistributedError as error:
            problem = error
    else:
        problem = _why_no_device()
    version, path, nccl_problem = None, None, None
    try:
        version, path = nccl.load()
    except GPUError as error:
        nccl_problem = error
    facts = RankFacts(
        rank.rank,
        socket.gethostname(),
        device.name if device is not None else None,
        device.uuid if device is not None else None,
        *_driver(),
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
    from ..diagnosis import failure
    from ..provider.runtime import load_runtime

    error = failure.why_unusable(load_runtime(), cuda=initialise())
    assert error is not None  # without a cause there is always one
    found = (error, *error.others)  # what is wrong with ONNX Runtime or its libraries as well does not matter here
    return next((each for each in found if isinstance(each, (DriverError, DeviceError))), error)


def _driver() -> tuple[str | None, str | None]:
    from ..environment.gpu.driver import read_driver

    driver = read_driver()
    cuda = driver.cuda_version
    return driver.version, f"{cuda[0]}.{cuda[1]}" if cuda else None


def _onnxruntime() -> str | None:
    from ..environment.packages.installed import locate_packages

    build = locate_packages().onnxruntime
    if build.build_name is None:
        return None
    cuda = f" (CUDA {build.cuda_version[0]}.{build.cuda_version[1]})" if build.cuda_version else ""
    return f"{build.build_name} {build.build_version}{cuda}"


# Collective operations


def run_collectives(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Every call of the task, its values checked, then timed. Reports the seconds of each call, or why it failed.

    What is not done at ``until``, by time.monotonic, is a CollectiveTimeoutError.

    Raises:
        GPUError: there is no communicator yet.
    """
    channel.begin("opening the GPU")
    queue = DeviceQueue(ordinal)
    channel.begin(COMMUNICATOR)
    communicator = nccl.Communicator(task.rank.rank, task.rank.world_size, unique_id)
    try:
        _wait(communicator.is_ready, COMMUNICATOR, until)
        seconds = []
        for call in task.calls:
            channel.begin(str(call))
            seconds.append(_run(call, task.rank, queue, communicator, until))
        channel.send({"results": seconds})
        channel.begin("waiting for the other ranks")  # afterwards: who hangs before this is behind the others
        channel.receive()  # the end: only now no other rank needs this one any more
    except GPUError as error:
        channel.fail(error)  # before the next line, which may hang as well
    communicator.abort()


def _run(call: Collective, rank: Rank, queue: DeviceQueue, communicator: nccl.Communicator, until: float) -> float:
    def wait() -> None:
        _wait(communicator.is_ready, str(call), until)
        _wait(queue.is_done, str(call), until)

    sent, expected = values(call, rank)
    received = np.zeros_like(expected)
    send, receive = queue.allocate(sent.nbytes), queue.allocate(received.nbytes)
    queue.copy(send, sent.ctypes.data, sent.nbytes)
    queue.copy(receive, received.ctypes.data, received.nbytes)
    communicator.call(call, send, receive, queue.stream)
    wait()
    queue.copy(received.ctypes.data, receive, received.nbytes)
    wait()
    check(call, rank, received, expected)
    start, end = queue.new_event(), queue.new_event()
    queue.record(start)
    for _ in range(_REPEATS):
        communicator.call(call, send, receive, queue.stream)
        _wait(communicator.is_ready, str(call), until)
    queue.record(end)
    wait()
    queue.free(send)
    queue.free(receive)
    return queue.seconds_between(start, end) / _REPEATS


def _wait(is_done: Callable[[], bool], step: str, until: float) -> None:
    while not is_done():
        if time.monotonic() > until:
            raise CollectiveTimeoutError(f"{step} did not end before the deadline", phase=step)
        time.sleep(_PAUSE)


# Values: small whole numbers, of which one rank alone hands in each, so that every type holds the sum exactly


def values(call: Collective, rank: Rank) -> tuple[Any, Any]:
    """What a rank hands in, and what it has to receive, as arrays of a type that NumPy knows."""
    number, world_size = rank.rank, rank.world_size
    sent, received = (np.arange(size, dtype=np.int32) for size in call.sizes(world_size))
    if call.operation == "all_gather":
        everyone = received // call.count
        return _typed(call, _mark(sent, number)), _typed(call, _mark(received % call.count, everyone))
    own = np.where(sent % world_size == number, _mark(sent, 0), 0)
    first = number * call.count if call.operation == "reduce_scatter" else 0
    return _typed(call, own), _typed(call, _mark(received + first, 0))


def _mark(index: Any, rank: Any) -> Any:
    return 1 + (index + 3 * rank) % 7


def _typed(call: Collective, array: Any) -> Any:
    if call.dtype != "bfloat16":
        return array.astype(call.dtype)
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # the upper half of a float32


def check(call: Collective, rank: Rank, received: Any, expected: Any) -> None:
    """Raises NCCLError where a value is not what the ranks' contributions make."""
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
