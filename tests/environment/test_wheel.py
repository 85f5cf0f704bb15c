"""What the provider file says of itself: needs, CUDA major, architectures, and which GPUs they cover."""

from __future__ import annotations

import importlib.metadata
import io
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.libraries.wheel import (
    Architecture,
    Coverage,
    ProviderLibrary,
    cuda_major_of,
    parse_container,
    provider_beside,
    read_architectures,
    read_provider,
    release_wanted,
)
from tests.lab.fixtures import provider_library
from tests.lab.stubs import Stubs
from tests.support.made_dlls import ARM64, dll

SASS, PTX = 2, 1
SPECIFIC = 0x100000

# By release: compute capabilities with machine code, those with PTX, the CUDA major, and the CUDA libraries that the
# provider links. Taken from the wheels with cuobjdump and readelf.
RELEASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, set[str]]] = {
    **{
        f"1.{minor}": (
            (75, 80, 86, 89, 90, 120),
            (),
            13,
            {"libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13", "libcuda.so.1"},
        )
        for minor in (29, 30, 31)
    },
    "1.28": (
        (75, 80, 86, 89, 90, 100, 120),
        (120,),
        13,
        {"libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13", "libcuda.so.1"},
    ),
    **{
        f"1.{minor}": (
            (60, 70, 75, 80, 86, 90),
            (90,),
            12,
            {
                "libcublasLt.so.12",
                "libcublas.so.12",
                "libcudnn.so.9",
                "libcurand.so.10",
                "libcufft.so.11",
                "libcudart.so.12",
            },
        )
        for minor in (24, 25, 26)
    },
}


@pytest.fixture(scope="module")
def installed(provider_library: str) -> ProviderLibrary:
    return read_provider(provider_library)


def number(architecture: Architecture) -> int:
    return architecture.major * 10 + architecture.minor


def library(*architectures: str) -> ProviderLibrary:
    return ProviderLibrary("provider.so", None, (), (), tuple(map(architecture, architectures)) or None)


def architecture(name: str) -> Architecture:
    kind, _, target = name.partition("_")
    digits = int(target.rstrip("af"))
    return Architecture(digits // 10, digits % 10, kind == "compute", target.endswith("a"), target.endswith("f"))


# The installed wheel


def test_the_installed_provider(installed: ProviderLibrary) -> None:
    release = ".".join(importlib.metadata.version("onnxruntime-gpu").split(".")[:2])
    if release not in RELEASES:
        pytest.skip(f"nothing is recorded of onnxruntime-gpu {release}")
    sass, ptx, cuda_major, needed = RELEASES[release]
    assert installed.problem is None
    assert installed.architectures is not None
    assert {number(a) for a in installed.architectures if not a.ptx} == set(sass)
    assert {number(a) for a in installed.architectures if a.ptx} == set(ptx)
    assert installed.cuda_major == cuda_major
    assert {name for name in installed.needed if name.startswith(("libcu", "libnv"))} == needed


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "native"), ((8, 0), "native"), ((3, 5), "none")])
def test_what_the_installed_provider_covers(
    installed: ProviderLibrary, capability: tuple[int, int], expected: Coverage
) -> None:
    assert installed.coverage(capability) == expected


def test_the_bridge_is_beside_it(installed: ProviderLibrary) -> None:
    assert os.path.isfile(provider_beside(installed.path, "shared"))
    assert provider_beside(r"capi/onnxruntime_providers_cuda.DLL", "shared") == os.path.join(
        "capi", "onnxruntime_providers_shared.dll"
    )


# Which GPUs an architecture covers: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility"


