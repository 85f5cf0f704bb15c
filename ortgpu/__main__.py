"""``python -m ortgpu`` and the ``ortgpu`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 all is well, 1 a problem was found, 2 wrong usage.

    argv: the arguments after the program's name; None for those of this process.
    """
    from ortgpu.cli import run  # not at the top: a process that pickles by this module's name needs no command line

    return run(sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    sys.exit(main())
