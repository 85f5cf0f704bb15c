"""A session that is closed, forked away from or poisoned says so to every method that it has, whichever it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cpu_session import child

PRELUDE = """
import onnxruntime
from ortgpu import PoisonedContextError
from ortgpu.provider import lifetime
from ortgpu.provider.devices import Device

session = GPUSession(NEG)
session.device = Device("cuda", 0, None, "GPU", (9, 0), None, None)  # what happens to a GPU happens to this session
feed = feeds(1)[0]
value = onnxruntime.OrtValue.ortvalue_from_numpy(feed["x"])
binding = session.io_binding()
arguments = {
    "run": (None, feed),
    "run_async": (None, feed, print, None),
    "run_on_device": (None, feed),
    "run_with_iobinding": (binding,),
    "run_with_ort_values": (["y"], {"x": value}),
    "run_with_ortvaluevector": (None, [], [], [], [], []),
    "create_ortvalue_from_shape_and_type": ([4], np.float32, "cpu"),
    "map": ([feed],),
    "pinned_empty": (4,),
    "release_captured_graph": (1,),
    "set_ep_dynamic_options": ({"a": "b"},),
    "set_providers": (["CUDAExecutionProvider"],),
    "set_tuning_results": ([],),
    "warm": ([feed],),
}
# what ends a session, makes another, or only switches off what is off
others = {"close", "disable_fallback", "for_rank"}

def asked():
    names = [name for name in dir(GPUSession) if not name.startswith("_") and callable(getattr(GPUSession, name))]
    return {
        name: outcome(lambda name=name: repr(getattr(session, name)(*arguments.get(name, ()))))
        for name in [*names, "__enter__"] if name not in others
    }
"""

ENDS = {
    "ForkedSessionError": """
        read, write = os.pipe()
        if os.fork() == 0:
            signal.alarm(20)
            os.write(write, json.dumps(asked()).encode())
            os._exit(0)
        os.close(write)
        os.wait()
        report([json.loads(open(read).read()), outcome(lambda: session.run(None, feed)[0].tolist())])
        """,
    "ExecutionError": """
        session.close()
        report([asked(), None])
        """,
    "PoisonedContextError": """
        lifetime.noted(PoisonedContextError("the GPU is lost", cuda_code=700))
        report([asked(), None])
        """,
}


@pytest.mark.parametrize("error", ENDS)
def test_every_method_says_why_it_cannot_be_used(error: str) -> None:
    found: dict[str, Any]
    found, parent = child(f"{PRELUDE}\n" + ENDS[error].replace("\n        ", "\n"))
    assert {"run", "get_inputs", "get_providers", "explain_placement", "io_binding", "set_providers"} <= set(found)
    assert {name: each for name, each in found.items() if each.get("type") != error} == {}
    if error == "ForkedSessionError":
        assert parent == {"returned": [0, 0, 0, 0]}