@pytest.mark.parametrize(
    ("held", "native", "jit", "none"),
    [
        (("sm_80",), ["8.0", "8.6", "8.7", "8.9"], [], ["7.5", "9.0", "10.0"]),
        (("sm_86",), ["8.6", "8.9"], [], ["8.0", "7.5", "9.0"]),
        (("sm_90a",), ["9.0"], [], ["8.9", "9.1", "10.0", "12.0"]),
        (("sm_120a",), ["12.0"], [], ["12.1", "10.0", "11.0"]),
        (("sm_120",), ["12.0", "12.1"], [], ["10.0", "11.0", "13.0"]),
        (("sm_100f",), ["10.0", "10.3"], [], ["9.0", "11.0", "12.0"]),
        (("compute_90",), [], ["9.0", "10.0", "12.0", "12.1"], ["8.9", "8.0"]),
        (("compute_120f",), [], ["12.0", "12.1"], ["9.0", "10.0", "13.0"]),
        (("compute_90a",), [], ["9.0"], ["10.0", "12.0", "8.0"]),
        (("sm_90", "compute_90"), ["9.0"], ["10.0", "12.0"], ["8.0"]),
        (("compute_52", "sm_80"), ["8.0", "8.6"], ["5.2", "6.1", "7.5", "9.0", "12.0"], ["5.0", "3.5"]),
        (
            ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"),  # 1.29 to 1.31.1
            ["7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "12.0"],
            [],
            ["5.2", "6.0", "6.1", "7.0", "10.0", "10.3", "12.1"],
        ),
        (
            ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_120"),  # 1.28
            ["7.5", "8.0", "9.0", "10.0", "12.0"],
            ["12.1", "13.0"],
            ["7.0", "6.1", "10.3", "11.0"],
        ),
        (
            ("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "compute_90"),  # 1.24 to 1.26
            ["6.0", "6.1", "7.0", "7.2", "7.5", "8.9", "9.0"],
            ["10.0", "12.0"],
            ["5.2", "3.5"],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_coverage(held: tuple[str, ...], native: list[str], jit: list[str], none: list[str]) -> None:
    provider = library(*held)
    expected = {**dict.fromkeys(native, "native"), **dict.fromkeys(jit, "jit"), **dict.fromkeys(none, "none")}
    found = {name: provider.coverage(capability(name)) for name in expected}
    assert found == expected


def capability(name: str) -> tuple[int, int]:
    major, minor = name.split(".")
    return int(major), int(minor)


def test_coverage_without_architectures_is_unknown() -> None:
    assert library().coverage((9, 0)) is None


@given(held=st.lists(st.sampled_from(["sm_75", "sm_80", "sm_90a", "compute_90", "compute_120a"]), min_size=1))
@settings(max_examples=50, deadline=None)
def test_more_code_never_covers_less(held: list[str]) -> None:
    order = ["none", "jit", "native"]
    for target in ((7, 5), (8, 6), (9, 0), (10, 0), (12, 0)):
        ranks = [order.index(str(library(*held[: n + 1]).coverage(target))) for n in range(len(held))]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize("name", ["sm_75", "sm_90a", "sm_100f", "compute_90", "compute_120a", "compute_120f"])
def test_names_are_those_of_cuobjdump(name: str) -> None:
    assert str(architecture(name)) == name


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (("libcublas.so.13", "libcudart.so.13"), 13),
        (("libcudart.so.12",), 12),
        (("libcudart.so.11.0",), 11),
        (("cudart64_12.dll",), 12),
        (("cudart64_110.dll",), 11),
        (("cublasLt64_13.dll", "CUBLAS64_13.dll", "KERNEL32.dll"), 13),  # 1.27 and newer have the runtime built in
        (("cublas64_12.dll", "cudart64_13.dll"), 13),
        (("cufft64_12.dll", "KERNEL32.dll"), None),
        (("libcublas.so.13", "libc.so.6"), None),
        ((), None),
    ],
)
def test_cuda_major(needed: tuple[str, ...], expected: int | None) -> None:
    assert cuda_major_of(needed) == expected


# Containers


def entry(kind: int, target: int, *, flags: int = 0, payload: int = 16, header: int = 64) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, header, payload) + bytes(12) + struct.pack("<I", target)
    return (head + bytes(8) + struct.pack("<Q", flags)).ljust(header, b"\0") + b"\xcc" * payload


def container(*entries: bytes, magic: int = 0xBA55ED50, version: int = 1) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", magic, version, 16, len(body)) + body


def names(data: bytes, start: int = 0, length: int | None = None) -> list[str] | None:
    found = parse_container(io.BytesIO(data), start, len(data) - start if length is None else length)
    return None if found is None else [str(one) for one in found]


def test_a_container() -> None:
    data = container(
        entry(SASS, 75), entry(SASS, 90, flags=SPECIFIC), entry(PTX, 120, payload=40), entry(SASS, 103, header=72)
    )
    assert names(data) == ["sm_75", "sm_90a", "compute_120", "sm_103"]
    assert names(b"before" + data + b"after", start=6, length=len(data)) == ["sm_75", "sm_90a", "compute_120", "sm_103"]


def test_code_for_a_family() -> None:
    """The flags are those that fatbinary of CUDA 13.5 writes for sm_100f, sm_120a and compute_120f."""
    family, one, ptx = (
        entry(SASS, 100, flags=0x1200011),
        entry(SASS, 120, flags=0x1100011),
        entry(PTX, 120, flags=0x208011),
    )
    assert names(container(family, one, ptx)) == ["sm_100f", "sm_120a", "compute_120f"]


def test_only_the_first_container_is_read() -> None:
    assert names(container(entry(SASS, 80)) + container(entry(SASS, 90))) == ["sm_80"]


def test_entries_of_unknown_kinds_are_passed_over() -> None:
    assert names(container(entry(16, 80), entry(SASS, 90))) == ["sm_90"]


@pytest.mark.parametrize(
    "data",
    [
        container(),
        container(entry(16, 80)),
        container(entry(SASS, 80), magic=0xBA55ED51),
        container(entry(SASS, 80), version=2),
    ],
    ids=["empty", "nothing known", "another magic", "another version"],
)
def test_no_container(data: bytes) -> None:
    assert names(data) is None


def test_a_container_longer_than_its_section() -> None:
    data = container(entry(SASS, 80), entry(SASS, 90))
    assert names(data, length=len(data) - 1) is None


def test_an_entry_without_a_size_ends_the_walk() -> None:
    assert names(container(entry(SASS, 80, payload=0, header=64)[:4] + bytes(60), entry(SASS, 90))) == ["sm_00"]


def test_a_container_of_very_many_entries_is_not_walked_to_its_end() -> None:
    found = names(container(*[entry(SASS, 80, payload=0)] * 500))
    assert found is not None
    assert len(found) <= 64


def parse_or_refuse(data: bytes) -> None:
    """As the caller does: a short read is a refusal, and anything else is an answer."""
    try:
        found = parse_container(io.BytesIO(data), 0, len(data))
    except struct.error:
        return
    assert found is None or all(isinstance(one, Architecture) for one in found)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    parse_or_refuse(data)
    parse_or_refuse(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(data)) + data)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 300), value=st.binary(min_size=1, max_size=8), size=st.integers(0, 300))
