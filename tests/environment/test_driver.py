"""The driver, read from texts, prepared trees, and a libcuda that answers what a test tells it to."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.environment.gpu.driver import (
    parse_cuda_number,
    parse_kernel_version,
    parse_library_version,
)
from tests.support.driver_child import build, child, needs_stubs

# Texts


@pytest.mark.parametrize(
    ("text", "version"),
    [
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
            "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n",
            "535.104.05",
            id="proprietary",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)"
            "\nGCC version:  gcc version 13.3.0\n",
            "580.65.06",
            id="open",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  (buildbrain@mobile)",
            "540.4.0",
            id="jetson",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed Oct 12\n", "390.157", id="two-parts"
        ),
        pytest.param("NVRM version: NVIDIA UNIX x86_64 Kernel Module\nGCC version:  gcc 11.4.0\n", None, id="absent"),
        pytest.param("", None, id="empty"),
    ],
)
def test_parse_kernel_version(text: str, version: str | None) -> None:
    assert parse_kernel_version(text) == version


@pytest.mark.parametrize(
    ("number", "version"),
    [(13000, (13, 0)), (12080, (12, 8)), (11040, (11, 4)), (0, None), (-1, None), (None, None), ("13000", None)],
)
def test_parse_cuda_number(number: object, version: tuple[int, int] | None) -> None:
    assert parse_cuda_number(number) == version


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06", "580.65.06"),
        ("/usr/lib/libcuda.so.590.44", "590.44"),
        ("/usr/lib/wsl/lib/libcuda.so.1.1", None),
        ("/usr/lib/libcuda.so.1", None),
        ("libcuda.so.1", None),
        ("", None),
    ],
)
def test_parse_library_version(path: str, version: str | None) -> None:
    assert parse_library_version(path) == version


@given(st.text(max_size=200))
def test_any_text_is_parsed(text: str) -> None:
    parse_kernel_version(text)
    parse_kernel_version("NVRM version:" + text)


# Files


def test_files_below_a_root(tmp_path: Path) -> None:
    version = tmp_path / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "dxg", "nvmap", "null", "nvme0"):
        (tmp_path / "dev" / name).touch()
    found = child(f"show(driver.read_driver(Path({str(tmp_path)!r})))")
    assert found["kernel_version"] == "550.54.14"
    assert found["device_nodes"] == ["/dev/dxg", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap"]
    found = child(f"show(driver.read_driver(Path({str(tmp_path / 'absent')!r})))")
    assert (found["kernel_version"], found["device_nodes"]) == (None, [])
    found = child("show(driver.read_driver(None))")
    assert (found["kernel_version"], found["device_nodes"], found["libcuda_unlinked"]) == (None, [], [])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="folders of Linux")
def test_a_driver_where_the_loader_does_not_look(tmp_path: Path) -> None:
    """Only where there is none that it finds: here one that cannot be loaded comes first."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    folder = tmp_path / "usr/local/nvidia/lib64"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").touch()
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").mkdir(parents=True)
    found = child(f"show(driver.read_driver(Path({str(tmp_path)!r})))", library=tmp_path)
    assert found["libcuda_elsewhere"] == ["/usr/local/nvidia/lib64/libcuda.so.1"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="folders of Linux")
def test_a_driver_without_its_link(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("usr/lib64", "usr/lib", "usr/lib/x86_64-linux-gnu", "other")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "libcuda.so.580.65.06").write_text("a library")
    (folders["usr/lib64"] / "libcuda.so.1").write_text("not a library, and no link to one")
    (folders["usr/lib"] / "libcuda.so.580.65.06").write_text("")
    (folders["usr/lib"] / "libcuda.so.1.1").write_text("of WSL")
    (folders["other"] / "libcuda.so.1").symlink_to("libcuda.so.550.54.14")
    shown = "show([[file.path, file.writable] for file in driver.read_driver(Path({!r})).libcuda_unlinked])"
    found = child(shown.format(str(tmp_path)), library=folders["other"])
    whole = [folders[name] / "libcuda.so.580.65.06" for name in ("other", "usr/lib/x86_64-linux-gnu")]
    assert found == [[str(path), True] for path in whole]


NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter. Each start of pytest takes that right from the folders of its own making."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_files_that_this_process_may_not_open(open_folder: Path) -> None:
    (open_folder / "dev").mkdir()
    for name, mode in {"nvidia0": 0o600, "nvidia1": 0o000, "nvidiactl": 0o000, "nvidia-uvm": 0o666}.items():
        (open_folder / "dev" / name).touch()
        (open_folder / "dev" / name).chmod(mode)
    code = f"found = driver.read_driver(Path({str(open_folder)!r}))"
    if os.getuid() == 0:  # whom no mode stops
        os.chown(open_folder / "dev" / "nvidia0", NOBODY, NOBODY)
        # Modules first: their files may be the user's alone.
        code = f"import grp, os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); {code}"
    refused = child(f"{code}\nshow([dataclasses.asdict(node) for node in found.refused_nodes])")
    group = (open_folder / "dev" / "nvidia1").group()
    assert refused == [
        {"path": "/dev/nvidia1", "error": "EACCES", "group": group, "by_mode": True},
        {"path": "/dev/nvidiactl", "error": "EACCES", "group": group, "by_mode": True},
    ]


# landlock(7): from here on this process opens no file, whatever its mode; SELinux refuses in the same way.
_NO_FILE = """
import ctypes
libc, handled = ctypes.CDLL(None), ctypes.c_uint64(0b110)  # LANDLOCK_ACCESS_FS_WRITE_FILE, _READ_FILE
ruleset = libc.syscall(444, ctypes.byref(handled), 8, 0)  # landlock_create_ruleset
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
refused = ruleset >= 0 and libc.syscall(446, ruleset, 0) == 0  # landlock_restrict_self
"""


