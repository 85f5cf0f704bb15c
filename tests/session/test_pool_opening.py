"""How a GPUSessionPool opens: what is asked for, on which GPUs, and what is left where that fails."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ortgpu import GPUSessionPool
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.errors import DeviceBusyError
from ortgpu.provider import devices, lifetime
from ortgpu.provider import living as registry
from ortgpu.provider.devices import Device
from ortgpu.session import gpu_session_pool
from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, NVML, Cuda
from tests.support.children import child_environment, program_path, run_child
from tests.support.pool_child import DEADLINE, child


def test_arguments_without_a_meaning_are_refused_before_anything_is_opened(tmp_path: Path) -> None:
    found = child(
        """
        def attempt(*arguments, **options):
            return outcome(lambda: len(GPUSessionPool(RELU, *arguments, allow_cpu=True, **options)))
        from ortgpu.provider.records import Choice, Key, Record
        import pathlib
        path = pathlib.Path(FOLDER)
        plain = Choice({}, 1.0)
        Record(Key("graph", "weights", "1"), plain, Choice({"graph": "captured"}, 0.5)).write(path / "graph.json")
        Record(Key("graph", "weights", "1"), plain, plain).write(path / "plain.json")
        report("refused", {
            "a word": attempt("cuda:1"),
            "a number": attempt(0),
            "None": attempt(None),
            "none at all": attempt([]),
            "twice": attempt([1, "cuda:1"]),
            "twice by UUID": attempt(["GPU-aa", "gpu-AA"]),
            "no device": attempt(["cpu"]),
            "negative": attempt([-1]),
            "float": attempt([1.0]),
            "device": attempt(device=0),
            "no sessions": attempt([0], 0),
            "half": attempt([0], 1.5),
            "cpu_nodes": attempt([0], cpu_nodes="maybe"),
            "unknown": attempt([0], providers=["NoSuchProvider"]),
            "graphs": attempt([0], cuda_graph=True),
            "a record with a graph": attempt([0], tuned=path / "graph.json"),
            "no record": attempt([0], tuned="missing.json"),
            "misspelt": attempt([0], session_per_device=2),
            "misspelt, of a session": attempt([0], device_id=2),
        })
        report("numpy", attempt([np.int64(0), np.int64(1)], np.int64(2)))
        report("array", attempt(np.arange(2)))
        report("everything", attempt())
        report("record", attempt([0], tuned=path / "plain.json"))
        report("left", [pool_threads(), len(ortgpu.sessions())])
    """.replace("FOLDER", repr(str(tmp_path)))
    )
    refused = {name: each["type"] for name, each in found["refused"].items()}
    assert refused == {
        "a word": "TypeError",
        "a number": "TypeError",
        "None": "TypeError",
        "none at all": "ProviderRequestError",
        "twice": "ProviderRequestError",
        "twice by UUID": "ProviderRequestError",
        "no device": "DeviceNotFoundError",
        "negative": "DeviceNotFoundError",
        "float": "TypeError",
        "device": "TypeError",
        "no sessions": "ValueError",
        "half": "TypeError",
        "cpu_nodes": "ValueError",
        "unknown": "ProviderRequestError",
        "graphs": "ProviderRequestError",
        "a record with a graph": "ProviderRequestError",
        "no record": "FileNotFoundError",
        "misspelt": "TypeError",
        "misspelt, of a session": "TypeError",
    }
    assert "as 1 and as 'cuda:1'" in found["refused"]["twice"]["text"]
    assert found["numpy"] == {"returned": 4}
    assert found["array"] == {"returned": 2}
    assert found["everything"] == found["record"] == {"returned": 1}
    assert found["left"] == [[], 0]


def test_without_a_gpu_the_cause_is_raised_once_and_nothing_is_left() -> None:
    found = child("session.pool_opening.without_a_gpu_the_cause_is_raised_once_and_nothing_is_left")
    assert found["all"]["type"] == found["two"]["type"]
    assert found["all"]["type"] in ("DriverNotFoundError", "NoDeviceError", "DriverUnusableError")
    assert found["no model"]["type"] == "NoSuchFile"
    assert found["left"] == [[], 0, 1]


def test_where_onnxruntime_cannot_be_imported_making_a_pool_raises_the_cause() -> None:
    environment = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    program = """
        import sys
        sys.modules["numpy"] = sys.modules["onnxruntime"] = None
        from tests.support.children import report
        from ortgpu import GPUSessionPool, PackageError
        try:
            GPUSessionPool("model.onnx")
        except PackageError as error:
            report("raised", error.code)
    """
    done = run_child([sys.executable, "-c", textwrap.dedent(program)], env=environment, deadline=DEADLINE)
    assert "raised" in done.reports, done.output


def test_allow_cpu_warns_the_caller_of_each_session() -> None:
    found = child("session.pool_opening.allow_cpu_warns_the_caller_of_each_session")
    assert found["devices"] == ["cpu", "cpu"]
    assert found["warned"] == [["CPUExecutionWarning", program_path("session.pool_opening")]] * 2
    assert len(set(found["created by"])) == 1


def test_a_session_that_cannot_be_opened_closes_the_others() -> None:
    found = child("session.pool_opening.a_session_that_cannot_be_opened_closes_the_others")
    assert found["raised"]["type"] == "CPUExecutionWarning"
    assert found["left"] == [[], 0, 3]


TWO = tuple(GPU(uuid=f"GPU-{n}0000000-0000-0000-0000-000000000000") for n in (1, 2))


def test_devices_are_those_that_the_driver_shows(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(devices=TWO), nvml=NVML(TWO))
    result = machine.run(
        """
