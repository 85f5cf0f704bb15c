"""Group A: files of the package, and what its import needs besides, that are gone, damaged or of another kind."""

from __future__ import annotations

import re
import sys

from tests.faults.case import (
    AARCH64,
    AS_A_USER,
    MENDED,
    Case,
    edit,
    in_group,
    own_path,
    removing,
    truncating,
    unreadable,
)
from tests.lab import Overlay
from tests.lab.fixtures import Lab

CUDA_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
BUILD = "onnxruntime/capi/build_and_package_info.py"
BRIDGE = "onnxruntime/capi/libonnxruntime_providers_shared.so"
EXTENSION = "onnxruntime/capi/onnxruntime_pybind11_state*.so"


def numpy_gone(_lab: Lab, overlay: Overlay) -> None:
    overlay.uninstall("numpy")


def numpy_damaged(_lab: Lab, overlay: Overlay) -> None:
    overlay.remove("numpy/_core/_multiarray_umath*.so")


def numpy_for_newer_processors(_lab: Lab, overlay: Overlay) -> None:
    """As NumPy 2.4 and newer end their import on a processor without SSE4.2: in their words."""
    words = "NumPy was built with baseline optimizations: \\n(X86_V2) but your machine doesn't support:\\n(X86_V2)."
    overlay.replace("numpy/__init__.py", f'raise RuntimeError("{words}")\n'.encode())


def release_before_numpy_2(lab: Lab, overlay: Overlay) -> None:
    """Installed with --no-deps: its metadata would have kept NumPy below 2."""
    overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.get("onnxruntime-gpu", "1.18.1"))


def cuda_build_of_another_name(_lab: Lab, overlay: Overlay) -> None:
    """As distributions build it: with CUDA, and called onnxruntime, which in the package index is the CPU's."""
    named = own_path(overlay, "onnxruntime_gpu-*.dist-info")
    other = named.replace("onnxruntime_gpu-", "onnxruntime-")
    overlay.take_apart(named).rename(named, other)
    edit(overlay, f"{other}/METADATA", rb"(?m)^Name: onnxruntime-gpu$", "Name: onnxruntime")
    edit(overlay, f"{other}/RECORD", re.escape(named).encode(), other)
    overlay.remove(CUDA_PROVIDER)


def extension_of_another_python(_lab: Lab, overlay: Overlay) -> None:
    name = own_path(overlay, EXTENSION)
    other = f"cpython-{sys.version_info[0]}{sys.version_info[1] + 1}-x86_64-linux-gnu"
    stem = "onnxruntime/capi/onnxruntime_pybind11_state"
    overlay.rename(name, f"{stem}.{other}.so")


def extension_unreadable(_lab: Lab, overlay: Overlay) -> None:
    """As root installs it under a strict umask, for a service with a user of its own."""
    unreadable(overlay, EXTENSION)


def provider_of_another_architecture(_lab: Lab, overlay: Overlay) -> None:
    content = bytearray((overlay.site / CUDA_PROVIDER).read_bytes())
    content[18:20] = AARCH64.to_bytes(2, "little")
    overlay.replace(CUDA_PROVIDER, bytes(content))


def old_cxx_library(lab: Lab, overlay: Overlay) -> None:
    """A libstdc++ of the right name without the symbol versions that the package was built against."""
    folder = overlay.root / "older" / "lib"
    folder.mkdir(parents=True)
    script = overlay.root / "versions.map"
    script.write_text("GLIBCXX_3.4 { global: *; };\n", encoding="utf-8")
    made = lab.stubs.compile(
        "libstdc++.so.6", "int old_and_empty;\n", "-Wl,-soname,libstdc++.so.6", f"-Wl,--version-script={script}"
    )
    (folder / "libstdc++.so.6").write_bytes(made.read_bytes())