def test_damaged_containers(at: int, value: bytes, size: int) -> None:
    data = container(entry(SASS, 75), entry(SASS, 90, flags=SPECIFIC), entry(PTX, 120))
    parse_or_refuse(data[:at] + value + data[at + len(value) :])
    parse_or_refuse(data[:size])


# Files


def test_no_provider_and_no_fat_binary(tmp_path: Path, stubs: Stubs) -> None:
    absent = read_provider(tmp_path / "absent.so")
    assert absent.problem is not None
    assert (absent.needed, absent.architectures, absent.cuda_major) == ((), None, None)
    plain = read_provider(stubs.library("libnothing.so.1"))
    assert plain.problem is None
    assert plain.architectures is None
    assert plain.coverage((9, 0)) is None


@pytest.mark.parametrize("size", [0, 40, 5000, 1 << 20])
def test_a_truncated_provider(installed: ProviderLibrary, tmp_path: Path, size: int) -> None:
    cut = tmp_path / "libonnxruntime_providers_cuda.so"
    with open(installed.path, "rb") as file:
        cut.write_bytes(file.read(size))
    found = read_provider(cut)
    assert found.problem is not None
    assert (found.needed, found.architectures) == ((), None)


def test_the_provider_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.environment.libraries.wheel.this_machine", lambda: "AMD64")
    path = tmp_path / "onnxruntime_providers_cuda.dll"
    held = container(entry(SASS, 75), entry(SASS, 120, flags=SPECIFIC))
    needs = ["cublasLt64_13.dll", "cublas64_13.dll", "KERNEL32.dll"]
    path.write_bytes(dll(path.name, needs, sections={".nv_fatb": held}))
    found = read_provider(path)
    assert (found.problem, found.needed, found.cuda_major) == (None, tuple(needs), 13)
    assert [str(each) for each in found.architectures or ()] == ["sm_75", "sm_120a"]
    path.write_bytes(dll(path.name, needs, machine=ARM64))
    assert read_provider(path).problem == "built for aarch64, this is x86_64"
    path.write_bytes(path.read_bytes()[:1200])
    assert str(read_provider(path).problem).startswith("truncated")
    assert read_provider(path).architectures is None


def test_architectures_of_no_file(tmp_path: Path) -> None:
    assert read_architectures(str(tmp_path / "absent")) is None
    assert read_architectures(str(tmp_path)) is None


@pytest.mark.lab
@pytest.mark.parametrize("behind", ["", ".dev20261101001", "+cu13"])
def test_a_plugin_belongs_to_the_release_of_its_core(behind: str) -> None:
    """A nightly build has the date behind its version, which the provider's file does not have."""
    version = importlib.metadata.version("onnxruntime-gpu")
    provider = str(provider_library())
    assert release_wanted(provider, version + behind) is None
    assert release_wanted(provider, "1.99.0" + behind) in (version, None)
