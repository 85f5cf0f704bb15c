"""Programs of ``tests/session/test_classes.py``."""

from __future__ import annotations

import abc
import dataclasses
import functools
import sys
import typing
from typing import Any

import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import ortgpu
from ortgpu import GPUSession
from tests.programs.on_cpu import NEG, feeds, outcome, report
from tests.support.guarded_programs import pretend_gpu

pretend_gpu()
ortgpu.install()
Plain: Any = onnxruntime.InferenceSession


class Failing:
    def is_webgpu_graph_capture_enabled(self):
        return False

    def run(self, *_):
        raise Fail("CUDA failure 700: an illegal memory access was encountered")


def kinds():
    return sorted((record.kind, str(record.device)[:6]) for record in ortgpu.sessions())


def a_property_called_device() -> Any:
    class Theirs(Plain):
        @property
        def device(self):
            return "mine"

    return Theirs


def attributes_called_device_and_placement() -> Any:
    class Theirs(Plain):
        def __init__(self, path):
            self.device = "cuda"
            super().__init__(path)
            self.placement, self.options_chosen = None, 3

        def run(self, *arguments):
            assert (self.device, self.placement, self.options_chosen) == ("cuda", None, 3)
            return super().run(*arguments)

    return Theirs


def class_attributes_called_device_placement_and_options_chosen() -> Any:
    class Base(Plain):
        device = "cuda:0"

    class Theirs(Base):
        placement = "whole"

        @functools.cached_property
        def options_chosen(self):
            return {"mine": True}

        def run(self, *arguments):
            assert (self.device, self.placement, self.options_chosen) == ("cuda:0", "whole", {"mine": True})
            return super().run(*arguments)

    return Theirs


def answers_of_its_own() -> Any:
    class Theirs(Plain):
        def get_inputs(self):
            return [each.name for each in super().get_inputs()]

        get_outputs = get_provider_graph_assignment_info = get_inputs

        def get_providers(self):
            return ["mine"]

        def get_provider_options(self):
            return {}

    return Theirs


def methods_called_as_ours() -> Any:
    class Theirs(Plain):
        def close(self):
            return "mine"

        def map(self, feeds):
            return "mine"

    return Theirs


def not_hashable() -> Any:
    @dataclasses.dataclass
    class Theirs(Plain):
        path: bytes

        def __post_init__(self):
            super().__init__(self.path)

    return Theirs


def all_the_same() -> Any:
    class Theirs(Plain):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    return Theirs


def slots() -> Any:
    class Theirs(Plain):
        __slots__ = ("mine",)

    return Theirs


def generic_abstract_of_another_constructor() -> Any:
    class Theirs(Plain, typing.Generic[typing.TypeVar("T")], abc.ABC):
        def __new__(cls, path):
            return super().__new__(cls)

        def __init__(self, path):
            self.before = 1
            super().__init__(path, providers=["CUDAExecutionProvider"])

    return Theirs


def a_mixin_before_ONNX_Runtimes_class() -> Any:
    class Mixin:
        def __init__(self, path):
            super().__init__(path, providers=["CUDAExecutionProvider"])  # type: ignore[call-arg]  # of ONNX Runtime

        def run(self, *arguments):
            return super().run(*arguments)

    class Theirs(Mixin, Plain):
        pass

    return Theirs


def an_abstract_class_before_it() -> Any:
    class Model(abc.ABC):
        @abc.abstractmethod
        def predict(self, feed):
            "What subclasses have."

    class Theirs(Model, Plain):
        def predict(self, feed):
            return self.run(None, feed)

    return Theirs


def generic_before_it() -> Any:
    class Theirs(typing.Generic[typing.TypeVar("T")], Plain):
        pass

    return Theirs


def generic_before_it_with_slots() -> Any:
    class Theirs(typing.Generic[typing.TypeVar("T")], Plain):
        __slots__ = ("mine",)

    return Theirs


def counted_by_a_mixin() -> Any:
    class Counted:
        known = []

        def __init_subclass__(cls):
            Counted.known.append(cls.__name__)

    class Theirs(Counted, Plain):
        def run(self, *arguments):
            assert Counted.known == ["Theirs"]
            return super().run(*arguments)

    return Theirs


def constructed_again() -> Any:
    class Theirs(Plain):
        def __init__(self, path):
            super().__init__(path, providers=["OpenVINOExecutionProvider", "CUDAExecutionProvider"], enable_fallback=1)
            if not hasattr(self, "path"):
                self.path = path
                self.__init__(path)

    return Theirs


def keeps_its_attributes_itself() -> Any:
    class Theirs(Plain):
        def __setattr__(self, name, value):
            self.__dict__[name] = value

    return Theirs


def a_class_of_somebody_else() -> None:
    Theirs = globals()[sys.argv[1]]()
    session, other = Theirs(NEG), Theirs(NEG)
    found = [
        type(session).__name__,
        isinstance(session, GPUSession),
        kinds(),
        session.run(None, feeds(2)[1])[0].tolist(),
    ]
    session._sess = Failing()
    report(found + [outcome(lambda: each.run(None, feeds(1)[0]))["type"] for each in (session, other)])


def a_class_that_turns_to_the_cpu_itself() -> None:
    class Theirs(Plain):
        def to_cpu(self, path):
            self.__init__(path, providers=["CPUExecutionProvider"])

    session = Theirs(NEG)
    session.mine = 1
    failed = outcome(lambda: session.to_cpu(b"no model"))["type"]
    before = [failed, isinstance(session, GPUSession), session.run(None, feeds(2)[1])[0].tolist()]
    session.to_cpu(NEG)
    (record,) = ortgpu.sessions()
    plain = Plain(NEG, providers=["CPUExecutionProvider"])
    after = [type(session) is Theirs, session.get_providers(), list(vars(session).keys() - vars(plain).keys())]
    report([before, after, [record.kind, str(record.device)]])