CASES = in_group(
    "A",
    [
        Case(
            "provider-file-missing",
            "BrokenPackageError",
            ("libonnxruntime_providers_cuda.so", "onnxruntime-gpu"),
            removing(CUDA_PROVIDER),
            rows=("B23",),
            after=MENDED,
        ),
        Case(
            "provider-file-missing-in-a-cuda-build-of-another-name",
            "BrokenPackageError",
            ("the installed onnxruntime is damaged", "libonnxruntime_providers_cuda.so", "install 'onnxruntime-gpu"),
            cuda_build_of_another_name,
            after=MENDED,
        ),
        Case(
            "provider-file-truncated",
            "BrokenPackageError",
            ("libonnxruntime_providers_cuda.so", "onnxruntime-gpu"),
            truncating(CUDA_PROVIDER, 1_000_000),
            plain="aborted",
            after=MENDED,
        ),
        Case(
            "shared-provider-file-missing",
            "BrokenPackageError",
            ("libonnxruntime_providers_shared.so", "onnxruntime-gpu"),
            removing(BRIDGE),
            after=MENDED,
        ),
        Case(
            "shared-provider-file-truncated",
            "BrokenPackageError",
            ("libonnxruntime_providers_shared.so", "onnxruntime-gpu"),
            truncating(BRIDGE, 1_000),
            cpu=False,
            plain="aborted",
            after=MENDED,
        ),
        Case(
            "extension-module-missing",
            "BrokenPackageError",
            ("onnxruntime_pybind11_state", "onnxruntime-gpu"),
            removing(EXTENSION),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "extension-module-truncated",
            "BrokenPackageError",
            ("onnxruntime_pybind11_state", "onnxruntime-gpu"),
            truncating(EXTENSION, 1_000_000),
            cpu=False,
            plain="aborted",
            after=MENDED,
        ),
        Case(
            "init-file-missing",
            "BrokenPackageError",
            ("__init__.py", "onnxruntime-gpu"),
            removing("onnxruntime/__init__.py"),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "file-altered",
            "BrokenPackageError",
            ("onnxruntime/__init__.py", "onnxruntime-gpu", "import onnxruntime fails"),
            lambda _lab, overlay: overlay.replace("onnxruntime/__init__.py", b"raise ImportError('no such thing')"),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "cpp-library-too-old",
            "LibraryVersionError",
            ("is too old for it", "CXX", "older/lib/libstdc++.so.6", "LD_LIBRARY_PATH"),
            old_cxx_library,
            rows=("A13",),
            env={"LD_LIBRARY_PATH": "{overlay}/older/lib"},
            cpu=False,
            plain="raised",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "numpy-missing",
            "BrokenPackageError",
            ("numpy, which it needs, is not installed",),
            numpy_gone,
            silent_about=("uninstall", "install onnxruntime"),
            cpu=False,
            plain="raised",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "numpy-damaged",
            "BrokenPackageError",
            ("the installed numpy", "cannot be imported"),
            numpy_damaged,
            silent_about=("uninstall", "install onnxruntime"),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "numpy-for-newer-processors",
            "BrokenPackageError",
            ("is built for newer processors", "X86_V2", "'numpy<2.4'", "Proxmox"),
            numpy_for_newer_processors,
            silent_about=("uninstall", "install onnxruntime", "--force-reinstall"),
            cpu=False,
            plain="raised",
            after=MENDED,
            needs=("host",),
            since=(1, 24),  # Python 3.10, which is left with an older one, has no NumPy 2.4
        ),
        Case(
            "numpy-2-and-a-release-before-it",
            "BrokenPackageError",
            ("1.18.1 is too old for numpy 2", "'numpy<2'"),
            release_before_numpy_2,
            silent_about=("uninstall", "install onnxruntime"),
            cpu=False,
            plain="raised",
            after="LibraryVersionError",  # it is built for CUDA 11
            slow_break=True,
        ),
        Case(
            "package-unreadable",
            "BrokenPackageError",
            ("this user may not read", "onnxruntime_pybind11_state", "chmod -R u+rX"),
            extension_unreadable,
            prelude=AS_A_USER,
            silent_about=("pip install", "rm -rf", "rename"),
            cpu=False,
            plain="raised",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "provider-file-of-another-architecture",
            "BrokenPackageError",
            ("libonnxruntime_providers_cuda.so", "built for aarch64, this is x86_64"),
            provider_of_another_architecture,
            after=MENDED,
        ),
        Case(
            "address-space-limited-at-the-import",
            "BrokenPackageError",
            ("import onnxruntime fails", "failed to map segment", "ulimit -v"),
            prelude="import resource; resource.setrlimit(resource.RLIMIT_AS, (1500 << 20, 1500 << 20))",
            ask="probe",
            silent_about=("pip",),
            cpu=False,
            needs=("host",),
        ),
        Case(
            "extension-of-another-python",
            "BrokenPackageError",
            ("onnxruntime_pybind11_state", "onnxruntime-gpu"),
            extension_of_another_python,
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
    ],
)
