"""Loading on Windows: all but the calls of its kernel, which a prepared one answers as Microsoft documents them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from ortgpu.environment.libraries.loader_windows import Kernel32, lacking_functions, missing_dependency, words_of
from ortgpu.provider.preloading import open_library
from tests.support.made_dlls import ARM64
from tests.windows.machine import Machine
from tests.windows.trees import CUDNN, TOOLKIT


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("ortgpu.environment.libraries.wheel.this_machine", lambda: "AMD64")
    return Machine(tmp_path)


def test_what_the_provider_links_is_loaded_dependencies_first(machine: Machine) -> None:
    machine.wheels()
    report = machine.preload()
    assert report.ok
    assert not report.driver_missing
    assert report.missing == ()
    assert [name for name in machine.kernel.opened if name in TOOLKIT] == list(TOOLKIT)
    assert report.path_of("libcublas") == str(machine.tmp_path / "site/nvidia/cu13/bin/x86_64/cublas64_13.dll")
    assert report.roots == (str(machine.tmp_path / "site/nvidia"),)
    assert open_library(str(machine.provider), loader=machine.loader) is None


def test_all_of_cudnn_is_loaded_and_found_by_name_too(machine: Machine) -> None:
    """ONNX Runtime's own list lacked cudnn_engines_tensor_ir64_9.dll: row W05 of the corpus."""
    machine.wheels()
    report = machine.preload(everything=True)
    assert report.ok
    assert report.cudnn_cuda_major == 13
    assert set(CUDNN) <= set(machine.kernel.opened)
    assert str(machine.tmp_path / "site/nvidia/cudnn/bin") in machine.kernel.added
    assert report.cudnn_mixed == ()


def test_parts_of_two_releases_of_cudnn_are_told(machine: Machine) -> None:
    machine.wheels()
    machine.answers["cudnnOpsVersionCheck"] = 1002
    mixed = machine.preload(everything=True).cudnn_mixed
    assert {os.path.basename(path) for path in mixed} == set(CUDNN)


def test_a_library_is_opened_once(machine: Machine) -> None:
    machine.wheels()
    machine.preload()
    before = list(machine.kernel.opened)
    assert machine.preload().ok
    assert machine.kernel.opened == before


def test_no_driver(machine: Machine) -> None:
    (machine.system / "nvcuda.dll").unlink()
    machine.wheels()
    assert machine.preload().driver_missing


def test_a_dependency_that_is_missing_is_named(machine: Machine) -> None:
    machine.wheels(but=lambda name: ["helper.dll"] if name == "cublasLt64_13.dll" else ())
    missing = {library.soname: library for library in machine.preload().missing_required}
    (file,) = missing["cublasLt64_13.dll"].rejected
    assert file.problem == "helper.dll, which it links, was not found (error 126)"


def test_the_other_one_is_taken_where_the_first_is_refused(machine: Machine) -> None:
    site = machine.wheels(but=lambda name: ["helper.dll"] if name == "cublasLt64_13.dll" else ())
    for name in TOOLKIT:
        machine.write(machine.tmp_path / "cuda/bin/x64" / name)
    machine.changes["variables"] = {"CUDA_PATH": str(machine.tmp_path / "cuda")}
    report = machine.preload()
    assert report.ok
    assert report.path_of("libcublasLt") == str(machine.tmp_path / "cuda/bin/x64/cublasLt64_13.dll")
    assert [file.path for file in report.rejected] == [str(site / "nvidia/cu13/bin/x86_64/cublasLt64_13.dll")]


def test_a_library_of_another_version_in_the_process_is_the_one_at_fault(machine: Machine) -> None:
    machine.wheels(but=lambda name: {"cublasLt64_13.dll": ["new"]} if name == "cublas64_13.dll" else ())
    other = machine.write(machine.tmp_path / "other/cublasLt64_13.dll", exports=["old"])
    assert machine.kernel.load(str(other)) == 0
    missing = {library.soname: library for library in machine.preload().missing_required}
    (file,) = missing["cublas64_13.dll"].rejected
    assert file.unfit_for == str(other)
    assert file.problem == (
        f"it takes new from cublasLt64_13.dll, and {other} of this process does not have that (error 127)"
    )


# What the error codes mean


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (5, "permission denied (error 5)"),
        (8, "not enough memory (error 8)"),
        (1114, "its initialisation failed (error 1114)"),
        (1455, "the paging file of Windows is too small (error 1455)"),
        (225, "the virus scanner has blocked it (error 225)"),
        (4551, "a policy of Windows has blocked it (error 4551)"),
        (1117, "Windows refuses to load it (error 1117)"),
        (126, "a library, which it links, was not found (error 126)"),
        (127, "a function that it takes from another library is not there: that is of another version (error 127)"),
        (193, "damaged, or built for another kind of processor than this Python (error 193)"),
    ],
)
def test_codes(code: int, words: str, machine: Machine) -> None:
    assert words_of(code, str(machine.bridge), (), machine.kernel.folders) == words