from ortgpu.errors import GPUError
from ortgpu.provider.devices import check_devices, choose_devices
def attempt(devices):
    try:
        return choose_devices(check_devices(devices))
    except GPUError as error:
        return [type(error).__name__, error.summary]
asked = ["all", ["cuda:1", 0], ["GPU-2"], [2], [1, "GPU-2"], ["gpu-7"]]
report([attempt(devices) for devices in asked])
"""
    )
    everything, ordinals, by_uuid, unknown, twice, no_uuid = result.ok().json
    assert (everything, ordinals, by_uuid) == ([0, 1], [1, 0], [1])
    assert (unknown[0], no_uuid[0]) == ("DeviceNotFoundError", "DeviceNotFoundError")
    assert twice == ["ProviderRequestError", "devices names one GPU twice: as 1 and as 'GPU-2'"]


def test_a_pool_on_gpus_that_no_session_opens_on_raises_the_cause(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(devices=TWO), nvml=NVML(TWO))
    machine.overlay.remove("nvidia/*/lib/libcurand.so.10")
    result = machine.run(
        f"""
import threading, ortgpu
try:
    ortgpu.GPUSessionPool({str(lab.models.relu)!r})
except ortgpu.GPUError as error:
    report([type(error).__name__, threading.active_count(), len(ortgpu.sessions())])
