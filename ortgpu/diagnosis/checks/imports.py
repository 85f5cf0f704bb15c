"""Find out why `import onnxruntime` fails, or why the CUDA provider's file does not open although its libraries do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from ... import errors
from ...environment.gpu.driver import LIBCUDA
from ...environment.inspection import Environment
from ...environment.libraries import loader_words
from ...environment.libraries.catalogue import spec_for
from ...environment.packages.interpreter import IN_SUB_INTERPRETER
from ...environment.packages.metadata import numbers_of
from ...errors import Fix, GPUError, Severity, manual
from ...provider.preloading import MissingLibrary
from ..facts import Facts
from ..remedies import fixes as remedies
from . import driver
from .libraries import c_library_unfit, is_of_driver, judge_missing, version_mismatch


def failed(facts: Facts) -> GPUError | None:
    """Explain why `import onnxruntime` raised, or gave a module without InferenceSession."""
    text, environment, printed = facts.observed.import_error, facts.environment, facts.observed.printed
    if text is None:
        if facts.observed.has_session is not False:
            return None
        text = "AttributeError: module 'onnxruntime' has no attribute 'InferenceSession'"
    installed = environment.packages.onnxruntime
    if installed.folder is None or not installed.importable:
        return None  # The checks not_installed and broken_files report it.
    if (unfit := c_library_unfit(facts, text, "import onnxruntime fails")) is not None:
        return unfit
    absent = re.search(rf"(?!libonnxruntime){loader_words.SONAME}: cannot open shared object", text)
    if absent is not None and not loader_words.is_blocked(text):
        if spec_for(absent[1]) is not None or is_of_driver(absent[1]):
            return None  # The extension itself links CUDA (1.27.0): libraries.missing or driver.not_found reports it.
        return errors.LibraryNotFoundError(
            f"import onnxruntime fails: {absent[1]}, which it links, is not on this system",
            evidence=[text],
            fixes=[remedies.system_package([absent[1]])],
            missing=(absent[1],),
        )
    if (other := version_mismatch(text, "ONNX Runtime's module", facts)) is not None:
        return other
    for words, why, fix_for in _SAID:
        if said := list(filter(words, (text, *printed))):
            return _fails(
                facts, (text, said[0]), why, *fix_for(environment), package="numpy" if "numpy" in why else None
            )
    quoted = {name for line in (text, *printed) for name in re.findall(r"'(\w+)['.]", line)}
    for path in environment.packages.hiding_standard:  # The words name the module, and this is the user's file.
        if os.path.basename(path).removesuffix(".py") in quoted:
            why = f"{path} is imported instead of Python's own module"
            return _fails(facts, (text,), why, remedies.fix_shadowing(environment, path), file=path)
    whole = _way_to_load_whole_files(facts, text)
    if whole is not None:
        return _fails(facts, (text, whole[0]), "", whole[1], package=installed.build_name)
    if (dependency := _dependency_missing(facts, text)) is not None:
        return dependency
    if ("DLL load failed" in text and visual_c_missing(facts)) or other_engine(facts):
        return None  # The two checks report it.
    fixes = [remedies.reinstall_onnxruntime(environment)]
    if "executable stack" in text:
        fixes = [remedies.install(environment, remedies.newest_requirements(environment), upgrade=True)]
    elif "sys.modules" in text:
        fixes = [manual("remove the code that replaces the module onnxruntime: the package itself is not imported")]
    elif environment.host.is_windows and loader_words.may_be_visual_c(text):
        fixes.insert(0, remedies.UPDATE_VISUAL_C)
    return _fails(facts, (text,), "", *fixes, package=installed.build_name)


def _way_to_load_whole_files(facts: Facts, text: str) -> tuple[str, Fix] | None:
    report, installed = facts.observed.loading, facts.environment.packages.onnxruntime
    missing = (report.missing if report is not None else None) or ()
    tried = (file.problem or "" for library in missing for file in library.rejected)
    module = installed.extension or os.path.join(installed.folder or "", "__init__.py")
    for words in (text, *facts.observed.printed, *tried):
        # NumPy may lie on another file system than ONNX Runtime.
        paths = (part[part.find("/") :] for part in words.split(": ")[:-1] if "/" in part)
        file = next((path for path in paths if ".so" in path), module)
        if (fix := remedies.fix_load_refusal(facts.environment, words, file)) is not None:
            return words, fix
    return None


def _fails(
    facts: Facts, evidence: tuple[str, ...], why: str, *fixes: Fix, package: str | None = None, file: str | None = None
) -> errors.BrokenPackageError:
    """Return the error for a failed import. Its evidence has NumPy's own words too, if NumPy failed."""
    return errors.BrokenPackageError(
        "import onnxruntime fails" + (f": {why}" if why else ""),
        # NumPy's text has several lines.
        evidence=dict.fromkeys(" ".join(said.split()) for said in (*evidence, facts.observed.numpy_error) if said),
        fixes=fixes,
        package=package,
        files=(file,) if file is not None else (),
    )


