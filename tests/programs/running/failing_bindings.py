"""Programs of ``tests/running/test_bindings.py``."""

from __future__ import annotations

import json

import onnxruntime

from tests.programs.session.running import FEED, outcome, session


def a_sticky_error_of_a_binding_makes_every_session_refuse() -> None:
    one, other = session(), session()
    binding = one.io_binding()

    class Failing:
        def copy_outputs_to_cpu(self):
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")

    binding._iobinding = Failing()
    print(json.dumps([outcome(binding.copy_outputs_to_cpu), outcome(lambda: other.run(None, FEED))]))


def a_binding_does_not_keep_its_session() -> None:
    import gc
    import weakref

    made = session()
    binding, gone = made.io_binding(), weakref.ref(made)
    del made
    gc.collect()
    print(
        json.dumps(
            [
                gone() is None,
                isinstance(binding, onnxruntime.IOBinding),
                outcome(lambda: binding.bind_cpu_input("z", FEED["x"]))["cause"],
            ]
        )
    )
