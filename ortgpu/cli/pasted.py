"""Recognise pasted lines of ONNX Runtime, of the loader and of ortgpu, from any machine."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from ortgpu.diagnosis.checks import imports
from ortgpu.diagnosis.checks.classifier import explain_line, explain_opening, explain_run
from ortgpu.diagnosis.checks.libraries import is_of_driver
from ortgpu.diagnosis.facts import Facts, Observed
from ortgpu.environment.gpu.driver import LIBCUDA, Driver, Nvml
from ortgpu.environment.host import Host
from ortgpu.environment.inspection import Environment
from ortgpu.environment.libraries import loader_words
from ortgpu.environment.libraries.catalogue import spec_for
from ortgpu.environment.packages.installed import Distribution, OnnxRuntime, Packages
from ortgpu.environment.packages.installer import Installer
from ortgpu.environment.variables import Variables
from ortgpu.errors import (
    DriverNotFoundError,
    GPUError,
    ProviderFallbackError,
    catalogue,
)

# This matches a word outside paths and longer names.
_WORD = re.compile(r"(?:\bortgpu\.errors\.|(?<![\w./\\-]))([\w-]+)(?![\w/\\-]|\.\w)")
_ADVICE = re.compile(r"\bortgpu explain ([\w-]+)")
_LIBRARY = re.compile(r"\.(?:so|dll)\b", re.IGNORECASE)
_BEFORE_THE_LOADER = re.compile("with error: |Error: ")


# This machine has no known fault.
_ELSEWHERE = Environment(
    host=Host("Linux", "x86_64", None, None, None, (3, 12, 0), "CPython", "python", None, None, False, None, False),
    installer=Installer("pip", "pip install", "pip uninstall -y"),
    packages=Packages(
        OnnxRuntime("", True, (Distribution("onnxruntime", None, ""),), (), None, None, None, None, None, None),
        torch=None,
        nvidia=(),
        others=(),
    ),
    extension=None,
    bridge=None,
    provider=None,
    libraries=(),
    mapped=(),
    driver=Driver(LIBCUDA, None, None, None, (), Nvml(False, None, None, None, ())),
    variables=Variables({}, {}),
)


def recognise(text: str) -> tuple[str, str] | None:
    """Return the error code for a text, and the deciding line; None if no line is known.

    A line with a cause comes before a vague line. A vague line says only that ONNX Runtime left the GPU, or names a
    base class of errors. The checks judge the line on a machine without any other facts.
    """
    vague = {ProviderFallbackError.code, *(code for code, cls in catalogue().items() if cls.__subclasses__())}
    matches = [(code, line.strip()) for line in text.splitlines() for code in _codes_of(line.strip())]
    return min(matches, key=lambda each: each[0] in vague, default=None)


@functools.cache
def _own_names() -> dict[str, str]:
    """Return codes by ortgpu's own spellings. A code of one word is left out: it may mean something else in a log."""
    codes = {code: code for code in catalogue() if "-" in code}
    return {**codes, **{cls.__name__: code for code, cls in catalogue().items()}}


def _codes_of(line: str) -> Iterator[str]:
    """Yield the possible error codes for a line, the likeliest first."""
    names = _own_names()
    yield from (names[word] for word in _WORD.findall(line) if word in names)
    yield from (code for code in _ADVICE.findall(line) if code in catalogue())
    yield from (error.code for error in _judged(line) if error is not None)


def _judged(line: str) -> Iterator[GPUError | None]:
    def seen(**observed: Any) -> Facts:
        return Facts(_ELSEWHERE, observed=Observed(**observed))

    yield explain_line(line)
    words = _BEFORE_THE_LOADER.split(line)[-1]
    refused = _LIBRARY.search(words) is not None and loader_words.refuses(words)
    _, lacking = loader_words.lacks_symbol(words) or ("", None)
    is_of_cuda = lacking is not None and spec_for(lacking) is not None  # The imported module does not matter.
    if is_of_driver(loader_words.not_found_for(words) or ""):
        yield DriverNotFoundError(words)
    elif "ImportError" in line and not is_of_cuda and (refused or "onnxruntime" in line):
        yield imports.failed(seen(import_error=line))
    if refused:
        yield imports.provider_unloadable(seen(provider_error=words))
    yield (
        explain_run(line, None, None) if "returned while running" in line else explain_opening(line, Facts(_ELSEWHERE))
    )
