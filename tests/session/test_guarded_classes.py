"""Classes of sessions that other people wrote, taken in by the guard: whatever they define, the session is verified.

A session opens on the CPU here, and takes that for a GPU.
"""

from __future__ import annotations

import pytest

from tests.support.cpu_session import child

pytestmark = pytest.mark.lab

PROGRAM = """
import abc, dataclasses, typing
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from tests.support.guarded_programs import pretend_gpu

pretend_gpu()
ortgpu.install()
Plain = onnxruntime.InferenceSession

class Failing:
    def is_webgpu_graph_capture_enabled(self): return False
    def run(self, *_): raise Fail("CUDA failure 700: an illegal memory access was encountered")

{definition}

def kinds():
    return sorted((record.kind, str(record.device)[:6]) for record in ortgpu.sessions())

session, other = Theirs(NEG), Theirs(NEG)
found = [type(session).__name__, isinstance(session, GPUSession), kinds(), session.run(None, feeds(2)[1])[0].tolist()]
session._sess = Failing()
report(found + [outcome(lambda: each.run(None, feeds(1)[0]))["type"] for each in (session, other)])
"""

CLASSES = {
    "a property called device": """
class Theirs(Plain):
    @property
    def device(self): return "mine"
""",
    "attributes called device and placement": """
class Theirs(Plain):
    def __init__(self, path):
        self.device = "cuda"
        super().__init__(path)
        self.placement, self.options_chosen = None, 3
    def run(self, *arguments):
        assert (self.device, self.placement, self.options_chosen) == ("cuda", None, 3)
        return super().run(*arguments)
""",
    "class attributes called device, placement and options_chosen": """
import functools
class Base(Plain):
    device = "cuda:0"
class Theirs(Base):
    placement = "whole"
    @functools.cached_property
    def options_chosen(self): return {"mine": True}
    def run(self, *arguments):
        assert (self.device, self.placement, self.options_chosen) == ("cuda:0", "whole", {"mine": True})
        return super().run(*arguments)
""",
    "answers of its own": """
class Theirs(Plain):
    def get_inputs(self): return [each.name for each in super().get_inputs()]
    get_outputs = get_provider_graph_assignment_info = get_inputs
    def get_providers(self): return ["mine"]
    def get_provider_options(self): return {}
""",
    "methods called as ours": """
class Theirs(Plain):
    def close(self): return "mine"
    def map(self, feeds): return "mine"
""",
    "not hashable": """
@dataclasses.dataclass
class Theirs(Plain):
    path: bytes
    def __post_init__(self): super().__init__(self.path)
""",
    "all the same": """
class Theirs(Plain):
    def __eq__(self, other): return True
    def __hash__(self): return 1
""",
    "slots": """
class Theirs(Plain):
    __slots__ = ("mine",)
""",
    "generic, abstract, of another constructor": """
class Theirs(Plain, typing.Generic[typing.TypeVar("T")], abc.ABC):
    def __new__(cls, path): return super().__new__(cls)
    def __init__(self, path):
        self.before = 1
        super().__init__(path, providers=["CUDAExecutionProvider"])
""",
    "a mixin before ONNX Runtime's class": """
class Mixin:
    def __init__(self, path): super().__init__(path, providers=["CUDAExecutionProvider"])
    def run(self, *arguments): return super().run(*arguments)
class Theirs(Mixin, Plain): pass
""",
    "an abstract class before it": """
class Model(abc.ABC):
    @abc.abstractmethod
    def predict(self, feed): "What subclasses have."
class Theirs(Model, Plain):
    def predict(self, feed): return self.run(None, feed)
""",
    "generic before it": """
class Theirs(typing.Generic[typing.TypeVar("T")], Plain): pass
""",
    "generic before it, with slots": """
class Theirs(typing.Generic[typing.TypeVar("T")], Plain):
    __slots__ = ("mine",)
""",
    "counted by a mixin": """
class Counted:
    known = []
    def __init_subclass__(cls): Counted.known.append(cls.__name__)
class Theirs(Counted, Plain):
    def run(self, *arguments):
        assert Counted.known == ["Theirs"]
        return super().run(*arguments)
""",
    "constructed again": """
class Theirs(Plain):
    def __init__(self, path):
        super().__init__(path, providers=["OpenVINOExecutionProvider", "CUDAExecutionProvider"], enable_fallback=1)
        if not hasattr(self, "path"):
            self.path = path
            self.__init__(path)
""",
    "keeps its attributes itself": """
class Theirs(Plain):
    def __setattr__(self, name, value): self.__dict__[name] = value
""",
}


@pytest.mark.parametrize("definition", CLASSES.values(), ids=CLASSES)
def test_a_class_of_somebody_else(definition: str) -> None:
    found = child(PROGRAM.replace("{definition}", definition))
    assert found == [
        "Theirs", True, [["guarded", "cuda:0"]] * 2, [-1] * 4, "PoisonedContextError", "PoisonedContextError",
    ]  # fmt: skip


def test_a_class_that_turns_to_the_cpu_itself() -> None:
    """Its session is one of ONNX Runtime again."""
    program = PROGRAM[: PROGRAM.index("def kinds")].replace(
        "{definition}",
        """
class Theirs(Plain):
    def to_cpu(self, path): self.__init__(path, providers=["CPUExecutionProvider"])
""",
    )
    found = child(
        program
        + """
session = Theirs(NEG)
session.mine = 1
failed = outcome(lambda: session.to_cpu(b"no model"))["type"]
before = [failed, isinstance(session, GPUSession), session.run(None, feeds(2)[1])[0].tolist()]
session.to_cpu(NEG)
(record,) = ortgpu.sessions()
plain = Plain(NEG, providers=["CPUExecutionProvider"])
after = [type(session) is Theirs, session.get_providers(), list(vars(session).keys() - vars(plain).keys())]
report([before, after, [record.kind, str(record.device)]])
"""
    )
    assert found == [
        ["InvalidProtobuf", True, [-1] * 4],
        [True, ["CPUExecutionProvider"], ["mine"]],
        ["cpu", "cpu"],
    ]