def test_files_that_no_mode_keeps_from_this_process(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    (tmp_path / "dev" / "nvidiactl").chmod(0o666)
    nodes = (
        f"[[node.path, node.error, node.by_mode] for node in driver.read_driver(Path({str(tmp_path)!r})).refused_nodes]"
    )
    found = child(f"import pynvml\n{_NO_FILE}\nshow({nodes} if refused else None)")
    if found is None:
        pytest.skip("this kernel, or its sandbox, has no Landlock")
    assert found == [["/dev/nvidiactl", "EACCES", False]]


# libcuda

CUDA_SOURCE = """
#include <stdlib.h>
int cuInit(unsigned flags) { abort(); }
int cuDriverGetVersion(int *version) { *version = VERSION; return STATUS; }
"""


@needs_stubs
@pytest.mark.parametrize(
    ("version", "status", "expected"),
    [
        pytest.param(13000, 0, [13, 0], id="13.0"),
        pytest.param(12080, 0, [12, 8], id="12.8"),
        pytest.param(13000, 34, None, id="stub-of-the-toolkit"),
        pytest.param(0, 0, None, id="no-driver-behind-it"),
    ],
)
def test_libcuda_is_asked_and_not_initialised(
    tmp_path: Path, version: int, status: int, expected: list[int] | None
) -> None:
    source = CUDA_SOURCE.replace("VERSION", str(version)).replace("STATUS", str(status))
    library = build(tmp_path, "libcuda.so.1", source)
    found = child("show(driver.read_driver())", library=tmp_path)
    assert (found["libcuda"], found["libcuda_error"]) == (os.path.realpath(library), None)
    assert found["cuda_version"] == expected


@needs_stubs
def test_the_driver_that_a_libcuda_belongs_to_and_how_it_was_found(tmp_path: Path) -> None:
    """The path is that of the file behind all links; what can be taken out of LD_LIBRARY_PATH is what is in there."""
    (tmp_path / "cuda-12.4").mkdir()
    (tmp_path / "cuda").symlink_to("cuda-12.4")
    build(
        tmp_path / "cuda-12.4", "libcuda.so.550.54.14", CUDA_SOURCE.replace("VERSION", "12040").replace("STATUS", "0")
    )
    (tmp_path / "cuda-12.4" / "libcuda.so.1").symlink_to("libcuda.so.550.54.14")
    code = "found = driver.read_driver(); show([found.libcuda, found.libcuda_version, found.libcuda_entry])"
    real = os.path.realpath(tmp_path / "cuda-12.4" / "libcuda.so.550.54.14")
    assert child(code, library=tmp_path / "cuda") == [real, "550.54.14", str(tmp_path / "cuda")]
    linked = str(tmp_path / "cuda" / "libcuda.so.1")
    for preloaded in (f"/nonexistent.so:{linked}", f"/nonexistent.so {linked}", linked):
        code = "show(driver.read_driver().libcuda_preload)"
        assert child(code, library=tmp_path / "cuda", environ={"LD_PRELOAD": preloaded}) == linked


@needs_stubs
def test_what_was_loaded_before_the_program_in_the_drivers_place(tmp_path: Path) -> None:
    """By LD_PRELOAD or by the system's file; neither what has no such function, nor what only calls one."""
    (tmp_path / "etc").mkdir()
    sources = {
        "libvgpu.so": "void *dlsym(void *handle, const char *name) { return 0; }",
        "libsharing.so": "int cuInit(unsigned flags) { return 0; }",
        "libcalling.so": "int cuInit(unsigned); void *dlsym(void *, void *); int f() { return cuInit(!dlsym(0, 0)); }",
        "libcuda.so.1": "int cuInit(unsigned flags) { return 0; }",
    }
    built = {name: str(build(tmp_path, name, source)) for name, source in sources.items()}
    text = f"/nonexistent.so relative.so\n{built['libcalling.so']}:{built['libvgpu.so']}\n"
    (tmp_path / "etc" / "ld.so.preload").write_text(text)
    code = f"show(driver.find_interposed(Path({str(tmp_path)!r})))"
    assert child(code) == [built["libvgpu.so"]]
    (tmp_path / "etc" / "ld.so.preload").unlink()
    preloaded = f"{built['libsharing.so']} {built['libcuda.so.1']}:{__file__}"
    assert child(code, environ={"LD_PRELOAD": preloaded}) == [built["libsharing.so"]]


@needs_stubs
def test_libcuda_without_the_function(tmp_path: Path) -> None:
    library = build(tmp_path, "libcuda.so.1", "int something_else;")
    found = child("show(driver.read_driver())", library=tmp_path)
    assert (found["libcuda"], found["libcuda_error"], found["cuda_version"]) == (os.path.realpath(library), None, None)


@needs_stubs
def test_libcuda_is_told_from_another_of_its_name(tmp_path: Path) -> None:
    """As on WSL, where the library that the loader gives opens a second one from the driver store."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "store").mkdir()
    library = build(tmp_path / "lib", "libcuda.so.1", CUDA_SOURCE.replace("VERSION", "13000").replace("STATUS", "0"))
    other = build(tmp_path / "store", "libcuda.so.1.1", "int something_else;")
    for first, second in ((library, other), (other, library)):
        code = f"import ctypes; ctypes.CDLL({str(first)!r}); ctypes.CDLL({str(second)!r}); show(driver.read_driver())"
        assert child(code, library=library.parent)["libcuda"] == os.path.realpath(library)


INTERPOSED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
static int own(int *version) { *version = 12040; return 0; }
void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *) = 0;
    const char *versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (int i = 0; i < 3 && !real; i++) real = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    return strcmp(name, "cuDriverGetVersion") ? real(handle, name) : (void *)own;
}
"""


@needs_stubs
def test_libcuda_is_told_from_what_answers_in_its_place(tmp_path: Path) -> None:
    """HAMi's library is loaded first and has a dlsym of its own: its functions are asked, and libcuda is libcuda."""
    library = build(tmp_path, "libcuda.so.1", CUDA_SOURCE.replace("VERSION", "13000").replace("STATUS", "0"))
    preloaded = build(tmp_path, "libvgpu.so", INTERPOSED)
    found = child("show(driver.read_driver())", library=tmp_path, environ={"LD_PRELOAD": str(preloaded)})
    assert (found["libcuda"], found["cuda_version"]) == (os.path.realpath(library), [12, 4])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loader's words are those of Linux")
def test_libcuda_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    found = child("show(driver.read_driver())", library=tmp_path)
    assert (found["libcuda"], found["cuda_version"]) == (None, None)
    assert "libcuda.so.1" in found["libcuda_error"]


# As PyInstaller 6 does it in the programs that it makes (pyimod03_ctypes.py).
FROZEN = """
import ctypes

class Guessing(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        try:
            super().__init__(name, *args, **kwargs)
        except Exception as error:
            raise OSError(f"Failed to load dynlib/dll {name!r}. Most likely it was not found at freezing") from error

ctypes.CDLL = Guessing
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loader's words are those of Linux")
def test_the_loaders_own_words_in_a_frozen_program(tmp_path: Path) -> None:
    """The driver is never bundled, and what judges the words looks for the loader's."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    plain = child("show(driver.read_driver())", library=tmp_path)["libcuda_error"]
    assert child(FROZEN + "show(driver.read_driver())", library=tmp_path)["libcuda_error"] == plain


def test_nothing_heavy_is_imported() -> None:
    code = """
driver.read_driver()
show(sorted({"onnxruntime", "torch", "onnx", "numpy", "rich"} & set(sys.modules)))
"""
    assert child(code) == []
