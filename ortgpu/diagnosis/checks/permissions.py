"""May this user read what is installed? To the import system what may not be read is not there."""

from __future__ import annotations

import os

from ...errors import BrokenPackageError, GPUError
from ..facts import Facts
from ..remedies import system as system_remedies
from .package_files import did_its_work, is_vital


def package_unreadable(facts: Facts) -> GPUError | None:
    """Of ONNX Runtime's package, or where none is found, of the folders in which it may lie."""
    packages = facts.environment.packages
    folder = packages.onnxruntime.folder
    if folder is None:
        refused = [each for each in packages.refused if each.path.endswith(("site-packages", "dist-packages"))]
        what = "a folder in which packages are installed"
    else:
        folders = (folder, os.path.join(folder, "capi"))
        mine = [each for each in packages.refused if each.path.startswith(folder)]
        needed = (each for each in mine if is_vital(each.path) and not did_its_work(facts, each.path))
        refused = [*(each for each in mine if each.path in folders), *needed]
        what = "the installed ONNX Runtime"
    if not refused:
        return None
    return BrokenPackageError(
        f"this user may not read {what}",
        evidence=[f"permission denied: {each.mode} {each.path}" for each in refused[:8]],
        fixes=[system_remedies.let_it_be_read(facts.environment, [each.path for each in refused])],
        package=packages.onnxruntime.build_name,
        files=tuple(each.path for each in refused),
    )
