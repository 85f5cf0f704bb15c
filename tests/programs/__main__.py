"""``python -m tests.programs FOLDER.MODULE.FUNCTION ARGUMENTS``: run a program, which finds the rest in sys.argv."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    module, _, function = sys.argv.pop(1).rpartition(".")
    getattr(importlib.import_module(f"tests.programs.{module}"), function)()
