"""GPUs for tests, in any test framework. The fixtures of :mod:`ortgpu.pytest_plugin` use this module.

    found = find_gpus()                     # Once for all tests: a child process opens a session.
    if found.problem is None:
        gpus = choose_gpus(found.gpus, GPURequirement.parse(memory="8GiB"))
        with gpu_leak_check(gpus), gpu_sessions(device=gpus[0].ordinal) as open_session:
            session = open_session("model.onnx")

Importing this module loads neither ONNX Runtime nor NVML. No GPU is touched before a function is called.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .environment.gpu import driver
from .errors import ExecutionError, GPUError, ProviderFallbackError, manual
from .process.background import fork_safe_lock, this_thread
from .process.late import late
from .provider import requests
from .provider.devices import Device
from .provider.sizes import parse_size
from .session import lazily

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from .diagnosis import diagnosing
    from .session.gpu_session import GPUSession
else:
    diagnosing = late("ortgpu.diagnosis.diagnosing")
    onnx = late("onnx")
    np = late("numpy")

MiB = 2**20

#: Bytes by which the use of GPU memory may grow during a test, since CUDA keeps each kernel after its first use.
LEAK_MARGIN = 64 * MiB

_SETTLING = 2.0  # seconds, because NVML reports freed memory with a delay


class UnmetRequirementError(LookupError):
    """The available GPUs do not meet the requirement of a test. The text names the missing property."""


class UnmeasurableMemoryError(RuntimeError):
    """The GPU memory that this process uses cannot be measured. The text says why."""


@dataclass(frozen=True, slots=True)
class GPURequirement:
    """A requirement of a test: the number of GPUs, and the properties of each GPU.

    ``memory`` is free memory in bytes at the time of choosing. ``compute_capability`` is the lowest (major, minor).
    None means no requirement. ``allow_cpu`` is True for a test that may run on the CPU where no GPU can be used.
    """

    count: int = 1
    memory: int | None = None  # bytes
    compute_capability: tuple[int, int] | None = None
    allow_cpu: bool = False

    @classmethod
    def parse(cls, **wanted: Any) -> GPURequirement:
        """Parse a requirement written for people: ``count=2``, ``memory="8GiB"``, ``compute_capability=(8, 0)``.

        Raises:
            ValueError: a name is unknown or a value is invalid. The text names the valid ones.
        """
        unknown = sorted(set(wanted) - set(cls.__slots__))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not known: there are {', '.join(cls.__slots__)}")
        written = cls(**wanted)
        if type(written.count) is not int or written.count < 1:
            raise ValueError(f"count={written.count!r} is not a number of GPUs: a positive int")
        if type(written.allow_cpu) is not bool:
            raise ValueError(f"allow_cpu={written.allow_cpu!r} is neither True nor False")
        memory, capability = _parse_memory(written.memory), _parse_capability(written.compute_capability)
        return replace(written, memory=memory, compute_capability=capability)

    def __str__(self) -> str:
        gpus = f"{self.count} GPUs" if self.count > 1 else "a GPU"
        properties = []
        if self.memory is not None:
            properties.append(f"{format_bytes(self.memory)} free")
        if self.compute_capability is not None:
            properties.append("compute capability {}.{}".format(*self.compute_capability))
        return f"{gpus} with {' and '.join(properties)}" if properties else gpus


def _parse_memory(value: object) -> int | None:
    if value is None:
        return None
    try:
        size = 0 if isinstance(value, bool) else parse_size("memory", value)
    except (TypeError, ValueError):
        size = 0
    if not size:
        raise ValueError(f'memory={value!r} is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"')
    return size


def _parse_capability(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value):
        return value[0], value[1]
    raise ValueError(f"compute_capability={value!r} is not a pair of numbers like (8, 0)")


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / MiB:.0f} MiB"


@dataclass(frozen=True, slots=True)
class FoundGPUs:
    """The GPUs that CUDA shows to a new process, by ordinal, and the problem that keeps sessions off them, or None."""

    gpus: tuple[Device, ...]
    problem: GPUError | None


def find_gpus(timeout: float = 60.0) -> FoundGPUs:
    """Find the GPUs by opening a session in a child process. Takes about as long as a first session.

    ``timeout`` is in seconds. This process does not use CUDA, so it may fork and start CUDA afterwards.

    Not promised: only the first GPU is tried, and it may fail later.
    """
    diagnosis = diagnosing.diagnose_inference(probe=True, timeout=timeout)
    probe = diagnosis.probe
    cuda = probe.cuda if probe is not None else None
    version = driver.read_driver_version()
    gpus = tuple(
        Device("cuda", gpu.ordinal, gpu.uuid, gpu.name, gpu.compute_capability, gpu.total_memory, version)
        for gpu in (cuda.devices if cuda is not None else None) or ()
    )
    if not diagnosis.ok:
        return FoundGPUs(gpus, diagnosis.problems[0])
    session = probe.step("session") if probe is not None else None
    if session is None or not session.ok:  # The checks may pass although no session opened.
        output = probe.output.splitlines() if probe is not None else ()
        return FoundGPUs(
            gpus, ProviderFallbackError("the child that should open a session did not do so", evidence=output)
        )
    # A driver that does not list its GPUs but opens sessions: some containers, Jetson.
    return FoundGPUs(gpus or (Device("cuda", 0, None, None, None, None, version),), None)


def choose_gpus(gpus: Sequence[Device], requirement: GPURequirement, *, first: int = 0) -> tuple[Device, ...]:
    """Return as many of ``gpus`` as required, beginning at index ``first`` modulo their number.

    An unknown property of a GPU counts as sufficient.

    Raises:
        UnmetRequirementError: too few GPUs meet the requirement.
    """
    start = first % len(gpus) if gpus else 0
    in_turn = [*gpus[start:], *gpus[:start]]
    failings = {gpu: _failing(gpu, requirement) for gpu in in_turn} if len(gpus) >= requirement.count else {}
    serving = tuple(gpu for gpu, failing in failings.items() if failing is None)
    if len(serving) >= requirement.count:
        return serving[: requirement.count]
    shown = [f"{gpu}: {failings[gpu]}" if failings.get(gpu) else str(gpu) for gpu in gpus] or ["none"]
    raise UnmetRequirementError(f"needs {requirement}; found {'; '.join(shown)}")


def _failing(gpu: Device, requirement: GPURequirement) -> str | None:
    capability, lowest = gpu.compute_capability, requirement.compute_capability
    if lowest is not None and capability is not None and capability < lowest:
        return "compute capability {}.{}".format(*capability)
    if requirement.memory is None:
        return None
    memory = driver.read_gpu_memory(gpu.uuid) if gpu.uuid else None
    free = memory[0] if memory is not None else gpu.total_memory  # Without NVML all memory counts as free.
    if free is not None and free < requirement.memory:
        total = f" of {format_bytes(memory[1])}" if memory is not None else ""
        return f"{format_bytes(free)}{total} free"
    return None


@contextmanager
def gpu_sessions(device: int | str | None = None, *, allow_cpu: bool = False) -> Iterator[Callable[..., GPUSession]]:
    """Yield a function like :class:`ortgpu.GPUSession`, and close its sessions at the end, the last one first.

    ``device`` is the default for sessions that name no device by ``device`` or by the provider option ``device_id``.
    ``allow_cpu`` is the default of the same argument. If ORTGPU_ALLOW_CPU alone puts a session on the CPU, the function
    raises ExecutionError.
    """
    with ExitStack() as opened:

        def open_session(
            model: Any, sess_options: Any = None, providers: Any = None, provider_options: Any = None, **options: Any
        ) -> GPUSession:
            if device is not None and not _names_device(providers, provider_options):
                options.setdefault("device", device)
            if allow_cpu:
                options.setdefault("allow_cpu", True)
            session: GPUSession = lazily.gpu_session_class()(
                model, sess_options, providers, provider_options, **options
            )
            opened.callback(session.close)
            if not session.device.is_gpu and not options.get("allow_cpu"):
                raise ExecutionError(
                    "this test asked for a session on the GPU, and got one on the CPU",
                    evidence=[f"ORTGPU_ALLOW_CPU={os.environ.get('ORTGPU_ALLOW_CPU')}"],
                    fixes=[manual("unset ORTGPU_ALLOW_CPU, or pass allow_cpu=True where the test means it")],
                )
            return session

        yield open_session


def _names_device(providers: Any, provider_options: Any) -> bool:
    try:
        return "device_id" in requests.parse(providers, provider_options).options_of(requests.CUDA)
    except GPUError:  # The request is malformed. The session raises the error.
        return True


@contextmanager
def gpu_leak_check(gpus: Sequence[Device], *, shared: bool = False) -> Iterator[None]:
    """Raise AssertionError if more of the GPUs' memory is in use at the end than at the start, beyond LEAK_MARGIN.

    The CUDA context of this process does not count, since it is created before the first measurement. The check
    compares what NVML reports for this process. In most containers NVML does not report single processes. The check
    then compares the use of the whole GPU, so memory taken by another process counts as a leak. Set ``shared`` if other
    processes use the GPUs; the check then refuses to compare the whole GPU.

    Not found: leaks smaller than the margin, and leaks inside memory that ONNX Runtime reserved before, such as the
    arena of ``OrtValue.ortvalue_from_numpy(..., "cuda")``. That arena grows with the values and outlives them. Its
    growth counts as a leak in one test and hides a leak in a later one.

    Raises:
        UnmeasurableMemoryError: the memory cannot be measured, at the start or at the end.
        GPUError: no session opens on one of the GPUs.
    """
    before = []
    for gpu in gpus:
        _warm_up(gpu)
        own_use, total = _memory_use(gpu)
        if own_use is None and total is None:
            raise UnmeasurableMemoryError(f"NVML does not say how much memory of {gpu} is in use")
        if own_use is None and shared:
            raise UnmeasurableMemoryError(
                f"NVML does not show which process uses memory of {gpu}, and other processes use it too"
            )
        before.append((own_use, total))
    yield
    grown = _grown(gpus, before)
    deadline = time.monotonic() + _SETTLING
    while any(growth > LEAK_MARGIN for growth, _ in grown) and time.monotonic() < deadline:
        time.sleep(0.1)
        grown = _grown(gpus, before)
    leaks = [
        f"{format_bytes(growth)} more on {gpu} than before ({whose})"
        for gpu, (growth, whose) in zip(gpus, grown, strict=True)
        if growth > LEAK_MARGIN
    ]
    if leaks:
        raise AssertionError(
            f"GPU memory was left behind: {'; '.join(leaks)}; up to {format_bytes(LEAK_MARGIN)} are no leak. "
            "What holds it: a session that was not closed, or an OrtValue or IOBinding that something still refers to"
        )


def _grown(gpus: Sequence[Device], before: Sequence[tuple[int | None, int | None]]) -> list[tuple[int, str]]:
    gc.collect()
    grown = []
    for gpu, (own_use, total) in zip(gpus, before, strict=True):
        own_now, total_now = _memory_use(gpu)
        if own_use is not None:
            grown.append(((own_now or 0) - own_use, "by this process"))  # NVML does not list a process without memory.
        elif total is None or total_now is None:
            raise UnmeasurableMemoryError(f"NVML no longer says how much memory of {gpu} is in use")
        else:
            grown.append((total_now - total, "by all processes: NVML does not show which"))
    return grown


def _memory_use(gpu: Device) -> tuple[int | None, int | None]:
    if gpu.uuid is None:
        return None, None
    memory = driver.read_gpu_memory(gpu.uuid)
    return driver.processes_on(gpu.uuid).get(os.getpid()), memory[1] - memory[0] if memory is not None else None


_warm: set[tuple[int, int | None]] = set()
_warming = fork_safe_lock()

_MATMUL = """
<ir_version: 8, opset_import: ["": 17]>
warm_up (float[64, 64] x) => (float[64, 64] y) { y = MatMul(x, x) }
"""
_CONV = """
<ir_version: 8, opset_import: ["": 17]>
warm_up (float[1, 1, 64, 64] x, float[64, 1, 3, 3] w) => (float[1, 64, 64, 64] y)
{ y = Conv <pads = [1, 1, 1, 1]> (x, w) }
"""


def _warm_up(gpu: Device) -> None:
    """Create the CUDA context of this process, and let cuBLAS and cuDNN load their kernels."""
    with this_thread.holds, _warming:
        if (os.getpid(), gpu.ordinal) in _warm:
            return
        _run_once(_MATMUL, gpu)
        with suppress(GPUError):  # Without cuDNN nothing is loaded later either.
            _run_once(_CONV, gpu)
        _warm.add((os.getpid(), gpu.ordinal))


def _run_once(text: str, gpu: Device) -> None:
    with gpu_sessions(device=gpu.ordinal) as open_session:
        session = open_session(onnx.parser.parse_model(text).SerializeToString())
        session.run(None, {entry.name: np.zeros(entry.shape, np.float32) for entry in session.get_inputs()})
