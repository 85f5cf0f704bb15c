"""Exemptions from the guard: names of modules that create sessions, and paths of models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from ...process.late import late

if TYPE_CHECKING:
    from ...provider import living
else:
    living = late("ortgpu.provider.living")

VARIABLE = "ORTGPU_ENFORCE_EXCEPT"

_SEPARATOR = ","
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MODEL_SUFFIXES = (".onnx", ".ort")
_MAKERS_OF_ALL = ("onnxruntime", "ortgpu")

_declared: frozenset[str] = frozenset()  # the program's exemptions, without the variable's


def declare(names: object) -> None:
    """Add exemptions of the program. Raises the exceptions of :func:`parse`."""
    global _declared
    _declared |= parse(names)


def forget() -> None:
    """Drop the exemptions of the program."""
    global _declared
    _declared = frozenset()


def list_all() -> frozenset[str]:
    """Return the exemptions of the program and of the variable. Raises ValueError for a variable with a mistake."""
    return _declared | read_variable()


def is_exempt(session: object, model: object) -> bool:
    """Return True if the program or the variable names the model of a session, or a module that creates it."""
    exempt = list_all()
    return bool(exempt) and is_covered(exempt, model, living.list_makers(session))


def parse(names: object) -> frozenset[str]:
    """Return exemptions in one form: the name of a module, or a pattern of paths with a slash in it.

    Raises:
        TypeError: ``names`` is neither a text, a path, nor an iterable of these.
        ValueError: a text is neither the name of a module nor the path of a model.
    """
    if isinstance(names, (str, os.PathLike)):
        names = (names,)
    if not isinstance(names, Iterable):
        raise TypeError(f"except_ must be names of modules and paths of models, not {names!r}")
    return frozenset(map(_parse_one, names))


def _parse_one(name: object) -> str:
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"except_ must have names of modules and paths of models, not {name!r}")
    text = os.fsdecode(name)
    if _SEPARATOR in text:  # The variable could not pass this name to child processes.
        raise ValueError(f"an exemption has no comma: write {text.replace(_SEPARATOR, '?')!r}")
    has_folder = os.sep in text or "/" in text
    if not isinstance(name, str) or has_folder or text.lower().endswith(_MODEL_SUFFIXES):
        pattern = PurePath(text).as_posix()
        return pattern if "/" in pattern else f"./{pattern}"
    if not _MODULE.fullmatch(text):
        raise ValueError(
            f"{text!r} is no exemption: an exemption is the name of a module, as 'nudenet', or the path "
            "of a model, as 'vad.onnx', 'models/*.onnx' or './weights.bin'"
        )
    if text.partition(".")[0] in _MAKERS_OF_ALL:
        raise ValueError(f"{text!r} is no exemption: name the module that calls it")
    return text


def read_variable() -> frozenset[str]:
    """Return the exemptions that the variable names. Raises ValueError as :func:`parse` does."""
    names = os.environ.get(VARIABLE, "").split(_SEPARATOR)
    try:
        return parse(name.strip() for name in names if name.strip())
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def variable_text(exemptions: Iterable[str]) -> str:
    return _SEPARATOR.join(sorted(exemptions))


def is_covered(exemptions: Iterable[str], model: object, modules: Iterable[str]) -> bool:
    """Return True if an exemption names the path of the model, a module, or a parent of a module."""
    makers = {module[: match.start()] for module in modules for match in re.finditer(r"\.|$", module)}
    path = PurePath(os.path.abspath(os.fsdecode(model))) if isinstance(model, (str, os.PathLike)) else None
    return any(
        path is not None and path.match(exemption) if "/" in exemption else exemption in makers
        for exemption in exemptions
    )
