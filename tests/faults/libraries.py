"""Group B: CUDA libraries that are gone, damaged, or not where they are looked for."""

from __future__ import annotations

from pathlib import Path

from tests.faults.case import (
    AARCH64,
    AS_A_USER,
    H200,
    MENDED,
    NEEDED_BY_CONV,
    OWN,
    Break,
    Case,
    in_group,
    library,
    own_path,
    removing,
    truncating,
    unreadable,
    with_gpus,
)
from tests.lab import Cuda, Overlay
from tests.lab.fixtures import Lab
from tests.lab.installed import LINKED, OPENS_CUDNN_AT_NEED, soname


def another_architecture(_lab: Lab, overlay: Overlay) -> None:
    path = own_path(overlay, library("libcurand"))
    content = bytearray((overlay.site / path).read_bytes())
    content[18:20] = AARCH64.to_bytes(2, "little")
    overlay.replace(path, bytes(content))


def library_unreadable(_lab: Lab, overlay: Overlay) -> None:
    unreadable(overlay, library("libcurand"))


def in_the_place_of_curand(name: str, code: str) -> Break:
    """A library that only shows what is wrong with it when it is opened."""

    def breaks(lab: Lab, overlay: Overlay) -> None:
        made = lab.stubs.compile(name, code, "-Wl,-soname,libcurand.so.10")
        overlay.replace(own_path(overlay, library("libcurand")), made)

    return breaks


def system_library_missing(lab: Lab, overlay: Overlay) -> None:
    """What an image without libgcc does to a wheel: the library is whole, and links one that is not there."""
    absent = lab.stubs.library("libofthesystem.so.1", {"of_the_system": 1})
    code = "long of_the_system(void);\nlong uses(void) { return of_the_system(); }\n"
    made = lab.stubs.compile("needs_more", code, "-Wl,-soname,libcurand.so.10", "-Wl,--no-as-needed", str(absent))
    overlay.replace(own_path(overlay, library("libcurand")), made)


def link_to_nothing(_lab: Lab, overlay: Overlay) -> None:
    path = own_path(overlay, library("libcurand"))
    overlay.remove(path)
    (overlay.site / path).symlink_to(Path("/nonexistent") / Path(path).name)


def link_to_itself(_lab: Lab, overlay: Overlay) -> None:
    path = own_path(overlay, library("libcurand"))
    overlay.remove(path)
    (overlay.site / path).symlink_to(Path(path).name)


def store_of_the_installer_is_gone(_lab: Lab, overlay: Overlay) -> None:
    """uv with --link-mode symlink, and its cache emptied: of a library that is needed, and of a wheel beside it with
    files that no search knows."""
    for pattern in (library("libcudart"), "nvidia/*/lib/libnvrtc*"):
        for path in overlay.site.glob(pattern):
            name = path.relative_to(overlay.site).as_posix()
            overlay.remove(name)
            path.symlink_to(Path("/nonexistent") / path.name)


def folder_in_its_place(_lab: Lab, overlay: Overlay) -> None:
    path = own_path(overlay, library("libcurand"))
    overlay.remove(path)
    (overlay.site / path).mkdir()


def nvidia_is_a_package_elsewhere(_lab: Lab, overlay: Overlay) -> None:
    """A regular package `nvidia` that comes first hides the namespace of the wheels from the import system."""
    (overlay.root / "mine" / "nvidia").mkdir(parents=True)
    (overlay.root / "mine" / "nvidia" / "__init__.py").write_text("", encoding="utf-8")


def nvidia_is_a_package_and_a_library_is_gone(lab: Lab, overlay: Overlay) -> None:
    nvidia_is_a_package_elsewhere(lab, overlay)
    overlay.remove(library("libcudart"))


def empty_libraries_first_on_the_loader_path(lab: Lab, overlay: Overlay) -> None:
    folder = overlay.root / "toolkit" / "lib64"
    folder.mkdir(parents=True)
    for name in LINKED:
        (folder / name).write_bytes(b"")


