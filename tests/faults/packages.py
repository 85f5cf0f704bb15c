"""Group A: what `import onnxruntime` finds."""

from __future__ import annotations

import re
import shutil
import sys

from tests.faults.advice import own
from tests.faults.case import (
    AARCH64,
    AS_A_USER,
    MENDED,
    OWN,
    Break,
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
BRIDGE = "onnxruntime/capi/libonnxruntime_providers_shared.so"
BUILD = "onnxruntime/capi/build_and_package_info.py"
EXTENSION = "onnxruntime/capi/onnxruntime_pybind11_state*.so"

#: Beside an environment, outside of its prefix: no installer of it takes it for its own. The blank is for the shell.
OTHER_FOLDER = "environment elsewhere"

# Older than the package under test, and of the same CUDA: what a dependency with an upper bound brings.
OLDER_CPU_PACKAGE = "1.30.0"


def cpu_over_gpu(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin)


def older_cpu_over_gpu(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.get("onnxruntime", OLDER_CPU_PACKAGE))


def gpu_over_cpu(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin).reinstall("onnxruntime-gpu")


def cpu_only(lab: Lab, overlay: Overlay) -> None:
    overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.cpu_twin)


def cpu_only_of_conda(lab: Lab, overlay: Overlay) -> None:
    cpu_only(lab, overlay)
    overlay.replace(own_path(overlay, "onnxruntime-*.dist-info") + "/INSTALLER", b"conda\n")
    (overlay.root / "conda-meta").mkdir()


def cpu_twin_gone_again(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin).uninstall("onnxruntime")


def gpu_twin_gone_again(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin).uninstall("onnxruntime-gpu")


def other_twin_over_gpu(name: str) -> Break:
    """The CPU build under the name of another package that owns the same folder, which the build says too."""

    def breaks(lab: Lab, overlay: Overlay) -> None:
        overlay.add_wheel(lab.wheels.cpu_twin)
        folder = own_path(overlay, "onnxruntime-*.dist-info")
        renamed = folder.replace("onnxruntime-", f"{name.replace('-', '_')}-")
        overlay.rename(folder, renamed)
        edit(overlay, BUILD, rb"= 'onnxruntime'", f"= '{name}'")
        edit(overlay, f"{renamed}/METADATA", rb"(?m)^Name: onnxruntime$", f"Name: {name}")
        edit(overlay, f"{renamed}/RECORD", re.escape(folder).encode(), renamed)
        edit(overlay, f"{renamed}/RECORD", rb"(?m)^(%s),.*$" % re.escape(BUILD).encode(), r"\1,,")

    return breaks


def another_environment_first(lab: Lab, overlay: Overlay) -> None:
    """`pip install --target` of the CPU package; the case puts that folder into PYTHONPATH."""
    _unpack(lab, overlay, overlay.root / "elsewhere")


def _unpack(lab: Lab, overlay: Overlay, folder: object) -> None:
    import zipfile

    with zipfile.ZipFile(lab.wheels.cpu_twin) as archive:
        archive.extractall(str(folder))


def in_another_folder(*breaks: Break, behind: bool = False) -> Break:
    """ONNX Runtime in a folder that is not the environment's own, and broken there: one that the case puts into
    PYTHONPATH, or ``behind`` the environment's own, as the packages are that it shares with another interpreter."""

    def break_there(lab: Lab, overlay: Overlay) -> None:
        for each in breaks:
            each(lab, overlay)
        other = overlay.root.parent / OTHER_FOLDER
        shutil.rmtree(other, ignore_errors=True)
        other.mkdir()
        for entry in (overlay.site / "onnxruntime", *overlay.site.glob("onnxruntime*.dist-info")):
            own(overlay, entry)  # pip replaces no folder that is a link
            entry.rename(other / entry.name)
        if behind:
            (overlay.site / "onnxruntime_elsewhere.pth").write_text(f"{other}\n", encoding="utf-8")

    return break_there


def source_checkout(lab: Lab, overlay: Overlay) -> None:
    """The Python files of the package without its libraries, as in a clone of the project."""
    for name in (
        "__init__.py",
        "capi/__init__.py",
        "capi/_pybind_state.py",
        "capi/onnxruntime_inference_collection.py",
    ):
        target = overlay.root / "checkout" / "onnxruntime" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((overlay.site / "onnxruntime" / name).read_bytes())


