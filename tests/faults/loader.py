"""Groups A and B, continued: what the loader has in the process already, has no room for, or does not find."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.faults.case import H200, MENDED, Break, Case, in_group, library, own_path, with_gpus
from tests.faults.package_files import BRIDGE
from tests.faults.packages import OLDER_CPU_PACKAGE
from tests.lab import Overlay
from tests.lab.fixtures import Lab
from tests.lab.installed import soname
from tests.lab.stubs import SOURCES

CUBLAS_LT = soname("libcublasLt")
IN_SITE = "import ctypes, sysconfig; site = sysconfig.get_path('purelib')\n"


def without_system_library(name: str) -> Break:
    """What a slim image leaves out: the loader finds nothing of that name."""

    def breaks(lab: Lab, overlay: Overlay) -> None:
        code = (SOURCES / "hide_system_libraries.c").read_text(encoding="utf-8")
        code = code.replace('"libcuda.so",', f'"libcuda.so", "{name}",', 1)
        made = lab.stubs.compile(f"without_{name}", code, "-nostdlib", "-ffreestanding")
        (overlay.root / "hiding.so").write_bytes(made.read_bytes())

    return breaks


def without_shell_and_identity(lab: Lab, overlay: Overlay) -> None:
    """A distroless image: no /etc/machine-id, and no shell that popen(3) could start; with the release that minds."""
    overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.get("onnxruntime-gpu", "1.29.0"))
    code = (SOURCES / "hide_system_files.c").read_text(encoding="utf-8")
    code = code.replace('"/etc/ld.so.cache",', '"/etc/ld.so.cache", "/etc/machine-id", "/var/lib/dbus/machine-id",', 1)
    code += "FILE *popen(const char *command, const char *mode) { return (void)command, (void)mode, NULL; }\n"
    made = lab.stubs.compile("without_a_shell", code)
    (overlay.root / "hiding.so").write_bytes(made.read_bytes())


def cudnn_elsewhere(_lab: Lab, overlay: Overlay) -> None:
    overlay.rename("nvidia/cudnn/lib", "elsewhere/cudnn")


def cublas_elsewhere(_lab: Lab, overlay: Overlay) -> None:
    for stem in ("libcublas", "libcublasLt"):
        path = own_path(overlay, library(stem))
        overlay.rename(path, f"elsewhere/cublas/{path.rpartition('/')[2]}")


def part_of_another_toolkit(lab: Lab, overlay: Overlay) -> None:
    """A libcublasLt of another release, without the libcublas that goes with it."""
    (overlay.root / "other").mkdir()
    made = lab.stubs.library(CUBLAS_LT)
    (overlay.root / "other" / CUBLAS_LT).write_bytes(made.read_bytes())


def killed_while_loading(lab: Lab, overlay: Overlay) -> None:
    """As the kernel does to a process for which there is no memory left."""
    code = (
        "#include <signal.h>\n#include <unistd.h>\n"
        "__attribute__((constructor)) static void end(void) { kill(getpid(), SIGKILL); pause(); }\n"
    )
    made = lab.stubs.compile("killed_by_the_system", code, "-Wl,-soname,libcurand.so.10")
    overlay.replace(own_path(overlay, library("libcurand")), made)


def bridge_of_another_runtime(lab: Lab, overlay: Overlay) -> None:
    """The library between ONNX Runtime and its providers, of another release."""
    (overlay.root / "other").mkdir()
    with zipfile.ZipFile(lab.wheels.get("onnxruntime", OLDER_CPU_PACKAGE)) as wheel:
        (overlay.root / "other" / Path(BRIDGE).name).write_bytes(wheel.read(BRIDGE))


CASES = [
    *in_group(
        "A",
        [
            Case(
                f"{name.partition('.')[0]}-is-not-on-the-system",
                "LibraryNotFoundError",
                (name, "import onnxruntime fails", package),
                without_system_library(name),
                env={"LD_AUDIT": "{overlay}/hiding.so"},
                silent_about=("pip",),
                details={"missing": [name]},
                cpu=False,
                plain="raised",
                needs=("root",),
            )
            for name, package in (("libstdc++.so.6", "libstdc++6"), ("libgcc_s.so.1", "libgcc-s1"))
        ]
        + [
            Case(
                "neither-shell-nor-identity",
                "BrokenPackageError",
                ("import onnxruntime ended the process (SIGSEGV)", "'onnxruntime-gpu>=1.28,!=1.29.0'"),
                without_shell_and_identity,
                rows=("A15",),
                env={"LD_PRELOAD": "{overlay}/hiding.so"},
                ask="probe",
                cpu=False,
                plain="aborted",
                after="DriverUnusableError",  # of the stub
                slow_break=True,
                since=(1, 28),  # the libraries of the environment are for CUDA 13 then, as those of 1.29.0 are
                **with_gpus(H200),
            ),
        ],
    ),
    *in_group(
        "B",
        [
            Case(
                "cudnn-loaded-from-elsewhere",
                MENDED,
                ("libcuda.so.1",),
                cudnn_elsewhere,
                prelude=IN_SITE + "ctypes.CDLL(site + '/elsewhere/cudnn/libcudnn.so.9')",
                model="conv",
                silent_about=("libcudnn",),
                needs=("driver", "host"),
            ),
            Case(
                "part-of-cublas-loaded-from-elsewhere",
                MENDED,
                ("libcuda.so.1",),
                cublas_elsewhere,
                prelude=IN_SITE + f"ctypes.CDLL(site + '/elsewhere/cublas/{CUBLAS_LT}')",
                silent_about=("libcublas",),
                plain="printed logged",
                needs=("driver", "host"),
            ),
            Case(
                "part-of-another-cublas-in-ld-preload",
                "LibraryConflictError",
                (soname("libcublas"), "in this process: ", f"other/{CUBLAS_LT}", "unset LD_PRELOAD"),
                part_of_another_toolkit,
                env={"LD_PRELOAD": f"{{overlay}}/other/{CUBLAS_LT}"},
                silent_about=("pip install",),
                plain="printed logged",
                after=MENDED,
                slow_fix=False,
            ),
            Case(
                "another-onnxruntime-in-ld-preload",
                "RuntimeConflictError",
                ("another ONNX Runtime", f"other/{Path(BRIDGE).name}, not from", "unset LD_PRELOAD"),
                bridge_of_another_runtime,
                env={"LD_PRELOAD": f"{{overlay}}/other/{Path(BRIDGE).name}"},
                silent_about=("pip install", "broken-package"),
                plain="aborted",
                after="DriverUnusableError",  # of the stub
                slow_fix=False,
                **with_gpus(H200),
            ),
            Case(
                "killed-by-the-system-while-loading",
                "ProviderFallbackError",
                ("loading the CUDA libraries", "SIGKILL", "memory of this machine", "docker run --memory"),
                killed_while_loading,
                ask="probe",
                silent_about=("To fix it:\n    /",),
                cpu=False,
                plain="aborted",
                needs=("host",),
                **with_gpus(H200),
            ),
        ],
    ),
]
