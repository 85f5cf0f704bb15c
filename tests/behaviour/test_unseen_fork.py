"""A server that forks without telling Python, as uWSGI does: nothing of ours runs in the child until it is used."""

from __future__ import annotations

from tests.support.cpu_session import child

FORK = """
import ctypes, dataclasses
from onnxruntime.capi import onnxruntime_pybind11_state as native
from ortgpu.environment.gpu import cuda

class Failing:
    # cudaErrorInitializationError: CUDA's answer in a forked process (driver_types.h)
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def run(self, *_):
        raise native.Fail("CUDA failure 3: initialization error ; GPU=0 ; hostname=h ; file=/x.cc ; line=1 ; expr=f();")

def in_a_child(function):
    # As C does it: os.fork would call what is registered with os.register_at_fork
    reader, writer = os.pipe()
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        signal.alarm(30)
        os.write(writer, json.dumps(function()).encode())
        os._exit(0)
    os.close(writer)
    told = os.read(reader, 1 << 16)
    os.waitpid(pid, 0)
    return json.loads(told)

session, other, on_cpu = GPUSession(NEG), GPUSession(NEG), GPUSession(NEG)
for each in (session, other):
    each.device = dataclasses.replace(each.device, kind="cuda", ordinal=0)
    each._sess = Failing(each._sess)
"""


def test_a_run_of_the_parents_session_says_so() -> None:
    found = child(
        FORK
        + """
cuda._state = cuda.CudaState(0, (), os.getpid())  # as after the first session on a GPU
def told():
    first = outcome(lambda: session.run(None, feeds(1)[0]))
    return [first, outcome(lambda: list(other.map(feeds(1))))["type"],
            on_cpu.run(None, feeds(1)[0])[0].tolist(), [each.alive for each in ortgpu.sessions()]]
report([os.getpid(), in_a_child(told)])
"""
    )
    parent, (first, other, on_cpu, alive) = found
    assert first["type"] == "ForkedSessionError"
    assert f"CUDA was initialised in process {parent}" in first["text"]
    assert "--lazy-apps" in first["text"]
    assert other == "ForkedSessionError"
    assert on_cpu == [0, 0, 0, 0]
    assert alive == [False, False, True]


def test_in_the_process_that_made_it_a_failure_is_what_it_is() -> None:
    found = child(
        FORK
        + """
cuda._state = cuda.CudaState(0, (), os.getpid())
report(outcome(lambda: session.run(None, feeds(1)[0])))
"""
    )
    assert found["type"] != "ForkedSessionError"
    assert "fork" not in found["text"]