def metadata_gone(_lab: Lab, overlay: Overlay) -> None:
    overlay.remove("onnxruntime_gpu-*.dist-info", "onnxruntime/capi/libonnxruntime_providers_cuda.so")


def numpy_gone(_lab: Lab, overlay: Overlay) -> None:
    overlay.uninstall("numpy")


def numpy_damaged(_lab: Lab, overlay: Overlay) -> None:
    overlay.remove("numpy/_core/_multiarray_umath*.so")


def older_record_left(_lab: Lab, overlay: Overlay) -> None:
    """Two metadata folders of one package: what an upgrade that was killed leaves."""
    folder = own_path(overlay, "onnxruntime_gpu-*.dist-info")
    older = re.sub(r"-[\d.]+\.dist-info", "-1.28.0.dist-info", folder)
    overlay.duplicate(folder, older)
    record = (overlay.site / older / "RECORD").read_bytes()
    overlay.replace(f"{older}/RECORD", record.replace(folder.encode(), older.encode()))
    overlay.replace(f"{older}/METADATA", b"Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.28.0\n")
    overlay.remove(CUDA_PROVIDER)


def release_before_numpy_2(lab: Lab, overlay: Overlay) -> None:
    """Installed with --no-deps: its metadata would have kept NumPy below 2."""
    overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.get("onnxruntime-gpu", "1.18.1"))


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


