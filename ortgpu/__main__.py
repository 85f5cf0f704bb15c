"""``python -m ortgpu`` and the ``ortgpu`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_NEEDED = ("rich", "click")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 no problem, 1 a problem was found, 2 wrong usage.

    ``argv`` holds the arguments after the program's name; None means the arguments of this process.
    """
    try:
        # This import is not at the top: a process that pickles by this module's name needs no command line.
        from ortgpu.cli import run
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        in_the_way = _find_shadowing_file()
        if in_the_way is None and not isinstance(error, ImportError):
            raise
        return _explain_import_failure(error, in_the_way)
    return run(sys.argv[1:] if argv is None else list(argv))


def _find_shadowing_file() -> str | None:
    """Return a file that hides a package of the command line, or None."""
    import importlib.metadata
    from importlib.machinery import PathFinder

    for name in _NEEDED:
        spec = PathFinder.find_spec(name)
        try:
            installed = str(importlib.metadata.distribution(name).locate_file(f"{name}/__init__.py"))
        except importlib.metadata.PackageNotFoundError:
            continue
        origin = spec.origin if spec is not None and spec.has_location else None
        if origin is not None and os.path.exists(installed) and not os.path.samefile(origin, installed):
            return origin
    return None


def _explain_import_failure(error: Exception, in_the_way: str | None) -> int:
    """Say why the command line cannot be imported. Rich and click may be missing, so this function uses neither."""
    from ortgpu.environment.packages.installer import read_installer

    if in_the_way is not None:
        fix = f"rename {in_the_way}, or take its folder off the search path of this program"
    else:
        fix = f"{read_installer().install} --upgrade {' '.join(_NEEDED)}"
    sys.stderr.write(f"ortgpu: its command line cannot be imported: {error}\nTo fix it:\n    {fix}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
