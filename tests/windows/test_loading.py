"""Loading inside Python for Windows, under Wine: what our code asks of Windows' loader, and what comes of it.

Libraries of CUDA are made ones but where a test is slow. A session over them gets as far as a driver can be a stub: the
provider is loaded, and its CUDA refuses to work (CUDA_ERROR_NOT_SUPPORTED).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.windows import CUDNN, SYSTEM32, TOOLKIT, TORCH, Windows
from tests.support.made_dlls import ARM64, I386, dll
from tests.windows.inside import (
    CAPI,
    CUDA_OF_WHEELS,
    CUDNN_OF_WHEELS,
    MODEL,
    REQUIRED,
    ask,
    folders_of,
    reaches_the_driver,
)

# What Windows is made of is downloaded in the setup of the first test.
pytestmark = [pytest.mark.windows, pytest.mark.timeout(1200)]

# The loader

LONG = "\\".join(["a-long-name" * 9] * 3)  # of a folder: more than 260 letters
STRANGE = "mit Leerzeichen & ä 漢"


@pytest.fixture(scope="module")
def answers(module_windows: Windows) -> Any:
    """What the loader says of many files, in one process."""
    made = module_windows
    made.search("on path")
    made.make("a\\whole.dll", exports={"five": 5})
    made.make("a\\refuses.dll", fails=True)
    made.make("a\\over refuses.dll", needs={"refuses.dll": ["five"]})
    made.make("a\\arm.dll", machine=ARM64)
    made.write("a\\text.dll", b"no DLL")
    made.write("a\\empty.dll")
    made.make("a\\user.dll", needs={"nowhere.dll": ["five"]})
    made.make("a\\behind.dll", needs={"user.dll": ["five"]})
    made.make("a\\lacks.dll", needs={"whole.dll": ["six"]})
    made.write("a\\of 32 bits.dll", dll("of 32 bits.dll", machine=I386))
    mode = {"KERNEL32.dll": ["GetThreadErrorMode"]}
    made.make("a\\mode.dll", on_load="answer = GetThreadErrorMode();", needs=mode)
    folders = {"system": SYSTEM32, "python": "Python", "windows": "windows", "path": "on path", "added": "added"}
    for name, folder in folders.items():
        made.make(f"{folder}\\in {name}.dll", exports={"five": 5})
        made.make(f"a\\wants {name}.dll", needs={f"in {name}.dll": ["five"]})
    for folder in (STRANGE, LONG, "beside"):
        made.make(f"{folder}\\one {folder[:4]}.dll", exports={"five": 5})
        made.make(f"{folder}\\two {folder[:4]}.dll", needs={f"one {folder[:4]}.dll": ["five"]})
    for folder in ("first", "second"):
        made.make(f"{folder}\\twice.dll", exports={"five": 5})
    made.make("a\\of twice.dll", needs={"twice.dll": ["five"]})
    paths = [
        *(f"C:\\a\\{name}.dll" for name in ("whole", "refuses", "over refuses", "arm", "text", "empty", "absent")),
        *(f"C:\\a\\{name}.dll" for name in ("user", "behind", "mode", *(f"wants {name}" for name in folders))),
        *(f"C:\\{folder}\\two {folder[:4]}.dll" for folder in (STRANGE, LONG)),
        *("C:/beside/two besi.dll", "C:\\first\\twice.dll", "C:\\second\\twice.dll", "C:\\a\\of twice.dll"),
        *("C:\\a\\lacks.dll", "C:\\a\\of 32 bits.dll"),
        *("nvcuda.dll", "in python.dll", "one besi.dll", "c:\\A\\WHOLE.dll"),
    ]
    return ask(made, "loader", *paths, first="import os; os.add_dll_directory('C:\\\\added')")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("refuses", "its initialisation failed (error 1114)"),
        ("over refuses", "its initialisation failed (error 1114)"),
        ("arm", "damaged, or built for another kind of processor than this Python (error 193)"),
        ("text", "not a DLL (error 193)"),
        ("empty", "empty file (error 193)"),
        ("absent", "no such file (error 126)"),
        ("user", "nowhere.dll, which it links, was not found (error 126)"),
        ("behind", "nowhere.dll, which it links, was not found (error 126)"),
    ],
)
def test_the_loader_refuses(name: str, words: str, answers: Any) -> None:
    assert answers["words"][f"C:\\a\\{name}.dll"] == words


@pytest.mark.parametrize("name", ["system", "python", "windows", "path", "added"])
def test_linked_libraries_are_found_where_onnxruntime_finds_them(name: str, answers: Any) -> None:
    assert answers["words"][f"C:\\a\\wants {name}.dll"] is None
    assert any(path.endswith(f"\\in {name}.dll") for path in answers["loaded"])


def test_the_folders_that_are_searched(answers: Any) -> None:
    """Those of which nothing is known, ``added`` here, are missing."""
    without_path, along_path = answers["folders"]
    assert {"C:\\Python", "C:\\windows\\System32"} <= {*without_path} < {*along_path}
    assert {"C:\\windows", "C:\\on path"} <= {*along_path}.difference(without_path)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [STRANGE, LONG, "beside"], ids=["strange", "long", "slashes of Python"])
def test_paths_of_any_kind(folder: str, answers: Any) -> None:
    written = f"C:/{folder}/two {folder[:4]}.dll" if folder == "beside" else f"C:\\{folder}\\two {folder[:4]}.dll"
    assert answers["words"][written] is None
    for name in ("one", "two"):
        assert f"C:\\{folder}\\{name} {folder[:4]}.dll" in answers["loaded"]


def test_names_without_a_path(answers: Any) -> None:
    words = answers["words"]
    assert words["nvcuda.dll"] == "nvcuda.dll was not found (error 126)"
    assert words["in python.dll"] is None
    assert words["one besi.dll"] is None


def test_the_first_of_a_name_serves(answers: Any) -> None:
    assert answers["words"]["C:\\second\\twice.dll"] is answers["words"]["C:\\a\\of twice.dll"] is None
    twice = [path for path in answers["loaded"] if path.endswith("\\twice.dll")]
    assert twice == ["C:\\first\\twice.dll", "C:\\second\\twice.dll"]


def test_letters_of_a_path_do_not_differ_by_their_case(answers: Any) -> None:
    assert answers["words"]["c:\\A\\WHOLE.dll"] is None
    assert [path for path in answers["loaded"] if path.lower().endswith("\\whole.dll")] == ["C:\\a\\whole.dll"]


def test_no_box_waits_for_a_click_while_a_library_is_loaded(answers: Any) -> None:
    on_load, absent = answers["asked"]["C:\\a\\mode.dll"]
    assert (on_load, absent) == (1, None)


def test_wine_takes_what_windows_refuses(answers: Any) -> None:
    """With errors 127 and 193: as long as it does, these have tests without Wine (tests/lab/README.md)."""
    assert [answers["words"][f"C:\\a\\{name}.dll"] for name in ("lacks", "of 32 bits")] == [None, None]


# The places


def in_wheels(machine: Windows) -> None:
    machine.install_cuda()


def in_torch(machine: Windows) -> None:
    machine.install_cuda()
    machine.install_torch()


def in_the_toolkit(machine: Windows) -> None:
    machine.place_cuda(TOOLKIT)


def along_path(machine: Windows) -> None:
    machine.place_cuda("Program Files\\CUDA, in pieces")
    machine.search("Program Files\\CUDA, in pieces")


def in_system32(machine: Windows) -> None:
    machine.place_cuda(SYSTEM32)


def added_by_the_program(machine: Windows) -> None:
    machine.place_cuda("added")


@pytest.mark.parametrize(
    ("place", "folders"),
    [
        (in_wheels, {CUDA_OF_WHEELS}),
        pytest.param(in_torch, {f"C:\\{TORCH}"}, marks=pytest.mark.slow),
        pytest.param(in_the_toolkit, {f"C:\\{TOOLKIT}"}, marks=pytest.mark.slow),
        pytest.param(along_path, {"C:\\Program Files\\CUDA, in pieces"}, marks=pytest.mark.slow),
        pytest.param(in_system32, {"C:\\windows\\System32"}, marks=pytest.mark.slow),
        pytest.param(added_by_the_program, {"C:\\added"}, marks=pytest.mark.slow),
    ],
)
def test_a_session_reaches_the_driver(place: Callable[[Windows], None], folders: set[str], machine: Windows) -> None:
    place(machine)
    first = "import os; os.add_dll_directory('C:\\\\added')" if place is added_by_the_program else ""
    found = ask(machine, "session", MODEL, first=first)
    assert reaches_the_driver(found)
    assert folders_of(found) == folders


def test_the_order_of_the_places(machine: Windows) -> None:
    for place in (in_torch, in_the_toolkit, along_path, in_system32):
        place(machine)
    machine.place_cuda("conda\\Library\\bin")
    machine.place_cuda("twelve\\bin", *REQUIRED)
    machine.make("twelve\\bin\\cublas64_12.dll")
    variables = {"CONDA_PREFIX": "C:\\conda", "CUDA_PATH": "C:/twelve", "CUDA_PATH_V13_1": "C:\\absent"}
    found = ask(machine, "planned", **variables)
    expected = [
        ["torch", f"C:\\{TORCH}"],
        ["nvidia wheels", CUDA_OF_WHEELS],
        ["conda", "C:\\conda\\Library\\bin"],
        ["environment variable", "C:\\twelve\\bin"],
        ["toolkit", f"C:\\{TOOLKIT}"],
        ["system loader", "C:\\windows\\System32"],
        ["system loader", "C:\\Program Files\\CUDA, in pieces"],
    ]
    assert found["cublas64_13.dll"] == [[source, f"{folder}\\cublas64_13.dll"] for source, folder in expected]


# What is loaded already, and in which order


@pytest.mark.parametrize(
    ("first", "folder"),
    [
        ("import onnxruntime", CUDA_OF_WHEELS),
        pytest.param("import onnxruntime; onnxruntime.preload_dlls()", CUDA_OF_WHEELS, marks=pytest.mark.slow),
        (f"import ctypes; [ctypes.CDLL('C:/other/' + name) for name in {REQUIRED}]", "C:\\other"),
    ],
    ids=["onnxruntime imported", "its preload_dlls called", "by a path of the program's own"],
)
def test_what_came_first_is_taken(first: str, folder: str, machine: Windows) -> None:
    machine.install_cuda()
    machine.place_cuda("other")
    found = ask(machine, "session", MODEL, first=first)
    assert reaches_the_driver(found)
    assert folders_of(found) == {folder}


def test_of_two_that_are_loaded_the_first_is_told(machine: Windows) -> None:
    machine.install_cuda()
    for folder in ("first", "second"):
        machine.place_cuda(folder, "cublasLt64_13.dll")
    opened = "import ctypes; [ctypes.CDLL(f'C:/{each}/cublasLt64_13.dll') for each in ('first', 'second')]"
    found = ask(machine, "preloaded", first=opened)
    assert found["libraries"]["cublasLt64_13.dll"] == ["already loaded", "C:\\first\\cublasLt64_13.dll"]


def test_a_bridge_of_another_onnxruntime_is_not_called(machine: Windows) -> None:
    """With error 998 at best, where the provider is initialised by a library that knows nothing of it."""
    machine.install_cuda()
    bridge = machine.site / "onnxruntime/capi/onnxruntime_providers_shared.dll"
    machine.write("other\\onnxruntime_providers_shared.dll", bridge.read_bytes())
    opened = "import ctypes; ctypes.CDLL('C:/other/onnxruntime_providers_shared.dll')"
    (error,) = ask(machine, "session", MODEL, first=opened)["errors"]
    assert error["type"] == "RuntimeConflictError"
    assert "taken from C:\\other\\onnxruntime_providers_shared.dll" in error["text"]


def test_an_onnxruntime_of_windows_own_does_no_harm(machine: Windows) -> None:
    """W07: the wheel's module holds its own, and its bridge is loaded before a provider asks for one by name."""
    machine.install_cuda()
    machine.make(f"{SYSTEM32}\\onnxruntime.dll", exports={"OrtGetApiBase": 0})
    machine.make(f"{SYSTEM32}\\onnxruntime_providers_shared.dll", exports={"Provider_GetHost": 0})
    found = ask(machine, "session", MODEL, first="import ctypes; ctypes.CDLL('onnxruntime.dll')")
    assert reaches_the_driver(found)
    assert folders_of(found, ("onnxruntime.dll",)) == {f"C:\\{SYSTEM32}"}
    assert folders_of(found, ("onnxruntime_providers_shared.dll",)) == {CAPI}