"""
    )
    assert result.ok().json == ["LibraryNotFoundError", 1, 0]


# What happens in threads when sessions open on GPUs: with a double of GPUSession, because none opens here


class Double:
    """Opens on each device but ``busy``; all but the first wait for one another, and ``late`` takes longer."""

    opened: ClassVar[list[Double]]
    busy: ClassVar[int | None]
    late: ClassVar[int | None]
    together: ClassVar[threading.Barrier]
    _sess: Any = None

    def __init__(self, _model: object, *, device: int, **options: object) -> None:
        self.options, self.closed = options, False
        self.device = Device("cuda", device, f"GPU-{device}", "NVIDIA H200", (9, 0), 1 << 37, "580.65")
        if device > 0:
            self.together.wait(DEADLINE)
        if device == self.late:
            time.sleep(0.3)
        if device == self.busy:
            raise DeviceBusyError(f"cuda:{device} is busy", uuid=self.device.uuid)
        registry.register(self)
        self.opened.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> type[Double]:
    Double.opened, Double.busy, Double.late, Double.together = [], None, None, threading.Barrier(2)
    shown = tuple(CudaDevice(n, f"GPU-{n}", "NVIDIA H200", (9, 0), 1 << 37, 0) for n in range(3))
    monkeypatch.setattr(devices, "initialise", lambda: CudaState(0, shown, 0))
    monkeypatch.setattr(gpu_session_pool, "gpu_session_class", lambda: Double)
    return Double


def test_sessions_open_at_the_same_time_and_only_the_first_warns(double: type[Double]) -> None:
    with GPUSessionPool("model.onnx") as pool:
        assert [device.ordinal for device in pool.devices] == [0, 1, 2]
        other = {"allow_cpu": False, "cpu_nodes": "allow"}
        assert [session.options for session in pool.sessions] == [{}, other, other]
        assert len({lifetime.table[id(session)].created_by for session in pool.sessions}) == 1
    assert all(session.closed for session in double.opened)
    with GPUSessionPool("model.onnx", cpu_nodes="forbid", allow_cpu=True) as pool:
        given = {"cpu_nodes": "forbid", "allow_cpu": True}
        assert [session.options for session in pool.sessions] == [given, *[{**given, "allow_cpu": False}] * 2]


def test_a_gpu_that_refuses_closes_the_sessions_of_the_others(double: type[Double]) -> None:
    double.busy = 1
    before = threading.active_count()
    with pytest.raises(DeviceBusyError, match="cuda:1 is busy"):
        GPUSessionPool("model.onnx")
    assert [session.device.ordinal for session in double.opened] == [0, 2]
    assert all(session.closed for session in double.opened)
    assert threading.active_count() == before


def test_an_interrupt_closes_what_threads_were_opening(double: type[Double]) -> None:
    """In a notebook the traceback would keep a session that nobody closes, and with it memory of the GPU."""
    double.together = threading.Barrier(3)
    double.late = 1  # the one that is waited for when the interrupt comes
    before = threading.active_count()

    def interrupt() -> None:
        while not double.opened:  # on the first GPU; the others wait for this thread
            time.sleep(0.01)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(0.2)
        double.together.wait(DEADLINE)

    handler = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            GPUSessionPool("model.onnx")
        opened = [session.closed for session in double.opened]
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, handler)
    assert opened == [True] * 3
    assert threading.active_count() == before


def test_a_system_out_of_threads_leaves_nothing_open(double: type[Double], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("ortgpu-pool"):
            if len(started) == 4:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        GPUSessionPool("model.onnx")
    assert len(double.opened) == 3
    assert all(session.closed for session in double.opened)
    assert not any(thread.is_alive() for thread in started)


def test_a_pool_divides_the_memory_of_a_gpu_among_its_sessions() -> None:
    found = child(
        """
        from ortgpu import GPUSession
        seen = []
        class Session(GPUSession):
            def __init__(self, *arguments, **named):
                seen.append(named.get("memory"))
                super().__init__(*arguments, **named)
        import ortgpu.session.gpu_session_pool as pools
        pools.gpu_session_class = lambda: Session
        def opened(memory):
            options = {"allow_cpu": True, "sessions_per_device": 2, "pinned_memory_limit": "1MiB"}
            with GPUSessionPool(RELU, memory=memory, **options) as pool:
                return value_of(pool.run(None, feed(3)))
        values = [opened(memory) for memory in ("1GiB", 0.5, None)]
        os.environ["ORTGPU_MEMORY"] = "4GiB"
        values.append(opened(None))
        try:
            opened(0)
        except ValueError as error:
            report("json", [seen, values, str(error).partition(" ")[0]])
        """
    )
    assert found["json"] == [
        [1 << 29] * 2 + [0.25] * 2 + [None] * 2 + [2 << 30] * 2, [3.0] * 4, "memory"
    ]  # fmt: skip
