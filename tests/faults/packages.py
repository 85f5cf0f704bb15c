"""Group A: which package `import onnxruntime` finds."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

from tests.faults.case import MENDED, Break, Case, edit, in_group, own_path
from tests.faults.package_files import BUILD, CUDA_PROVIDER
from tests.lab import Overlay
from tests.lab.fixtures import Lab

PLUGINS = (1, 24)  # the first release that those of the package index work with

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


def cpu_only_with_plugin(lab: Lab, overlay: Overlay) -> None:
    """As the pages of such plugins advise: they serve sessions whose options name their devices, and no others."""
    cpu_only(lab, overlay)
    overlay.add_wheel(lab.wheels.get("onnxruntime-ep-webgpu", "0.4.0"))


def cpu_only_of_conda(lab: Lab, overlay: Overlay) -> None:
    cpu_only(lab, overlay)
    overlay.replace(own_path(overlay, "onnxruntime-*.dist-info") + "/INSTALLER", b"conda\n")
    (overlay.root / "conda-meta").mkdir()


def cpu_twin_gone_again(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(lab.wheels.cpu_twin).uninstall("onnxruntime")


def folder_of_that_name(_lab: Lab, overlay: Overlay) -> None:
    """What its owner wants to keep: a clone of the project has no file __init__.py at its top."""
    overlay.uninstall("onnxruntime-gpu")
    (overlay.root / "project" / "onnxruntime" / "cmake").mkdir(parents=True)


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


def cpu_over_gpu_without_record(lab: Lab, overlay: Overlay) -> None:
    """As images have it that were trimmed, and packages of some distributions: no installer can remove that."""
    cpu_over_gpu(lab, overlay)
    overlay.remove("onnxruntime-*.dist-info/RECORD")


def another_environment_first(lab: Lab, overlay: Overlay) -> None:
    """`pip install --target` of the CPU package; the case puts that folder into PYTHONPATH."""
    _unpack(lab, overlay, overlay.root / "elsewhere")


def _unpack(lab: Lab, overlay: Overlay, folder: object) -> None:
    with zipfile.ZipFile(lab.wheels.cpu_twin) as archive:
        archive.extractall(str(folder))


def store_of_the_installer_is_gone(_lab: Lab, overlay: Overlay) -> None:
    """An environment that uv filled with --link-mode symlink, copied into an image without uv's cache."""
    files = [path for path in (overlay.site / "onnxruntime").rglob("*") if not path.is_dir()]
    for path in files:
        overlay.remove(path.relative_to(overlay.site).as_posix())
        path.symlink_to(Path("/nonexistent") / path.name)


def package_in_an_archive(_lab: Lab, overlay: Overlay) -> None:
    """What python -m zipapp makes of a folder that everything was installed into."""
    with zipfile.ZipFile(overlay.root / "app.pyz", "w") as made:
        for folder in ("onnxruntime", "onnxruntime/capi"):
            for path in (overlay.site / folder).glob("*.py"):
                made.write(path, path.relative_to(overlay.site))


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


def older_record_left(_lab: Lab, overlay: Overlay) -> None:
    """Two metadata folders of one package: what an upgrade that was killed leaves."""
    folder = own_path(overlay, "onnxruntime_gpu-*.dist-info")
    older = re.sub(r"-[\d.]+\.dist-info", "-1.28.0.dist-info", folder)
    overlay.duplicate(folder, older)
    record = (overlay.site / older / "RECORD").read_bytes()
    overlay.replace(f"{older}/RECORD", record.replace(folder.encode(), older.encode()))
    overlay.replace(f"{older}/METADATA", b"Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.28.0\n")
    overlay.remove(CUDA_PROVIDER)