def copy_without_provider_first(_lab: Lab, overlay: Overlay) -> None:
    """A copy that somebody trimmed, in a folder that PYTHONPATH names: no installer knows of it."""
    trimmed = shutil.ignore_patterns("libonnxruntime_providers_cuda.so", "libonnxruntime_providers_tensorrt.so")
    shutil.copytree(overlay.site / "onnxruntime", overlay.root / "copy" / "onnxruntime", ignore=trimmed)


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
            "not-installed",
            "OnnxRuntimeNotInstalledError",
            ("not installed", "install", "onnxruntime-gpu"),
            lambda _lab, overlay: overlay.uninstall("onnxruntime-gpu"),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "cpu-package-only",
            "CPUOnlyPackageError",
            ("onnxruntime", "without CUDA", "CPUExecutionProvider", "uninstall", "onnxruntime-gpu"),
            cpu_only,
            rows=("A02",),
            details={"package": "onnxruntime"},
            plain="warned",
            after=MENDED,
        ),
        Case(
            "cpu-package-of-conda",
            "CPUOnlyPackageError",
            ("onnxruntime", "without CUDA", "CPUExecutionProvider"),
            cpu_only_of_conda,
            rows=("A16",),
            plain="warned",
            after=MENDED,
        ),
        Case(
            "cpu-package-over-gpu-package",
            "ConflictingPackagesError",
            ("onnxruntime ", "onnxruntime-gpu", "uninstall"),
            cpu_over_gpu,
            rows=("A01",),
            details={"packages": ["onnxruntime", "onnxruntime-gpu"]},
            plain="warned",
            after=MENDED,
        ),
        Case(
            "older-cpu-package-over-gpu-package",
            "ConflictingPackagesError",
            (f"onnxruntime {OLDER_CPU_PACKAGE}", "onnxruntime-gpu", "uninstall"),
            older_cpu_over_gpu,
            rows=("A03",),
            plain="warned",
            after=MENDED,
            slow_break=True,
        ),
        Case(
            "another-build-over-gpu-package",
            "ConflictingPackagesError",
            ("onnxruntime-openvino", "onnxruntime-gpu", "uninstall"),
            other_twin_over_gpu("onnxruntime-openvino"),
            rows=("A18",),
            plain="warned",
            after=MENDED,
        ),
        Case(
            "webgpu-build-over-gpu-package",  # a name with "gpu" in it, and no CUDA
            "ConflictingPackagesError",
            ("onnxruntime-webgpu", "onnxruntime-gpu", "the GPU build lost"),
            other_twin_over_gpu("onnxruntime-webgpu"),
            plain="warned",
            after=MENDED,
        ),
        Case(
            "gpu-package-over-cpu-package",
            "DriverNotFoundError",
            ("libcuda.so.1", "onnxruntime and onnxruntime-gpu"),
            gpu_over_cpu,
            rows=("A01",),
            others=("ConflictingPackagesError",),
            advice_of="ConflictingPackagesError",
            after=MENDED,
            needs=("driver", "host"),
        ),
        Case(
            "cpu-twin-uninstalled-again",
            "BrokenPackageError",
            ("uninstall left behind", "onnxruntime", "onnxruntime-gpu"),
            cpu_twin_gone_again,
            rows=("A04",),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "gpu-twin-uninstalled-again",  # of the same version: nothing is left but the record of the CPU package
            "OnnxRuntimeNotInstalledError",
            ("not installed", "install", "onnxruntime-gpu"),
            gpu_twin_gone_again,
            rows=("A04",),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "provider-file-missing",
            "BrokenPackageError",
            ("libonnxruntime_providers_cuda.so", "onnxruntime-gpu"),
            removing(CUDA_PROVIDER),
            rows=("B23",),
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
            ("CXXABI", "older/lib/libstdc++.so.6", "LD_LIBRARY_PATH"),
            old_cxx_library,
            rows=("A13",),
            env={"LD_LIBRARY_PATH": "{overlay}/older/lib"},
            cpu=False,
            plain="raised",
            after=MENDED,
            slow_fix=False,
        ),
        # Not in the corpus
        Case(
            "cpu-package-first-on-pythonpath",
            "CPUOnlyPackageError",
            ("elsewhere", "without CUDA", "shadowed by it: onnxruntime-gpu", "PYTHONPATH"),
            another_environment_first,
            silent_about=("pip",),
            env={"PYTHONPATH": "{overlay}/elsewhere"},
            plain="warned",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "damaged-in-a-folder-of-pythonpath",
            "BrokenPackageError",
            ("libonnxruntime_providers_cuda.so", "--target", OTHER_FOLDER),
            in_another_folder(removing(CUDA_PROVIDER)),
            env={"PYTHONPATH": f"{{overlay}}/../{OTHER_FOLDER}"},
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "conflict-in-a-folder-of-pythonpath",
            "ConflictingPackagesError",
            ("the GPU build lost", "rm -rf", "--target", OTHER_FOLDER),
            in_another_folder(cpu_over_gpu),
            silent_about=("uninstall -y",),
            env={"PYTHONPATH": f"{{overlay}}/../{OTHER_FOLDER}"},
            plain="warned",
            after=MENDED,
        ),
        Case(
            "conflict-in-packages-that-are-shared",
            "ConflictingPackagesError",
            ("the GPU build lost", "--force-reinstall --no-deps onnxruntime-gpu=="),
            in_another_folder(cpu_over_gpu, behind=True),
            silent_about=("uninstall -y", "rm -rf"),
            plain="warned",
            after=MENDED,
        ),
        Case(
            "module-of-the-users-own",
            "BrokenPackageError",
            ("onnxruntime.py", "instead of the installed package"),
            prelude="open('onnxruntime.py', 'w').write('mine = True')",
            cpu=False,
            plain="raised",
            needs=("",),
        ),
        Case(
            "checkout-in-the-working-directory",
            "BrokenPackageError",
            ("checkout/onnxruntime", "onnxruntime_pybind11_state", "shadowed by it: onnxruntime-gpu"),
            source_checkout,
            silent_about=("pip", "without CUDA"),
            prelude="import os, sys; os.chdir(os.path.join(sys.prefix, 'checkout'))",
            cpu=False,
            plain="raised",
            needs=("",),
        ),
        Case(
            "no-metadata-and-no-provider-file",
            "BrokenPackageError",
            ("CUDA provider library", "not there", "onnxruntime-gpu"),
            metadata_gone,
            after=MENDED,
        ),
        Case(
            "older-metadata-left-behind",
            "ConflictingPackagesError",
            ("onnxruntime-gpu is on record 2 times", "1.28.0", "files missing"),
            older_record_left,
            after=MENDED,
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
            slow_fix=False,
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
            "trimmed-copy-first-on-pythonpath",
            "BrokenPackageError",
            ("the CUDA provider library", "copy/onnxruntime", "PYTHONPATH"),
            copy_without_provider_first,
            env={"PYTHONPATH": "{overlay}/copy"},
            silent_about=("pip",),
            plain="printed logged",
            after=MENDED,
            slow_fix=False,
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

__all__ = ["BRIDGE", "CASES", "CUDA_PROVIDER", "EXTENSION", "OWN"]
