"""Check that every library is installed that a model needs, on a machine without a GPU: where an image is built.

python examples/check_libraries.py MODEL
"""

from __future__ import annotations

import sys

import ortgpu


def main(model: str) -> int:
    fatal = [error for error in ortgpu.diagnose(model).problems if error.severity == "fatal"]
    missing = [error for error in fatal if isinstance(error, (ortgpu.LibraryError, ortgpu.PackageError))]
    print("\n\n".join(map(str, missing)) or f"every library that {model} needs is installed")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
