"""What keeps this very process from an ONNX Runtime that is installed and whole."""

from __future__ import annotations

from ...environment.packages.interpreter import IN_SUB_INTERPRETER
from ...errors import BrokenPackageError, GPUError, manual
from ..facts import Facts


def replaced(facts: Facts) -> GPUError | None:
    """Installed over what this process had imported, as a cell of a notebook does: its provider is not made for the
    module that is loaded, which has none or ends the process with it."""
    installed = facts.environment.packages.onnxruntime
    if installed.imported_as is None or (
        installed.imported_as[0].endswith("-gpu") and not installed.is_of_another_release
    ):
        return None  # a CPU build of the same release leaves the provider as it was: it is the next process that is hit
    return BrokenPackageError(
        "ONNX Runtime was replaced after this process had imported it, and a process goes on with what it imported",
        evidence=[
            f"imported: {' '.join(installed.imported_as)}",
            f"there now: {installed.build_name} {installed.build_version} in {installed.folder}",
        ],
        fixes=[manual("start this process anew: in a notebook, restart its kernel")],
        package=installed.build_name,
    )


def in_sub_interpreter(facts: Facts) -> GPUError | None:
    """Its extension waits there for a lock, for ever."""
    text = facts.observed.import_error
    if text != IN_SUB_INTERPRETER:
        return None
    return BrokenPackageError(
        "import onnxruntime never returns in a sub-interpreter of Python, which this is",
        evidence=[text],
        fixes=[
            manual(
                "let this program have Python's main interpreter: WSGIApplicationGroup %{GLOBAL} for mod_wsgi, "
                "single-interpreter = true for uWSGI"
            )
        ],
        package=facts.environment.packages.onnxruntime.build_name,
    )