def copy_without_provider_first(_lab: Lab, overlay: Overlay) -> None:
    """A copy that somebody trimmed, in a folder that PYTHONPATH names: no installer knows of it."""
    trimmed = shutil.ignore_patterns("libonnxruntime_providers_cuda.so", "libonnxruntime_providers_tensorrt.so")
    shutil.copytree(overlay.site / "onnxruntime", overlay.root / "copy" / "onnxruntime", ignore=trimmed)


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
            "folder-of-that-name-in-the-working-directory",  # of models, or a clone of the project
            "OnnxRuntimeNotInstalledError",
            ("not installed", "work/onnxruntime", "no file __init__.py", "install", "onnxruntime-gpu"),
            lambda _lab, overlay: overlay.uninstall("onnxruntime-gpu"),
            prelude="import os; os.makedirs('onnxruntime/models')",
            silent_about=("rm -rf", "off the search path", "--force-reinstall"),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "folder-of-that-name-on-pythonpath",
            "OnnxRuntimeNotInstalledError",
            ("not installed", "project/onnxruntime", "no file __init__.py", "install", "onnxruntime-gpu"),
            folder_of_that_name,
            env={"PYTHONPATH": "{overlay}/project"},
            silent_about=("rm -rf", "unset PYTHONPATH", "--force-reinstall"),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "cpu-package-only",
            "CPUOnlyPackageError",
            (
                *("onnxruntime", "without CUDA", "CPUExecutionProvider", "uninstall", "onnxruntime-gpu"),
                "CUDA as a plugin for ONNX Runtime",
            ),
            cpu_only,
            rows=("A02",),
            details={"package": "onnxruntime"},
            plain="warned",
            after=MENDED,
            needs=("",),
            plain_since=(1, 31),
        ),
        Case(
            "cpu-package-and-a-plugin",
            "CPUOnlyPackageError",
            ("built without CUDA", "onnxruntime-ep-webgpu 0.4.0 brings another provider", "onnxruntime-gpu"),
            cpu_only_with_plugin,
            plain="warned",
            after=MENDED,
            needs=("",),
            since=PLUGINS,
        ),
        Case(
            "cpu-package-of-conda",
            "CPUOnlyPackageError",
            ("onnxruntime", "without CUDA", "CPUExecutionProvider"),
            cpu_only_of_conda,
            rows=("A16",),
            plain="warned",
            after=MENDED,
            needs=("",),
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
            since=(1, 31),
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
            "cpu-package-without-record-over-gpu-package",
            "ConflictingPackagesError",
            ("onnxruntime ", "onnxruntime-gpu", "rm -rf"),
            cpu_over_gpu_without_record,
            silent_about=("uninstall -y",),
            plain="warned",
            after=MENDED,
        ),
        Case(
            "webgpu-build-over-gpu-package",  # a name with "gpu" in it, and no CUDA
            "ConflictingPackagesError",
            ("onnxruntime-webgpu", "onnxruntime-gpu", "the GPU build was overwritten"),
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
            ("an uninstall left it behind", "onnxruntime", "onnxruntime-gpu"),
            cpu_twin_gone_again,
            rows=("A04",),
            cpu=False,
            plain="raised",
            after=MENDED,
        ),
        Case(
            "package-is-links-to-nothing",
            "BrokenPackageError",
            ("its links are broken", "onnxruntime-gpu"),
            store_of_the_installer_is_gone,
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
            "module-of-the-users-own",
            "BrokenPackageError",
            ("onnxruntime.py", "instead of the installed package"),
            prelude="open('onnxruntime.py', 'w').write('mine = True')",
            cpu=False,
            plain="raised",
            needs=("",),
        ),
        Case(
            "package-in-an-archive",
            "BrokenPackageError",
            ("app.pyz/onnxruntime", "from a zip archive", "shiv"),
            package_in_an_archive,
            prelude="import os, sys; sys.path.insert(0, os.path.join(sys.prefix, 'app.pyz'))",
            silent_about=("-m pip",),
            cpu=False,
            plain="raised",
            needs=("",),
        ),
        Case(
            "archive-first-on-pythonpath",
            "BrokenPackageError",
            ("app.pyz/onnxruntime", "unset PYTHONPATH"),
            package_in_an_archive,
            env={"PYTHONPATH": "{overlay}/app.pyz"},
            silent_about=("-m pip",),
            cpu=False,
            plain="raised",
            after=MENDED,
            slow_fix=False,
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
            ("CUDA provider library", "is missing", "onnxruntime-gpu"),
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
    ],
)