def test_codes_of_files_that_tell_more(machine: Machine, tmp_path: Path) -> None:
    assert words_of(126, str(tmp_path / "absent.dll"), (), ()) == "no such file (error 126)"
    assert words_of(126, "nvcuda.dll", (), ()) == "nvcuda.dll was not found (error 126)"
    cut = tmp_path / "cut.dll"
    cut.write_bytes(machine.bridge.read_bytes()[:1100])
    assert words_of(193, str(cut), (), ()).startswith("truncated: 1100 of ")


def test_the_missing_one_may_be_behind_another(machine: Machine, tmp_path: Path) -> None:
    """And what is loaded already is missed by nobody."""
    machine.write(tmp_path / "a/one.dll", ["two.dll", "api-ms-win-crt-heap-l1-1-0.dll", "KERNEL32.dll"])
    machine.write(tmp_path / "a/two.dll", ["one.dll", "three.dll"])
    one, folders = str(tmp_path / "a/one.dll"), machine.kernel.folders
    assert missing_dependency(one, (), folders) == "three.dll"
    assert missing_dependency(one, [r"C:\elsewhere\THREE.dll"], folders) is None
    assert missing_dependency(one, [r"C:\elsewhere\TWO.DLL"], folders) is None


def test_functions_are_compared_with_those_of_the_loaded_file(machine: Machine, tmp_path: Path) -> None:
    user = machine.write(tmp_path / "a/user.dll", {"used.dll": ["b", "a"], "KERNEL32.dll": ["Sleep"]})
    used = machine.write(tmp_path / "b/used.dll", exports=["b", "c"])
    assert list(lacking_functions(str(user), [str(used)])) == [("a", "used.dll", str(used))]
    machine.write(used, exports=["a", "b"])
    assert list(lacking_functions(str(user), [str(used)])) == []
    machine.write(used)  # by numbers alone: nothing is known
    assert list(lacking_functions(str(user), [str(used)])) == []


# The calls themselves


class FakeFunction:
    """A function of kernel32, as ctypes has it: with types, and what it is called with."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, []  # type: ignore[var-annotated]  # whatever is passed
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.answer(*arguments)


class FakeKernel32:
    def __init__(self, paths: dict[int, str]) -> None:
        def modules(_process: int, into: Any, room: int, size: Any) -> int:
            size._obj.value = 8 * len(paths)
            for number, handle in enumerate(paths):
                if into is not None and 8 * number < room:
                    into[number] = handle
            return 1

        def name(handle: int, into: Any, _room: int) -> int:
            into.value = paths[handle]
            return len(paths[handle])

        self.LoadLibraryExW = FakeFunction(lambda path, _, __: 1 if path in paths.values() else 0)
        self.GetModuleFileNameW = FakeFunction(name)
        self.GetCurrentProcess = FakeFunction(lambda: -1)
        self.K32EnumProcessModules = FakeFunction(modules)


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="the handles of the fake are of 64 bits")
def test_the_calls_of_the_kernel() -> None:
    """That they are made as documented, as far as a stand-in for kernel32.dll can tell."""
    fake = FakeKernel32({0x7FF000000000: "/a/one.dll", 0x7FF000010000: "/b/two.dll", 0x7FF000020000: ""})
    kernel = Kernel32(fake, lambda: 126)
    assert kernel.modules() == ("/a/one.dll", "/b/two.dll")
    assert kernel.load("/a/one.dll") == 0
    assert kernel.load("/a/absent.dll") == 126
    assert kernel.load("nvcuda.dll") == 126
    assert fake.LoadLibraryExW.calls == [
        ("/a/one.dll", None, 0x1100), ("/a/absent.dll", None, 0x1100), ("nvcuda.dll", None, 0x1000)
    ]  # fmt: skip
    kernel.search_also("/a")
    assert kernel.ask("/a/absent.dll", "f") is None


def test_a_provider_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.environment.libraries.wheel.this_machine", lambda: "AMD64")
    machine = Machine(tmp_path)
    machine.write(machine.provider, machine.needs, machine=ARM64)
    assert machine.provider_library.problem == "built for aarch64, this is x86_64"
    assert open_library(str(machine.provider), loader=machine.loader) == (
        "damaged, or built for another kind of processor than this Python (error 193)"
    )
