"""``python -m ortgpu`` and the ``ortgpu`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 all is well, 1 a problem was found, 2 wrong usage.

    argv: the arguments after the program's name; None for those of this process.
    """
    try:
        from ortgpu.cli import run  # not at the top: a process that pickles by this module's name needs no command line
    except ImportError as error:
        return _without_command_line(error)
    return run(sys.argv[1:] if argv is None else list(argv))


def _without_command_line(error: ImportError) -> int:
    """rich or click is missing, or something else of that name is in the way; what shows errors needs them too."""
    from ortgpu.environment.installer import read_installer

    install = f"{read_installer().install} --upgrade rich click"
    sys.stderr.write(f"ortgpu: its command line cannot be imported: {error}\nTo fix it:\n    {install}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