def test_children_are_spawned(machine: Windows) -> None:
    machine.install_cuda()
    here, there = ask(machine, "spawned", MODEL)
    assert reaches_the_driver(here)
    assert reaches_the_driver(there)
    assert folders_of(here) == folders_of(there) == {CUDA_OF_WHEELS}


# Files that are refused


def test_another_file_is_taken_for_one_that_is_refused(machine: Windows) -> None:
    machine.install_cuda()
    machine.place_cuda(TOOLKIT)
    machine.make(f"{CUDA_OF_WHEELS}\\cublasLt64_13.dll", fails=True)
    machine.make(f"{CUDA_OF_WHEELS}\\cufft64_12.dll", needs={"helper.dll": ["help"]})
    machine.make(f"{CUDNN_OF_WHEELS}\\cudnn_cnn64_9.dll", needs={"helper.dll": ["help"]})
    found = ask(machine, "preloaded")
    assert found["ok"]
    assert found["libraries"]["cublasLt64_13.dll"] == ["toolkit", f"C:\\{TOOLKIT}\\cublasLt64_13.dll"]
    assert found["libraries"]["cufft64_12.dll"] == ["toolkit", f"C:\\{TOOLKIT}\\cufft64_12.dll"]
    helper = "helper.dll, which it links, was not found (error 126)"
    assert {path: problem for path, (problem, _) in found["rejected"].items()} == {
        f"{CUDA_OF_WHEELS}\\cublasLt64_13.dll": "its initialisation failed (error 1114)",
        f"{CUDA_OF_WHEELS}\\cufft64_12.dll": helper,
        f"{CUDNN_OF_WHEELS}\\cudnn_cnn64_9.dll": helper,
    }
    assert found["missing"] == ["cudnn_cnn64_9.dll"]  # whose parts are not taken from two releases


