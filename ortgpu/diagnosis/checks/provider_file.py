"""Why does the loader refuse the CUDA provider's file, when every library that it needs is there?"""

from __future__ import annotations

import os
import re

from ...errors import BrokenPackageError, DriverTooOldError, GPUError, LibraryVersionError, manual
from ...provider.preloading import MissingLibrary
from ..facts import Facts
from ..messages import loader_words
from ..remedies import commands as remedies
from ..remedies import system as system_remedies
from . import driver
from .libraries import c_library_too_old, judge_missing, of_another_version


def unloadable(facts: Facts) -> GPUError | None:
    """Every library is there and the loader still refuses the provider: for a missing symbol, say."""
    report = facts.observed.preload
    text = facts.observed.provider_error
    if text is None:
        return None
    if (old := c_library_too_old(facts, text, "the CUDA provider cannot be loaded")) is not None:
        return old
    absent = loader_words.not_found_for(text)
    if absent is not None and not absent.startswith("libonnxruntime"):
        wheel = remedies.wheel_of(absent, report.provider.cuda_major) if report and report.provider else None
        missing = MissingLibrary(absent, True, wheel, ())
        return judge_missing(facts, (missing,), "the CUDA provider needs", "fatal")
    if (lacked := loader_words.lacks_function(text)) is not None:
        return of_another_version(text, "the CUDA provider", facts) or LibraryVersionError(
            f"a loaded library lacks {lacked[0]}, which the CUDA provider was built against",
            evidence=[text],
            fixes=[manual(f"let no other {lacked[1]} be loaded before ONNX Runtime, and none come earlier on PATH")],
            needed=(lacked[1],),
        )
    if (lacks := loader_words.lacks_symbol(text)) is not None:
        symbol, library = lacks
        if re.fullmatch(r"cu[A-Z]\w*", symbol):
            return _driver_lacks(symbol, text, facts)
        if library is not None and (found := of_another_version(text, "the CUDA provider", facts)):
            return found
        return LibraryVersionError(
            f"the loaded libraries lack {symbol}, which the CUDA provider was built against",
            evidence=[text, *(f"loaded: {lib.path} ({lib.source})" for lib in (report.libraries if report else ()))],
            needed=(library or symbol,),
        )
    provider = facts.environment.provider
    fixes = [remedies.reinstall_onnxruntime(facts.environment)]
    if provider is not None and loader_words.cannot_be_mapped(text):
        fixes = [system_remedies.let_it_be_mapped(facts.environment, os.path.dirname(provider.path))]
    elif provider is not None and loader_words.is_blocked(text):
        fixes = [system_remedies.unblock(facts.environment, provider.path)]
    elif (late := loader_words.lacks_thread_storage(text)) is not None:
        fixes = [system_remedies.load_at_start(facts.environment, [late])]
    elif loader_words.may_be_visual_c(text):
        fixes.insert(0, system_remedies.update_visual_c())
    return BrokenPackageError(
        "the dynamic loader refuses the CUDA provider library",
        evidence=[text],
        fixes=fixes,
        package=facts.environment.packages.onnxruntime.build_name,
        files=(provider.path,) if provider is not None else (),
    )


def _driver_lacks(symbol: str, text: str, facts: Facts) -> GPUError | None:
    """A function of the driver's interface: those of the CUDA libraries begin with cuda, cublas, cudnn and so on."""
    if driver.too_old(facts) is not None:
        return None
    found, major = facts.environment.driver, facts.environment.cuda_major
    return DriverTooOldError(
        f"the driver's library libcuda.so.1 lacks {symbol}, which the CUDA provider calls: "
        "it is older than this ONNX Runtime needs, or no driver",
        evidence=[text, f"libcuda: {found.libcuda or 'not found'}"],
        fixes=[system_remedies.update_driver(facts.environment)],
        driver_version=found.version,
        driver_cuda=found.cuda_version,
        needed_cuda=(major, 0) if major else None,
    )
