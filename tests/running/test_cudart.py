"""Our calls of the CUDA runtime beside the headers that NVIDIA's wheels carry: signatures, values, one layout."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import itertools
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.provider.devices import CPU
from ortgpu.running import cudart
from ortgpu.running.cuda_graph import _CAPTURE_FAILED
from tests.lab.stubs import Stubs
from tests.lab.wheels import Wheels
from tests.support.made_sessions import L4


@dataclass(frozen=True)
class Headers:
    functions: str  # cuda_runtime_api.h
    types: str  # driver_types.h

    @classmethod
    def of(cls, read: Any) -> Headers:
        texts = (read(name) for name in ("cuda_runtime_api.h", "driver_types.h"))
        return cls(*(re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL) for text in texts))

    def parameters(self, function: str) -> list[str] | None:
        found = re.search(rf"^extern __host__ [^;]*\b{function}\(([^;]*)\);", self.functions, re.MULTILINE)
        if found is None:
            return None
        inside = re.sub(r"__dv\(.*?\)", "", found[1])
        return [] if inside.strip() == "void" else [" ".join(each.split()) for each in inside.split(",")]

    def enumerator(self, name: str) -> int:
        found = re.search(rf"\b{name}\s*=\s*(\w+)", self.types)
        assert found is not None, name
        return int(found[1], 0)

    def defined(self, name: str) -> int:
        found = re.search(rf"#define\s+{name}\s+(?:\(\(cudaStream_t\))?(0x\w+)", self.types)
        assert found is not None, name
        return int(found[1], 0)


WHEELS = {"nvidia-cuda-runtime-cu11": "11.8.89", "nvidia-cuda-runtime-cu12": "12.9.79"}


@pytest.fixture(
    params=["installed", *(pytest.param(name, marks=pytest.mark.matrix) for name in WHEELS)], scope="module"
)
def headers(request: pytest.FixtureRequest) -> Headers:
    if request.param == "installed":
        spec = importlib.util.find_spec("nvidia")
        roots = list(spec.submodule_search_locations or ()) if spec is not None else []
        folders = [path.parent for root in roots for path in Path(root).glob("*/include/cuda_runtime_api.h")]
        assert folders, f"none of {roots} has the headers of the CUDA runtime"
        folder = min(folders)
        return Headers.of(lambda name: (folder / name).read_text())
    wheels: Wheels = request.getfixturevalue("wheels")
    with zipfile.ZipFile(wheels.get(request.param, WHEELS[request.param])) as archive:
        return Headers.of(lambda name: archive.read(f"nvidia/cuda_runtime/include/{name}").decode())


def called() -> list[str]:
    return sorted(set(re.findall(r"(?:library|_quick)\.(cuda\w+)", inspect.getsource(cudart))))


def kind(parameter: str) -> Any:
    """What ctypes must be told of a parameter: an opaque handle is a pointer, one to be filled in a pointer to one."""
    stars = parameter.count("*") + len(re.findall(r"\bcuda(?:Stream|Event|Graph)_t\b", parameter))
    if stars:
        is_filled_in = stars == 2 or re.match(r"(float|int|size_t|struct \w+|enum \w+) ?\*", parameter)
        return "pointer to one" if is_filled_in else "pointer"
    first = parameter.removeprefix("const ").split()[0]
    return {"size_t": ctypes.c_size_t, "unsigned": ctypes.c_uint}.get(first, ctypes.c_int)  # else an int or an enum


def test_functions_are_called_as_they_are_declared(headers: Headers, stubs: Stubs) -> None:
    runtime = cudart.CudaRuntime(str(stubs.cudart), 0)
    assert len(called()) > 15
    for library, name in itertools.product((runtime._library, runtime._quick), called()):
        declared = headers.parameters(name)
        assert declared is not None, f"{name} is not declared"
        told = getattr(library, name).argtypes
        if told is None:  # ctypes passes what it is given: no number may be wider than an int
            assert all(kind(each) in (ctypes.c_int, "pointer to one") for each in declared), name
            continue
        of_ours = ["pointer" if each is ctypes.c_void_p else each for each in told]
        of_ours = ["pointer to one" if hasattr(each, "contents") else each for each in of_ours]
        assert of_ours == [kind(each) for each in declared], f"{name}({', '.join(declared)})"


def test_values_are_those_of_the_headers(headers: Headers) -> None:
    assert headers.defined("cudaHostAllocPortable") == cudart._HOST_ALLOC_PORTABLE
    assert headers.defined("cudaStreamNonBlocking") == cudart._STREAM_NON_BLOCKING
    assert headers.defined("cudaStreamLegacy") == cudart.LEGACY_STREAM
    assert headers.enumerator("cudaMemoryTypeHost") == cudart._MEMORY_TYPE_HOST
    assert headers.enumerator("cudaMemcpyDefault") == cudart._MEMCPY_DEFAULT
    assert headers.enumerator("cudaErrorNotReady") == cudart._NOT_READY
    assert headers.enumerator("cudaStreamCaptureModeGlobal") == cudart.CAPTURE_MODE_GLOBAL
    assert headers.enumerator("cudaStreamCaptureModeRelaxed") == cudart.CAPTURE_MODE_RELAXED


def test_attributes_of_a_pointer_fit(headers: Headers) -> None:
    """CUDA writes the whole structure, which has grown in CUDA 13."""
    found = re.search(r"struct __device_builtin__ cudaPointerAttributes\s*\{(.*?)\n\};", headers.types, re.DOTALL)
    assert found is not None
    fields = [
        each.strip() for each in re.sub(r"union\s*\{.*?\}", "long in_union", found[1], flags=re.DOTALL).split(";")
    ]
    sizes = []
    for field in filter(None, fields):
        width = 8 if "*" in field or field.startswith("long") else 4
        count = re.search(r"\[(\d+)\]", field)
        sizes.append(width * (int(count[1]) if count else 1))
    assert fields[:4] == ["enum cudaMemoryType type", "int device", "void *devicePointer", "void *hostPointer"]
    assert sum(sizes) <= ctypes.sizeof(cudart._PointerAttributes)


def test_errors_of_a_capture_are_told_from_others(headers: Headers) -> None:
    for name, code in re.findall(r"\b(cudaError\w+)\s*=\s*(\d+)", headers.types):
        of_a_capture = name.startswith(("cudaErrorStreamCapture", "cudaErrorCaptured", "cudaErrorNotPermitted"))
        for said in (f"CUDA failure {code}: words", f"CUDA error {name}:words"):
            assert (_CAPTURE_FAILED.search(said) is not None) is of_a_capture, name


# Two GPUs. The stub has one, so the answers about another one are made up here.


def answering(runtime: cudart.CudaRuntime, name: str, answer: Callable[[Any], None]) -> None:
    """Have a function of cudart write its answer to its first argument."""

    def call(written: Any, *_: Any) -> int:
        answer(written._obj)
        return 0

    for library in (runtime._library, runtime._quick):
        setattr(library, name, call)


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_memory_of_another_gpu_is_not_of_this_device(stubs: Stubs, ordinal: int, device: int) -> None:
    def answer(attributes: Any) -> None:
        attributes.type, attributes.device = 2, device

    runtime = cudart.CudaRuntime(str(stubs.cudart), ordinal)
    answering(runtime, "cudaPointerGetAttributes", answer)
    assert runtime.is_on_device(4096) is (device == ordinal)
    assert not runtime.is_pinned(4096)


def test_cuda_tells_milliseconds_between_events(stubs: Stubs) -> None:
    def answer(milliseconds: Any) -> None:
        milliseconds.value = 1500.0

    runtime = cudart.CudaRuntime(str(stubs.cudart), 0)
    answering(runtime, "cudaEventElapsedTime", answer)
    assert runtime.seconds_between(1, 2) == 1.5


@pytest.mark.parametrize(("gpus", "is_set"), [(1, False), (2, True), (3, True)])
def test_a_thread_needs_its_device_set_once_the_process_has_two(
    monkeypatch: pytest.MonkeyPatch, gpus: int, is_set: bool
) -> None:
    runtime = SimpleNamespace(device_count=lambda: gpus, prepared_use_device=lambda: print)
    monkeypatch.setattr(cudart, "runtime_of", lambda device: runtime if device is L4 else None)
    assert cudart.device_setter(L4) is (print if is_set else None)
    assert cudart.device_setter(CPU) is None


@pytest.mark.parametrize(("born", "freed"), [(0, [7]), (1, [])], ids=["here", "in the parent of a fork"])
def test_memory_is_freed_in_the_process_that_took_it(born: int, freed: list[int]) -> None:
    seen: list[int] = []
    cudart._free(seen.append, 7, os.getpid() + born)
    assert seen == freed


def test_memory_of_a_context_that_is_lost_is_freed_already() -> None:
    def refuse(address: int) -> None:
        raise cudart.CudaCallError(700, "an illegal memory access")

    cudart._free(refuse, 7, os.getpid())