# Where Python is


@pytest.mark.slow
def test_letters_beyond_ascii_and_spaces(machine: Windows) -> None:
    machine.install_cuda()
    machine.move_python(f"Program Files\\{STRANGE}\\Python")
    found = ask(machine, "session", MODEL)
    assert reaches_the_driver(found)
    (folder,) = folders_of(found)
    assert folder == CUDA_OF_WHEELS.replace("C:\\Python", f"C:\\Program Files\\{STRANGE}\\Python")


# Wine has no final path for a long one (GetFinalPathNameByHandle: error 234)
LONG_PATHS = f"""
import nt, ntpath, sys
final = ntpath._getfinalpathname
ntpath._getfinalpathname = lambda path: path if "a-long-name" in path else final(path)
sys.path.append("C:\\\\" + {LONG!r})
"""


@pytest.mark.slow
def test_wheels_in_a_folder_of_more_than_260_letters(machine: Windows) -> None:
    machine.install_cuda()
    machine.path(LONG).mkdir(parents=True)
    (machine.site / "nvidia").rename(machine.path(LONG) / "nvidia")
    found = ask(machine, "session", MODEL, first=LONG_PATHS)
    assert reaches_the_driver(found)
    assert folders_of(found) == {f"C:\\{LONG}\\nvidia\\cu13\\bin\\x86_64"}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a folder that cannot be written to, which takes root")