def _older_numpy(environment: Environment) -> list[Fix]:
    """Return the fixes for a processor too old for NumPy: wheels from 2.4 on need x86-64-v2 (numpy issue 31073)."""
    numpy = environment.packages.other("numpy")
    through = (
        "in a virtual machine: pass the host's processor through (Proxmox: CPU type host, libvirt: host-passthrough)"
    )
    fixes: list[Fix] = [manual(through, needs="host")]
    if numpy is not None and numbers_of(numpy.version or "") >= (2, 4):
        fixes.insert(0, remedies.install(environment, ["numpy<2.4"], instead_of=numpy))
    return fixes


_IN_MAIN = manual(
    "run this program in Python's main interpreter: WSGIApplicationGroup %{GLOBAL} for mod_wsgi, single-interpreter = "
    "true for uWSGI"
)
_NUMPY_ONCE = manual(
    "import numpy before what puts sys.modules back as it was, such as mock.patch.dict(sys.modules), or leave it "
    "there, and restart this process"
)
_TWICE, _BASELINE = re.compile("more than once per process"), re.compile("built with baseline optimizations")

# The words, why the import fails, and the fixes. In a sub-interpreter the extension waits for a lock for ever.
_SAID: tuple[tuple[Callable[[str], object], str, Callable[[Environment], list[Fix]]], ...] = (
    (IN_SUB_INTERPRETER.__eq__, "in a sub-interpreter of Python it would never return", lambda _: [_IN_MAIN]),
    (
        loader_words.lacks_threads,
        "the process has reached its thread limit",
        lambda here: [remedies.raise_thread_limit(here)],
    ),
    (_TWICE.search, "numpy was removed from sys.modules, and cannot be imported twice", lambda _: [_NUMPY_ONCE]),
    (_BASELINE.search, "the installed numpy is built for newer processors than this machine's", _older_numpy),
)


def _dependency_missing(facts: Facts, text: str) -> GPUError | None:
    absent = re.search(r"No module named '(\w+)", text)
    environment, packages = facts.environment, facts.environment.packages
    numpy, release = packages.other("numpy"), packages.onnxruntime.version
    # 1.19 was the first release for NumPy 2. With older ones NumPy prints why, and its ImportError says nothing.
    is_2 = numpy is not None and numbers_of(numpy.version or "") >= (2,)
    numpy_too_new = is_2 and () < numbers_of(release or "") < (1, 19)
    at_fault = numpy_too_new or loader_words.blames_numpy(text) or "_ARRAY_API not found" in text
    module = absent[1] if absent else "numpy" if at_fault else None
    if module in (None, "onnxruntime"):
        return None
    name = "protobuf" if module == "google" else module
    distribution = packages.other(name)
    stray_file = remedies.shadowing_file(packages, name)
    if stray_file is not None:
        why = f"{stray_file} is imported instead of the installed {name}"
        fix = remedies.fix_shadowing(environment, stray_file)
    elif distribution is None:
        why = f"{name}, which it needs, is not installed"
        fix = remedies.install(environment, [name])
    elif remedies.belongs_to_other_python(environment, location := distribution.location):
        why = f"{name} is imported from {location}, where the packages of another Python are"
        elsewhere = any(other.name == name and other.location != location for other in packages.others)
        then = [] if elsewhere else [remedies.install(environment, [name])]
        fix = remedies.drop_from_search_path(environment, location, *then)
    elif name == "numpy" and numpy_too_new:
        why = f"ONNX Runtime {release} is too old for numpy {distribution.version}"
        fix = remedies.install(environment, ["numpy<2"], instead_of=distribution)
    else:
        why = f"the installed {name} {distribution.version or ''}".rstrip() + " cannot be imported"
        fix = remedies.install_again(environment, distribution)
    return _fails(facts, (text,), why, fix, package=name, file=stray_file)


def visual_c_missing(facts: Facts) -> GPUError | None:
    """Check that the Visual C++ libraries are installed: otherwise LoadLibrary returns 126, without a name.

    1.31.1 links MSVCP140_ATOMIC_WAIT.dll, and 1.29.0 does not. Older redistributables lack this file. The error is a
    warning before the first attempt: another package may let Windows search a folder of its own.
    """
    absent, observed = facts.environment.system_libraries_missing, facts.observed
    failed = observed.import_error or observed.provider_error
    if not absent or (observed.available_providers is not None and not failed):
        return None
    summary = f"ONNX Runtime needs {' and '.join(absent)}: not installed on this machine"
    evidence = [f"{name}: not beside ONNX Runtime, not beside Python, and not in System32" for name in absent]
    severity: Severity = "fatal" if failed else "warning"
    fixes = [remedies.system_package(absent)]
    return errors.LibraryNotFoundError(summary, evidence=evidence, fixes=fixes, severity=severity, missing=absent)


