"""Programs of ``tests/session/test_gpu_session.py``."""

from __future__ import annotations

from ortgpu import GPUSession
from tests.programs.on_cpu import NEG, report


def the_constructor_has_these_defaults() -> None:
    import inspect

    parameters = inspect.signature(GPUSession.__init__).parameters
    report({name: each.default for name, each in parameters.items() if each.default is not each.empty})


def the_fallback_of_onnxruntime_is_off_from_the_constructor_on() -> None:
    from onnxruntime import InferenceSession

    constructed, construct = [], InferenceSession.__init__

    def spy(self, *arguments, **named):
        constructed.append(named.get("enable_fallback"))
        construct(self, *arguments, **named)

    InferenceSession.__init__ = spy
    session = GPUSession(NEG)
    report([constructed, session._enable_fallback])
