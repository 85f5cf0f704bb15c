"""Questions to ortgpu inside Python for Windows: ``python -m tests.windows.programs NAME FIRST ARGUMENTS...``.

FIRST is Python that runs before. The answer is the last line of the output, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any


def loader(*paths: str) -> dict[str, Any]:
    """Open each file. Return the words about each, what functions of it answer, what is loaded, and two searches."""
    from ortgpu.environment.libraries.loader_windows import WindowsLoader

    found = WindowsLoader()
    words = {path: found.open(path) for path in paths}
    asked = {path: [found.ask(path, function) for function in ("on_load", "absent")] for path in paths}
    folders = [found.folders(along_path=along_path) for along_path in (False, True)]
    return {"words": words, "asked": asked, "loaded": found.loaded(), "folders": folders}


def preloaded(directory: str = "") -> dict[str, Any]:
    """Preload everything, from a folder or without one."""
    import ortgpu

    report = ortgpu.preload(directory or None)
    return {
        "ok": report.ok,
        "libraries": {one.soname: [one.source, one.path] for one in report.libraries},
        "missing": [one.soname for one in report.missing],
        "rejected": {one.path: [one.problem, one.unfit_for] for one in report.rejected},
        "cuDNN": [report.cudnn_cuda_major, report.cudnn_mixed],
    }


def planned() -> dict[str, list[list[str]]]:
    """Return the candidates for each library, in order, by source and path."""
    from ortgpu.environment.packages.installed import locate_packages
    from ortgpu.provider.preloading import plan

    found = plan(locate_packages()).resolutions
    return {one.soname: [[each.source, each.path] for each in one.candidates] for one in found}


def session(model: str, *providers: str) -> dict[str, Any]:
    """Open a session. Return the errors that it ends in, the cause first, and what is loaded then."""
    import ortgpu
    from ortgpu.environment.libraries.loader import read_mapped_libraries

    try:
        ortgpu.GPUSession(model, providers=list(providers) or None)
    except ortgpu.GPUError as error:
        errors = [{**one.as_dict(), "text": str(one)} for one in (error, *error.others)]
    return {"errors": errors, "loaded": read_mapped_libraries()}


def diagnosed() -> list[dict[str, Any]]:
    """Return what ``ortgpu.diagnose`` finds, with a child that loads everything."""
    import ortgpu

    return [{**one.as_dict(), "text": str(one)} for one in ortgpu.diagnose(probe=True).problems]


def spawned(model: str) -> list[dict[str, Any]]:
    """Open a session in this process, then in a child of it."""
    here = session(model)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [here, pool.apply(session, (model,))]


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program for program in (loader, preloaded, planned, session, diagnosed, spawned)
}

if __name__ == "__main__":
    name, first, *arguments = sys.argv[1:]
    exec(first)
    sys.stdout.write(json.dumps(PROGRAMS[name](*arguments)))
