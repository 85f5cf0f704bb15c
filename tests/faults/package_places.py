"""Group A: the package is broken in a folder that is not the environment's own, where no installer changes anything."""

from __future__ import annotations

import shutil
import zipfile

from tests.faults.advice import own
from tests.faults.case import MENDED, Break, Case, in_group, removing
from tests.faults.package_files import CUDA_PROVIDER
from tests.faults.packages import cpu_over_gpu
from tests.lab import Overlay
from tests.lab.fixtures import Lab

#: Beside an environment, outside of its prefix: no installer of it takes it for its own. The blank is for the shell.
OTHER_FOLDER = "environment elsewhere"


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


def cpu_package_of_the_user(lab: Lab, overlay: Overlay) -> None:
    """A virtual environment that shares the packages of its interpreter, and with them those of the user, which come
    first: `pip install --user` brought the CPU package, and the GPU package is the machine's."""
    settings = overlay.root / "pyvenv.cfg"
    shared = settings.read_text(encoding="utf-8").replace("site-packages = false", "site-packages = true")
    settings.write_text(shared, encoding="utf-8")
    in_another_folder()(lab, overlay)
    other = overlay.root.parent / OTHER_FOLDER
    users = other / "user" / overlay.site.relative_to(overlay.root)  # lib/python3.11/site-packages
    with zipfile.ZipFile(lab.wheels.cpu_twin) as archive:
        archive.extractall(users)
    (users / "onnxruntime_elsewhere.pth").write_text(f"{other}\n", encoding="utf-8")


CASES = in_group(
    "A",
    [
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
            ("the GPU build was overwritten", "rm -rf", "--target", OTHER_FOLDER),
            in_another_folder(cpu_over_gpu),
            silent_about=("uninstall -y",),
            env={"PYTHONPATH": f"{{overlay}}/../{OTHER_FOLDER}"},
            plain="warned",
            after=MENDED,
        ),
        Case(
            "conflict-in-packages-that-are-shared",
            "ConflictingPackagesError",
            ("the GPU build was overwritten", "--force-reinstall --no-deps onnxruntime-gpu=="),
            in_another_folder(cpu_over_gpu, behind=True),
            silent_about=("uninstall -y", "rm -rf"),
            plain="warned",
            after=MENDED,
        ),
        Case(
            "cpu-package-of-the-user-before-the-gpu-package",
            "CPUOnlyPackageError",
            ("without CUDA", "user/lib", "shadowed by it: onnxruntime-gpu", "--force-reinstall --no-deps"),
            cpu_package_of_the_user,
            env={"PYTHONUSERBASE": f"{{overlay}}/../{OTHER_FOLDER}/user"},
            silent_about=("off the search path", "uninstall -y"),
            plain="warned",
            after=MENDED,
        ),
    ],
)
