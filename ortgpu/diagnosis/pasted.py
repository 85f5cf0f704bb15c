"""Recognise lines that somebody pastes: of ONNX Runtime, of the loader, of this library, and of any machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..environment.gpu.driver import LIBCUDA, Driver, Nvml
from ..environment.host import Host
from ..environment.inspection import Environment
from ..environment.packages.installed import Distribution, OnnxRuntime, Packages
from ..environment.packages.installer import Installer
from ..environment.variables import Variables
from ..errors import GPUError, OnnxRuntimeNotInstalledError, ProviderFallbackError, catalogue
from .checks import driver, imports, packages
from .checks.opening import of_construction
from .execution import of_run
from .facts import Facts, Observed
from .messages import loader_words

_OWN = re.compile(r"\b(?:ortgpu explain ([\w-]+)|ortgpu\.errors\.(\w+Error)\b)")
_AVAILABLE = re.compile(r"'CUDAExecutionProvider' is not in available provider names.*Available providers: '([^']*)'")
_NOT_INSTALLED = re.compile(r"No module named '?onnxruntime'?$")
_LIBRARY = re.compile(r"\.(?:so|dll)\b", re.IGNORECASE)
_BEFORE_THE_LOADER = re.compile(r".*(?:with error: |(?:Import|OS)Error: )")


# A machine on which nothing is known to be wrong
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
    """Return the code of the error that a text stands for, and the line that says so; None if no line is known.

    A line that names a cause counts before one that says only that ONNX Runtime left the GPU. The checks judge it on a
    machine of which nothing else is known.
    """
    found = [(code, line.strip()) for line in text.splitlines() for code in _codes_of(line.strip())]
    return min(found, key=lambda each: each[0] == ProviderFallbackError.code, default=None)


def _codes_of(line: str) -> Iterator[str]:
    """Yield the codes that a line stands for, the likeliest first."""
    for own in _OWN.findall(line):
        yield from (code for code, cls in catalogue().items() if code in own or cls.__name__ in own)
    if _NOT_INSTALLED.search(line):
        yield OnnxRuntimeNotInstalledError.code
    yield from (error.code for error in _judged(line) if error is not None)


def _judged(line: str) -> Iterator[GPUError | None]:
    def seen(**observed: Any) -> Facts:
        return Facts(_ELSEWHERE, observed=Observed(**observed))

    if listed := _AVAILABLE.search(line):
        yield packages.cpu_only(seen(available_providers=tuple(listed[1].split(", "))))
    words = _BEFORE_THE_LOADER.sub("", line)
    refused = _LIBRARY.search(words) is not None and loader_words.refuses(words)
    if loader_words.not_found_for(words) == LIBCUDA:
        yield driver.not_found(Facts(replace(_ELSEWHERE, driver=replace(_ELSEWHERE.driver, libcuda=None))))
    elif "ImportError" in line and (refused or "onnxruntime" in line):
        yield imports.failed(seen(import_error=line))
    if refused:
        yield imports.provider_unloadable(seen(provider_error=words))
    yield of_run(line, None, None) if "returned while running" in line else of_construction(line, Facts(_ELSEWHERE))
