"""What is only wrong on Windows: the libraries of Visual C++, and an ONNX Runtime that Windows itself brings."""

from __future__ import annotations

import re

from ...errors import GPUError, LibraryConflictError, LibraryNotFoundError, manual
from ..facts import Facts
from ..remedies import system as system_remedies


def runtime_missing(facts: Facts) -> GPUError | None:
    """ONNX Runtime's files link libraries of Visual C++ that are not here: LoadLibrary says 126 to that, and no name.

    1.31.1 links MSVCP140_ATOMIC_WAIT.dll, which older redistributables do not have, and 1.29.0 does not. As long as
    nothing was tried it is a warning: another package may let Windows look into a folder of its own.
    """
    absent, observed = facts.environment.system_libraries_missing, facts.observed
    failed = observed.import_error or observed.provider_error
    if not absent or (observed.available_providers is not None and not failed):
        return None
    return LibraryNotFoundError(
        f"ONNX Runtime links {' and '.join(absent)}, not found on this machine",
        evidence=[f"{name}: not beside ONNX Runtime, not beside Python, and not in System32" for name in absent],
        fixes=[system_remedies.system_package(absent)],
        severity="fatal" if failed else "warning",
        missing=absent,
    )


def other_engine(facts: Facts) -> GPUError | None:
    """Windows 11 has an onnxruntime.dll of its own in System32, an older one, which a program may bind by its name
    (microsoft/winml-cli issue 689)."""
    observed, installed = facts.observed, facts.environment.packages.onnxruntime
    words = (observed.import_error, observed.provider_error, *observed.printed("import"))
    wanted = re.compile(r"requested API version \[\d+\] is not available")
    said = next((each for each in words if each and wanted.search(each)), None)
    if said is None:
        return None
    own = (installed.folder or "").lower()
    names = (path for path in facts.environment.mapped if re.search(r"[\\/]onnxruntime\.dll$", path, re.IGNORECASE))
    others = tuple(path for path in names if not own or not path.lower().startswith(own))
    what = others[0] if others else "another onnxruntime.dll, of an older release,"
    return LibraryConflictError(
        f"{what} was loaded in the place of the installed ONNX Runtime",
        evidence=[said, *(f"in this process: {path}" for path in others)],
        fixes=[manual("import onnxruntime before what loads that DLL, or keep that from being loaded in this process")],
        libraries=others,
    )