def test_packages_that_cannot_be_written_to(machine: Windows) -> None:
    machine.install_cuda()
    machine.read_only = machine.site
    tried = "\n".join([
        "import os, onnxruntime",
        "try: open(os.path.join(os.path.dirname(onnxruntime.__file__), 'new'), 'w')",
        "except OSError: pass",
        "else: raise SystemExit('it can be written to')",
    ])  # fmt: skip
    assert reaches_the_driver(ask(machine, "session", MODEL, first=tried))


STORE = "PythonSoftwareFoundation.Python.3.11{}_qbz5n2kfra8p0"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a folder that cannot be written to, which takes root")
def test_folders_of_the_microsoft_store(machine: Windows) -> None:
    """Python in a folder that nobody may write to, and packages in one of the user's own."""
    machine.install_cuda()
    home = f"Program Files\\WindowsApps\\{STORE.format('_3.11.2544.0_x64_')}"
    machine.move_python(home)
    local = f"users\\root\\AppData\\Local\\Packages\\{STORE.format('')}\\LocalCache\\local-packages\\Python311"
    machine.move_packages(f"{local}\\site-packages")
    machine.read_only = machine.path(home)
    found = ask(machine, "session", MODEL)
    assert reaches_the_driver(found)
    assert folders_of(found) == {f"C:\\{local}\\site-packages\\nvidia\\cu13\\bin\\x86_64"}


# NVIDIA's own libraries, and another release


@pytest.mark.slow
@pytest.mark.parametrize("torch", [False, True], ids=["wheels", "torch beside them"])
def test_the_libraries_of_nvidia(torch: bool, machine: Windows) -> None:
    machine.install_cuda(real=True)
    if torch:
        machine.install_torch(real=True)
    found = ask(machine, "preloaded")
    assert (found["ok"], found["missing"], found["rejected"], found["cuDNN"]) == (True, [], {}, [13, []])
    assert {source for source, _ in found["libraries"].values()} == {"torch" if torch else "nvidia wheels"}
    assert {*CUDNN} <= {*found["libraries"]}
    assert reaches_the_driver(ask(machine, "session", MODEL))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import onnxruntime"], ids=["ortgpu first", "onnxruntime first"])
def test_1_27_links_cuda_into_its_provider_alone(first: str, machine: Windows) -> None:
    """For Linux, that release links it into its Python module, which cannot be imported first."""
    machine.install_onnxruntime("1.27.0")
    machine.install_cuda(real=True)
    found = ask(machine, "session", MODEL, first=first)
    assert reaches_the_driver(found)
    assert folders_of(found, ("cudnn64_9.dll",)) == {CUDNN_OF_WHEELS}
