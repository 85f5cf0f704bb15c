"""Every error class as a record: its place in the tree, its text, its fields and fixes, and its name."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import ortgpu
from ortgpu import errors
from ortgpu.cli.explain import page
from ortgpu.errors import CPUExecutionWarning, Fix, GPUError, catalogue
from tests.support.children import run_python
from tests.support.made_errors import EACH, contents, full

PUBLIC = sorted(["CPUExecutionWarning", "Fix", *(cls.__name__ for cls in catalogue().values())])
BUILTINS = (RuntimeError, ImportError, OSError, LookupError, MemoryError, ValueError)


def builtins_of(name: str) -> set[type[Exception]]:
    """Return the builtins that ERRORS.md promises for a class. ``except`` clauses rely on them."""
    bases = {line[1]: line[2].split(", ") for line in re.finditer(r"^`(\w+)\((.+?)\)", page(), re.MULTILINE)}
    builtins = {one.__name__: one for one in BUILTINS}
    return {builtins[name]} if name in builtins else set().union(*map(builtins_of, bases.get(name, [])))


# The tree


@EACH
def test_place_in_the_tree(cls: type[GPUError]) -> None:
    assert {builtin for builtin in BUILTINS if issubclass(cls, builtin)} == builtins_of(cls.__name__)


@EACH
def test_code_and_docstring(cls: type[GPUError]) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.code)
    assert "code" in vars(cls), "a code of its own, not its parent's"
    assert catalogue()[cls.code] is cls
    assert set(cls.explains) <= set(catalogue())
    assert inspect.cleandoc(cls.__doc__ or "").endswith((".", ".\n")), "a sentence that says when it occurs"


def test_codes_are_unique() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, GPUError)]
    assert len({cls.code for cls in classes}) == len(classes)


def _raise(error: GPUError) -> None:
    raise error


@EACH
def test_is_caught_as_each_builtin(cls: type[GPUError]) -> None:
    error = full(cls)
    for builtin in builtins_of(cls.__name__):
        with pytest.raises(builtin) as caught:
            _raise(error)
        assert caught.value is error


# The text


@EACH
def test_text_has_one_order(cls: type[GPUError]) -> None:
    assert str(full(cls)).splitlines() == [
        "it failed",
        "  - fact one",
        "  - fact two",
        "To fix it:",
        "    sudo reboot",
        "    import torch",
        "    buy a GPU",
        "Also found: library-not-found (libcurand.so.10 not found); gpu-error (more)",
        f"More: ortgpu explain {cls.code}",
    ]


@EACH
def test_text_of_a_bare_error(cls: type[GPUError]) -> None:
    assert str(cls("it failed")) == f"it failed\nMore: ortgpu explain {cls.code}"
    assert repr(cls("it failed")).startswith(f"{cls.__name__}('it failed'")


def test_a_fix_of_several_lines_stays_in_its_column() -> None:
    error = GPUError("it failed", fixes=[Fix("import ortgpu\nortgpu.preload()", kind="python")])
    assert str(error).splitlines()[1:-1] == ["To fix it:", "    import ortgpu", "    ortgpu.preload()"]


# What is quoted: names in a model, paths of clients, words of other hosts

FORGED = "w.data\nTo fix it:\r\x1b[2J\x85\u2028    rm -rf ~\u202e\u2066\x00"
AS_QUOTED = r"w.data\nTo fix it:\r\x1b[2J\x85\u2028    rm -rf ~\u202e\u2066\x00"


@EACH
def test_quoted_text_forges_no_words_of_ours(cls: type[GPUError]) -> None:
    error = cls(f"{FORGED} is missing", evidence=[FORGED], fixes=[Fix(f"bring {FORGED}", kind="manual")])
    assert str(error).splitlines() == [
        f"{AS_QUOTED} is missing",
        f"  - {AS_QUOTED}",
        "To fix it:",
        f"    bring {AS_QUOTED}",
        f"More: ortgpu explain {cls.code}",
    ]
    assert (error.args, error.as_dict()["evidence"]) == ((f"{AS_QUOTED} is missing",), [AS_QUOTED])
    assert str(pickle.loads(pickle.dumps(error))) == str(error), "it is escaped once"
    assert str(CPUExecutionWarning(error, FORGED)).startswith(f"{AS_QUOTED} is running on the CPU")


def test_a_command_keeps_its_lines_and_nothing_else() -> None:
    assert Fix("import ortgpu\nortgpu.preload()  # \u202e\x1b", kind="python").split("\n") == [
        "import ortgpu",
        r"ortgpu.preload()  # \u202e\x1b",
    ]


def test_fields_keep_names_as_they_are() -> None:
    assert errors.LibraryNotFoundError("x", missing=(FORGED,)).details() == {"missing": (FORGED,)}


@pytest.mark.parametrize("name", ["ortgpu", "ortgpu.pool"])
def test_quoted_text_writes_no_lines_into_the_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(name)
    logger.warning("%s runs on the CPU: %d", FORGED, 1)
    logger.warning("%(a)s", {"a": 1})
    assert caplog.messages == [f"{AS_QUOTED} runs on the CPU: 1", "1"]


# Fields


@EACH
def test_defaults(cls: type[GPUError]) -> None:
    error = cls("it failed")
    assert (error.evidence, error.fixes, error.others) == ((), (), ())
    assert (error.consequence_of, error.severity) == (None, "fatal")
    for name in cls.fields:
        assert getattr(error, name) in (None, ()), name
        assert name in inspect.get_annotations(cls) or any(name in inspect.get_annotations(b) for b in cls.__bases__)
    assert error.details() == {name: getattr(error, name) for name in cls.fields}


@EACH
def test_fields_are_attributes(cls: type[GPUError]) -> None:
    error = full(cls)
    assert set(error.details()) == set(cls.fields)
    for name, value in error.details().items():
        assert getattr(error, name) == value
        assert value not in (None, ())


@EACH
def test_unknown_field(cls: type[GPUError]) -> None:
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no field colour, shape"):
        cls("it failed", shape=1, colour=2)


@EACH
def test_fields_of_one_error_are_not_shared(cls: type[GPUError]) -> None:
    full(cls)
    another = cls("another").details()
    assert set(another) == set(cls.fields)
    assert all(value in ((), None) for value in another.values())


@EACH
def test_no_field_is_hidden_from_one_who_passes_an_error_on(cls: type[GPUError]) -> None:
    """As Ray does: an object of a subclass, without attributes of its own, that asks the original for what it lacks."""
    original = full(cls)

    class PassedOn(cls):  # type: ignore[misc, valid-type]  # the base is a parameter
        def __init__(self) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    with pytest.raises(cls) as caught:
        raise PassedOn
    assert caught.value.as_dict() == {**original.as_dict(), "type": "PassedOn"}


def test_iterables_are_read_once() -> None:
    facts: Iterator[str] = iter(["a", "b"])
    fixes: Iterator[Fix | str] = iter(["one", errors.manual("two")])
    error = GPUError("it failed", evidence=facts, fixes=fixes, others=iter([GPUError("x")]))
    assert error.evidence == ("a", "b")
    assert [fix.kind for fix in error.fixes] == ["shell", "manual"]
    assert len(error.others) == 1


def test_with_others_leaves_the_error_itself_out() -> None:
    error, other = GPUError("one"), GPUError("two")
    assert error.with_others([other, error]) is error
    assert error.others == (other,)


# Fixes


@dataclass(frozen=True)
class FixCase:
    fix: Fix
    kind: str
    needs: str | None
    executable: bool


@pytest.mark.parametrize(
    "case",
    [
        FixCase(Fix("ls"), "shell", None, True),
        FixCase(errors.shell("ls"), "shell", None, True),
        FixCase(errors.shell("ls", needs="root"), "shell", "root", False),
        FixCase(errors.python("import torch"), "python", None, True),
        FixCase(errors.manual("think"), "manual", None, False),
        FixCase(errors.manual("think", needs="host"), "manual", "host", False),
    ],
    ids=lambda case: repr(case.fix),
)
def test_fix(case: FixCase) -> None:
    fix = case.fix
    assert isinstance(fix, str)
    assert (fix.kind, fix.needs, fix.executable) == (case.kind, case.needs, case.executable)
    assert fix == str(fix)
    for again in (pickle.loads(pickle.dumps(fix)), copy.deepcopy(fix), eval(repr(fix), {"Fix": Fix})):
        assert (again, type(again), again.kind, again.needs) == (fix, Fix, fix.kind, fix.needs)


# The warning


@EACH
def test_warning_carries_the_error(cls: type[GPUError]) -> None:
    warning = CPUExecutionWarning(full(cls))
    assert cls.__name__ in str(warning)
    assert str(full(cls)) in str(warning)
    again = pickle.loads(pickle.dumps(warning))
    assert type(again) is CPUExecutionWarning
    assert str(again) == str(warning)
    assert contents(again.error) == contents(full(cls))


def test_warning_can_be_made_an_error_and_nothing_else_is_one() -> None:
    assert issubclass(CPUExecutionWarning, UserWarning)
    assert not issubclass(CPUExecutionWarning, GPUError)


# Names of the package

IMPORT = """
import sys, ortgpu
assert not {"ortgpu.errors", "onnxruntime", "numpy"} & set(sys.modules), "import ortgpu is not lazy"
from ortgpu import %s as found
print(found.__module__, found.__name__)
assert "onnxruntime" not in sys.modules
"""


@pytest.mark.parametrize("name", PUBLIC)
def test_each_is_a_name_of_the_package_in_a_fresh_process(name: str) -> None:
    done = run_python(IMPORT % name, deadline=30).ok()
    assert done.stdout.split() == ["ortgpu.errors", name]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_package_gives_the_class_itself(name: str) -> None:
    assert getattr(ortgpu, name) is getattr(errors, name)
    assert name in dir(ortgpu)