def bundled_without_wheels(_lab: Lab, overlay: Overlay) -> None:
    """What PyInstaller makes without a hook for the NVIDIA wheels: the packages, and no libraries of theirs."""
    overlay.remove("nvidia", "nvidia_*.dist-info")


def missing(*stems: str, says: tuple[str, ...], row: str = OWN, slow_fix: bool = True) -> Case:
    """Linked libraries that are gone, on a machine that has no driver either: both are said, the libraries first."""
    return Case(
        "no-" + "-".join(stems),
        "LibraryNotFoundError",
        (*stems, "pip install", "driver-not-found", *says),
        removing(*map(library, stems)),
        rows=(row,),
        others=("DriverNotFoundError",),
        plain="printed logged",
        after=MENDED,
        slow_fix=slow_fix,
    )


CASES = in_group(
    "B",
    [
        missing("libcublasLt", says=("nvidia-cublas",)),
        missing("libcublas", says=("nvidia-cublas",), row="B05"),
        missing("libcurand", says=("nvidia-curand",)),
        missing("libcudart", says=("nvidia-cuda-runtime",), slow_fix=False),
        missing(
            "libcublasLt",
            "libcurand",
            "libcudart",
            says=("nvidia-cublas", "nvidia-curand", "nvidia-cuda-runtime"),
        ),
        Case(
            "no-cuda-wheels-at-all",
            "LibraryNotFoundError",
            ("libcublas.so", "libcublasLt.so", "libcurand.so", "libcudart.so", "pip install"),
            removing("nvidia", "nvidia_*.dist-info"),
            rows=("B01",),
            cuda=Cuda(init=100),
            plain="printed logged",
            after="NoDeviceError",
        ),
        Case(
            "wheels-that-nobody-loaded",
            MENDED,
            ("libcuda.so.1",),
            rows=("B02", "B03"),
            silent_about=("libcublas", "libcudart"),
            plain_arguments={"providers": ["CUDAExecutionProvider"], "preload": False},
            needs=("driver", "host"),
        ),
        Case(
            "a-session-before-the-wheels-were-loaded",
            MENDED,
            ("libcuda.so.1",),
            rows=("B04",),
            prelude=(
                "import onnxruntime\n"
                "try:\n"
                "    onnxruntime.InferenceSession(b'', providers=['CUDAExecutionProvider'])\n"
                "except Exception:\n"
                "    pass"
            ),
            silent_about=("libcublas", "libcudart"),
            needs=("driver", "host"),
        ),
        Case(
            "loader-path-set-in-the-program",
            MENDED,
            ("libcuda.so.1",),
            rows=("B29",),
            prelude="import os; os.environ['LD_LIBRARY_PATH'] = '/usr/local/cuda/lib64'",
            plain_arguments={"providers": ["CUDAExecutionProvider"], "preload": False},
            needs=("driver", "host"),
        ),
        Case(
            "frozen-program-without-the-wheels",
            "LibraryNotFoundError",
            (soname("libcublas"), "frozen"),
            bundled_without_wheels,
            rows=("B30",),
            prelude="import sys; sys.frozen = True",
            silent_about=("pip install",),
            plain="printed logged",
            needs=("host", ""),
        ),
        Case(
            "no-cudnn-and-a-convolution",
            "LibraryNotFoundError",
            ("libcudnn.so.9", *NEEDED_BY_CONV, "nvidia-cudnn"),
            removing("nvidia/cudnn"),
            model="conv",
            others=("DriverNotFoundError",),
            after=MENDED,
        ),
        Case(
            "part-of-cudnn-missing-and-a-convolution",
            "LibraryNotFoundError",
            ("libcudnn_ops.so.9", "Conv", "nvidia-cudnn"),
            removing("nvidia/cudnn/lib/libcudnn_ops.so.9"),
            model="conv",
            after=MENDED,
        ),
        Case(
            "no-cudnn-and-no-need-of-it",
            "DriverNotFoundError",
            ("libcuda.so.1", "libcudnn.so.9"),
            removing("nvidia/cudnn"),
            since=OPENS_CUDNN_AT_NEED,
            others=("LibraryNotFoundError",),
            advice_of="LibraryNotFoundError",
            after=MENDED,
            needs=("driver", "host"),
        ),
        Case(
            "library-truncated",
            "LibraryNotFoundError",
            ("libcurand.so.10", "truncated", "nvidia-curand"),
            truncating(library("libcurand"), 10_000),
            others=("DriverNotFoundError",),
            plain="aborted",
            after=MENDED,
        ),
        Case(
            "library-empty",
            "LibraryNotFoundError",
            ("libcurand.so.10", "empty", "nvidia-curand"),
            truncating(library("libcurand"), 0),
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "library-is-text",
            "LibraryNotFoundError",
            ("libcurand.so.10", "not an ELF file", "nvidia-curand"),
            lambda _lab, overlay: overlay.replace(
                own_path(overlay, library("libcurand")), b"version https://git-lfs.github.com/spec/v1\n" * 40
            ),
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "library-of-another-architecture",
            "LibraryNotFoundError",
            ("libcurand.so.10", "built for aarch64, this is x86_64", "nvidia-curand"),
            another_architecture,
            plain="printed logged",
            after=MENDED,
        ),
        *(
            Case(
                name,
                "LibraryNotFoundError",
                ("libcurand.so.10", word, "nvidia-curand"),
                breaks,
                plain="printed logged",
                after=MENDED,
            )
            for name, breaks, word in (
                ("library-is-a-link-to-nothing", link_to_nothing, "no such file"),
                ("library-is-a-link-to-itself", link_to_itself, "symbolic links"),
                ("library-is-a-folder", folder_in_its_place, "is a directory"),
            )
        ),
        Case(
            "wheels-are-links-to-nothing",
            "LibraryNotFoundError",
            (soname("libcudart"), "no such file", "-delete && ", "nvidia-cuda-nvrtc"),
            store_of_the_installer_is_gone,
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "nvidia-is-a-package-of-somebody-else",
            MENDED,
            ("libcuda.so.1",),
            nvidia_is_a_package_elsewhere,
            env={"PYTHONPATH": "{overlay}/mine"},
            silent_about=("libcublas", "libcudart"),
            needs=("driver", "host"),
        ),
        Case(
            "nvidia-is-a-package-of-somebody-else-and-a-library-is-gone",
            "LibraryNotFoundError",
            (soname("libcudart"), "nvidia-cuda-runtime"),
            nvidia_is_a_package_and_a_library_is_gone,
            env={"PYTHONPATH": "{overlay}/mine"},
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "empty-libraries-on-the-loader-path",
            MENDED,
            ("libcuda.so.1",),
            empty_libraries_first_on_the_loader_path,
            env={"LD_LIBRARY_PATH": "{overlay}/toolkit/lib64"},
            silent_about=("toolkit/lib64",),
            needs=("driver", "host"),
        ),
        Case(
            "library-unreadable",
            "LibraryNotFoundError",
            ("libcurand.so.10", "this user may not read", "chmod -R u+rX"),
            library_unreadable,
            prelude=AS_A_USER,
            silent_about=("pip install",),
            plain="printed logged",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "library-of-the-system-missing",
            "LibraryNotFoundError",
            ("libcurand.so.10", "system package that has libofthesystem.so.1"),
            system_library_missing,
            silent_about=("rm -f", "--force-reinstall"),
            plain="printed logged",
            needs=("root",),
        ),
        Case(
            "library-that-the-loader-refuses",
            "LibraryNotFoundError",
            ("libcurand.so.10", "undefined symbol", "nvidia-curand"),
            in_the_place_of_curand("refused", "int absent(void);\nint uses(void) { return absent(); }\n"),
            ask="probe",
            cpu=False,
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "library-that-ends-the-process",
            "BrokenPackageError",
            ("loading the CUDA libraries", "differ from those that were installed", "libcurand.so.10", "nvidia-curand"),
            in_the_place_of_curand(
                "ending", "#include <stdlib.h>\n__attribute__((constructor)) static void ends(void) { abort(); }\n"
            ),
            ask="probe",
            silent_about=("uninstall",),
            cpu=False,
            plain="aborted",
            after="DriverUnusableError",  # of the stub
            **with_gpus(H200),
        ),
    ],
)