def other_engine(facts: Facts) -> GPUError | None:
    """Check for the older onnxruntime.dll in System32 of Windows 11 (microsoft/winml-cli issue 689)."""
    observed, installed = facts.observed, facts.environment.packages.onnxruntime
    words = filter(None, (observed.import_error, observed.provider_error, *observed.printed))
    message = next(filter(re.compile(r"requested API version \[\d+\] is not available").search, words), None)
    if message is None:
        return None
    folder = (installed.folder or "").lower()
    names = (path for path in facts.environment.mapped if re.search(r"[\\/]onnxruntime\.dll$", path, re.IGNORECASE))
    others = tuple(path for path in names if not folder or not path.lower().startswith(folder))
    what = others[0] if others else "another onnxruntime.dll, of an older release,"
    summary = f"{what} was loaded instead of the installed ONNX Runtime"
    evidence = [message, *(f"in this process: {path}" for path in others)]
    advice = "import onnxruntime before the module that loads that DLL, or do not load that DLL in this process"
    return errors.LibraryConflictError(summary, evidence=evidence, fixes=[manual(advice)], libraries=others)


def provider_unloadable(facts: Facts) -> GPUError | None:
    report, text, environment = facts.observed.preload, facts.observed.provider_error, facts.environment
    if text is None:
        return None
    if (unfit := c_library_unfit(facts, text, "the CUDA provider cannot be loaded")) is not None:
        return unfit
    absent = loader_words.not_found_for(text)
    if absent in environment.system_libraries_missing:
        return None  # The check visual_c_missing reports it.
    if absent is not None and not absent.startswith("libonnxruntime"):
        wheel = remedies.wheel_of(absent, report.provider.cuda_major) if report and report.provider else None
        missing = MissingLibrary(absent, True, wheel, ())
        return judge_missing(facts, (missing,), "the CUDA provider needs", "fatal")
    error: type[GPUError] = errors.LibraryVersionError
    evidence, fixes = [text], [remedies.reinstall_onnxruntime(environment)]
    if "CreateEpFactories" in text:
        summary = "ONNX Runtime cannot register the file of the CUDA plugin: it lacks CreateEpFactories"
        evidence.append("plugins have that function since release 1.23")
        fields: dict[str, Any] = {"needed": ("CreateEpFactories",)}
    elif (taken := re.match(r"Provider_GetHost is taken from (.*), not from ", text)) is not None:
        summary = "the CUDA provider would call into another ONNX Runtime, and end this process"
        apart = "use the two in processes of their own, or open the first GPUSession before the other one is loaded"
        fixes = [remedies.drop_from_variable(environment, "LD_PRELOAD", taken[1]) or manual(apart)]
        return errors.RuntimeConflictError(summary, evidence=evidence, fixes=fixes, libraries=(taken[1],))
    elif (lacked := loader_words.lacks_symbol(text) or loader_words.lacks_function(text)) is not None:
        symbol, library = lacked
        if re.fullmatch(r"cu[A-Z]\w*", symbol):  # Other CUDA libraries have longer prefixes than the driver.
            lacks = f"the driver's library {LIBCUDA} lacks {symbol}, which the CUDA provider calls"
            summary = f"{lacks}: it is older than this ONNX Runtime needs, or no driver"
            evidence, fixes = [text, *driver.versions(facts)], [remedies.update_driver(environment)]
            judged = driver.too_old(facts) is not None
            return None if judged else driver.older_than_needed(facts, summary, evidence, fixes)
        if (mismatch := version_mismatch(text, "the CUDA provider", facts)) is not None:
            return mismatch
        summary = f"a loaded library lacks {symbol}, which the CUDA provider needs"
        fields = {"needed": (library or symbol,)}
        evidence += [f"loaded: {lib.path} ({lib.source})" for lib in (report.libraries if report else ())]
        advice = f"let no other {library} be loaded, or found, before the one that ONNX Runtime needs"
        fixes = [manual(advice)] if library is not None else []
    else:
        path = environment.provider.path if environment.provider is not None else ""
        error, summary = errors.BrokenPackageError, "the dynamic loader refuses the CUDA provider library"
        fields = {"package": environment.packages.onnxruntime.build_name, "files": (path,) if path else ()}
        if (fix := remedies.fix_load_refusal(environment, text, path)) is not None:
            fixes = [fix]
        elif loader_words.may_be_visual_c(text):
            fixes.insert(0, remedies.UPDATE_VISUAL_C)
    return error(summary, evidence=evidence, fixes=fixes, **fields)
