"""What outlives the modules of this library at the end of the interpreter goes without a word, and without a wait.

Python empties modules before it frees what others hold: NumPy's module, which is emptied later, stands for these. A
function of the program in a module of Python's own, such as a filter of records, keeps the program's names as long.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.lab.installed import older_than
from tests.lab.stubs import Stubs
from tests.support.children import DEADLINE_VARIABLE, child_environment, run_python
from tests.support.staged_sessions import STAGES

pytestmark = pytest.mark.lab

# Of the CPU that is used instead: it is logged, which goes to stderr where a program has no handlers. A function with
# names of its own does not keep those of the program.
QUIET = """
logging.lastResort.addFilter(eval("lambda record: 'is running on the CPU, as allowed' not in record.msg", {}))
"""


def at_the_end(code: str, stubs: Stubs, behind: str = "") -> tuple[str, str]:
    """What a program wrote to stdout, and to stderr beside the CPU that is used instead."""
    done = run_python(
        QUIET + textwrap.dedent(code),
        str(stubs.cudart),
        behind=f"on_cpu {behind}",
        env=child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1", DEADLINE_VARIABLE: "60"}),
    ).ok()
    return done.stdout, done.stderr


FILTER = "logging.lastResort.addFilter(lambda record: True); "

HOLDS = {
    "a session": "np.kept = GPUSession(NEG)",
    "a session that ran": "np.kept = GPUSession(NEG); list(np.kept.map(feeds(3)))",
    "a session with an array": "np.kept = GPUSession(NEG); np.array_of_it = np.kept.pinned_empty(1 << 20)",
    "an array": "np.kept = GPUSession(NEG).pinned_empty(1 << 20)",
    "an iteration": "np.kept = GPUSession(NEG).map(feeds(100)); next(np.kept)",
    "an iteration beside a filter": FILTER + "np.kept = GPUSession(NEG).map(feeds(100)); next(np.kept)",
    "an iteration of a pool": "np.pool = ortgpu.GPUSessionPool(NEG); np.kept = np.pool.map(feeds(100)); next(np.kept)",
    "an iteration of a pool beside a filter": (
        FILTER + "np.pool = ortgpu.GPUSessionPool(NEG); np.kept = np.pool.map(feeds(100)); next(np.kept)"
    ),
    "a pool": "np.kept = ortgpu.GPUSessionPool(NEG)",
    "a pool that ran": "np.kept = ortgpu.GPUSessionPool(NEG); np.kept.run(None, feeds(1)[0])",
    "a session of the guard": """
        import onnxruntime
        ortgpu.install()
        np.kept = onnxruntime.InferenceSession(NEG)
    """,
    "a session of the guard on the CPU": """
        import onnxruntime
        ortgpu.install()
        np.kept = onnxruntime.InferenceSession(NEG, providers=["CPUExecutionProvider"])
    """,
}


@pytest.mark.parametrize("code", HOLDS.values(), ids=HOLDS.keys())
def test_what_another_module_holds(code: str, stubs: Stubs) -> None:
    assert at_the_end(code, stubs) == ("", "")


@pytest.mark.skipif(older_than(STAGES) is not None, reason=str(older_than(STAGES)))
def test_a_session_that_stages(stubs: Stubs) -> None:
    code = "np.kept = staged(NEG)\nnp.kept.run(None, big(1.0))\nassert ran == [True]"
    assert at_the_end(code, stubs, "staged") == ("", "")


def test_a_session_that_replays_graphs(stubs: Stubs) -> None:
    code = "np.kept = capturing(NEG)\nnp.kept.run(None, feeds(1)[0])\nassert bound"
    assert at_the_end(code, stubs, "with_graphs") == ("", "")


def test_a_session_that_a_destructor_opens(stubs: Stubs) -> None:
    """Python imports nothing any more, and says so; before 3.12 it would start a thread, and wait for it for ever."""
    code = """
        class Late:
            def __del__(self):
                GPUSession(NEG)
        late = Late()
        late.me = late
    """
    assert "Python is likely shutting down" in at_the_end(code, stubs)[1]
