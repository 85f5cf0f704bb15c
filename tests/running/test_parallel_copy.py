"""Copies by threads of ONNX Runtime: each byte, and nothing else; and no thread is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx.printer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.running import copying
from ortgpu.running.copying import ParallelCopy
from tests.support.cpu_session import child

GUARD = 7  # bytes before and behind, which must stay as they are


@pytest.fixture(scope="module", params=[1, 2, 5])
def copies(request: pytest.FixtureRequest) -> ParallelCopy:
    return ParallelCopy(request.param)


def check(copies: ParallelCopy, size: int, offset: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    source = random.integers(0, 256, size + offset, np.uint8)
    target = np.full(size + 2 * GUARD, 77, np.uint8)
    copies.copy(target.ctypes.data + GUARD, source.ctypes.data + offset, size)
    assert np.array_equal(target[GUARD : GUARD + size], source[offset:])
    assert set(target[:GUARD]) == set(target[GUARD + size :]) == {77}


@pytest.mark.parametrize("size", [0, 1, 63, 255, 256, 257, 1279, 1280, 1281, 4096, 1 << 20, (1 << 22) + 12345])
def test_each_byte_is_copied_and_no_other(copies: ParallelCopy, size: int) -> None:
    check(copies, size, 3, size)


@given(size=st.integers(0, 50_000), offset=st.integers(0, 64), seed=st.integers(0, 9))
def test_of_any_size_at_any_address(copies: ParallelCopy, size: int, offset: int, seed: int) -> None:
    check(copies, size, offset, seed)


def test_the_model_that_copies_is_the_one_that_its_comment_says() -> None:
    text = """<ir_version: 8, opset_import: ["": 13]>
        copy (uint8[?, ?] from, int64[?] indices) => (uint8[?, ?] to) { to = Gather (from, indices) }"""
    written = onnx.load_from_string(copying._MODEL)
    assert onnx.printer.to_text(written) == onnx.printer.to_text(onnx.parser.parse_model(text))


def reported(code: str) -> Any:
    return child("from ortgpu.running.copying import ParallelCopy, parallel_copy\n" + code)


def test_threads_of_python_share_it() -> None:
    assert reported("""
copies, wrong = ParallelCopy(3), []
def work(number):
    for step in range(300):
        source, target = np.full(30_000 + step, number, np.uint8), np.zeros(30_000 + step, np.uint8)
        copies.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
        if (target != number).any():
            wrong.append((number, step))
workers = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
report(wrong)
""") == []  # fmt: skip


def test_its_threads_end_with_it() -> None:
    there, one, other, again, after = reported("""
def count():
    # Without those that were joined, and are still on their way out of the kernel
    seen = []
    for _ in range(20):
        seen.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(seen)
counts = [count()]
first = parallel_copy(4, 0)
counts.append(count())
other = parallel_copy(4, 1)
counts.append(count())
again = parallel_copy(4, 0)
assert again is first and other is not first
counts.append(count())
del first, other, again
counts.append(count())
report(counts)
""")
    assert [one - there, other - there, again - there, after - there] == [3, 6, 6, 0]


def test_it_is_none_of_the_sessions_of_the_process() -> None:
    assert reported("""
ortgpu.install()
copies = ParallelCopy(2)
report([len(ortgpu.sessions()), copies is not None])
""") == [0, True]  # fmt: skip


def test_a_forked_child_ends_and_makes_its_own() -> None:
    assert reported("""
copies = parallel_copy(3, 0)
source = np.arange(100_000, dtype=np.uint8)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    own = parallel_copy(3, 0)
    target = np.zeros_like(source)
    own.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    right = own is not copies and (target == source).all()
    del copies, own
    gc.collect()
    os._exit(0 if right else 1)  # faulthandler waits for a thread of the parent
_, status = os.waitpid(pid, 0)
target = np.zeros_like(source)
copies.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
report([os.waitstatus_to_exitcode(status), bool((target == source).all())])
""") == [0, True]  # fmt: skip


@pytest.mark.parametrize("room", [4, 12, 20, 36, 48, 64])
def test_where_there_is_room_for_a_part_of_the_threads_it_says_so(room: int) -> None:
    """MiB of address space; a thread takes as much as its stack. ONNX Runtime would wait for ever for those it made."""
    outcome, left = reported(f"""
import resource
for line in open("/proc/self/status"):
    if line.startswith("VmSize"):
        size = int(line.split()[1]) << 10
before = len(os.listdir("/proc/self/task"))
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + ({room} << 20), limits[1]))
try:
    copies = ParallelCopy(8)
    outcome = "made"
except RuntimeError:
    outcome = "RuntimeError"
resource.setrlimit(resource.RLIMIT_AS, limits)
copies = None
gc.collect()
deadline = time.monotonic() + 5  # a thread of Python that has ended is there for a moment
while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
    time.sleep(0.01)
report([outcome, len(os.listdir("/proc/self/task")) - before])
""")
    assert outcome in ("made", "RuntimeError")
    assert left == 0


def test_where_the_threads_cannot_be_started_the_calling_one_copies() -> None:
    assert reported("""
from ortgpu.running import copying
def full(threads):
    raise RuntimeError("can't start new thread")
copying._check_that_there_can_be = full
copies = parallel_copy(8, 0)
source = np.arange(100_000, dtype=np.uint8)
target = np.zeros_like(source)
copies.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
report([bool((target == source).all()), copies is parallel_copy(8, 0), threads()])
""") == [True, True, []]
