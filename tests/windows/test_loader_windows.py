"""What Windows' loader is given, and the words for its error codes, which files tell: made DLLs, on any system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortgpu.environment.libraries.loader_windows import (
    lacking_functions,
    missing_dependency,
    spelt_for_windows,
    strip_long_path_mark,
    words_of,
)
from tests.support.made_dlls import dll, put


def write(path: Path, needs: Any = (), **options: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dll(path.name, needs, **options))
    return str(path)


@pytest.fixture
def system(tmp_path: Path) -> list[str]:
    """The folders that the loader searches."""
    return [str(put(tmp_path / "Windows/System32", "KERNEL32.dll"))]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (5, "permission denied (error 5)"),
        (8, "not enough memory (error 8)"),
        (1114, "its initialisation failed (error 1114)"),
        (1455, "the paging file of Windows is too small (error 1455)"),
        (206, "its path is longer than Windows opens (error 206)"),
        (225, "the virus scanner has blocked it (error 225)"),
        (4551, "a policy of Windows has blocked it (error 4551)"),
        (1117, "Windows refuses to load it (error 1117)"),
        (126, "a library, which it links, was not found (error 126)"),
        (127, "a function that it takes from another library is not there: that is of another version (error 127)"),
        (193, "damaged, or built for another kind of processor than this Python (error 193)"),
    ],
)
def test_codes(code: int, words: str, system: list[str], tmp_path: Path) -> None:
    assert words_of(code, write(tmp_path / "a/whole.dll", ["KERNEL32.dll"]), (), system) == words


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    """Wine loads some of these."""
    cut = tmp_path / "cut.dll"
    cut.write_bytes(dll("cut.dll", ["KERNEL32.dll"])[:1100])
    assert words_of(193, str(cut), (), ()).startswith("truncated: 1100 of ")


def test_the_missing_one_may_be_behind_another(system: list[str], tmp_path: Path) -> None:
    """And what is loaded already is missed by nobody."""
    one = write(tmp_path / "a/one.dll", ["two.dll", "api-ms-win-crt-heap-l1-1-0.dll", "KERNEL32.dll"])
    write(tmp_path / "a/two.dll", ["one.dll", "three.dll"])
    assert missing_dependency(one, (), system) == "three.dll"
    assert missing_dependency(one, [r"C:\elsewhere\THREE.dll"], system) is None
    assert missing_dependency(one, [r"C:\elsewhere\TWO.DLL"], system) is None


def test_functions_are_compared_with_those_of_the_loaded_file(tmp_path: Path) -> None:
    """Wine puts a stub in the place of a missing function, and never answers 127."""
    user = write(tmp_path / "a/user.dll", {"used.dll": ["b", "a"], "KERNEL32.dll": ["Sleep"]})
    used = write(tmp_path / "b/used.dll", exports=["b", "c"])
    assert list(lacking_functions(user, [used])) == [("a", "used.dll", used)]
    assert words_of(127, user, [used], ()) == (
        f"it takes a from used.dll, and {used} of this process does not have that (error 127)"
    )
    write(tmp_path / "b/used.dll", exports=["a", "b"])
    assert list(lacking_functions(user, [used])) == []
    write(tmp_path / "b/used.dll")  # by numbers alone: nothing is known
    assert list(lacking_functions(user, [used])) == []


FAR = "C:\\" + "\\".join(["folder"] * 40) + "\\a.dll"
SHARED = FAR.replace("C:", "\\\\server\\share")


@pytest.mark.parametrize(
    ("path", "given", "reported"),
    [
        ("C:/nvidia\\bin/x86_64\\..\\a.dll", "C:\\nvidia\\bin\\a.dll", "C:\\nvidia\\bin\\a.dll"),
        (FAR, f"\\\\?\\{FAR}", FAR),
        (SHARED.replace("\\", "/"), f"\\\\?\\UNC{SHARED[1:]}", SHARED),
        (f"\\\\?\\{FAR}", f"\\\\?\\{FAR}", FAR),
    ],
    ids=["slashes", "long", "long, of another machine", "marked"],
)
def test_paths_for_the_loader(path: str, given: str, reported: str) -> None:
    """Wine takes slashes and long paths as they are."""
    assert spelt_for_windows(path) == given
    assert strip_long_path_mark(given) == reported
