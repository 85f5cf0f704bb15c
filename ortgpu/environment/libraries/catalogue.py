"""The CUDA libraries that ONNX Runtime's provider uses: names per CUDA major, wheels, order of loading.

The file of a provider names the libraries that it links. This table adds three facts: the libraries that are opened
lazily (cuDNN's parts; since ONNX Runtime 1.28 cuDNN and cuFFT themselves), the wheel of each library, and the
libraries to load before it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

TOOLKIT_MAJORS = (11, 12, 13)


@dataclass(frozen=True, slots=True)
class LibrarySpec:
    """One library. ``sonames``, ``dlls`` and ``wheels`` are by CUDA major; absent majors do not have the library.

    ``dlls`` are the names on Windows. ``wheels`` are requirements for pip, on both systems: the name of the
    distribution and the versions with that soname.
    """

    stem: str
    sonames: dict[int, str]
    dlls: dict[int, str]
    dll_stem: str  # part before the version in ``dlls``
    wheels: dict[int, str]
    after: tuple[str, ...] = ()  # stems to load before it
    part_of: str | None = None  # stem of a library: both must come from the same folder

    @property
    def is_cudnn(self) -> bool:
        return self.stem.startswith("libcudnn")


def _toolkit(stem: str, wheel: str, versions: dict[int, str], *, wheel_versions: dict[int, str] | None = None,
             dll_stem: str | None = None, dll_versions: dict[int, str] | None = None,
             after: tuple[str, ...] = ()) -> LibrarySpec:  # fmt: skip
    numbers = wheel_versions or versions
    dll = dll_stem or f"{stem.removeprefix('lib')}64_"
    return LibrarySpec(
        stem=stem,
        sonames={major: f"{stem}.so.{version}" for major, version in versions.items()},
        dlls={major: f"{dll}{version}.dll" for major, version in (dll_versions or versions).items()},
        dll_stem=dll,
        # Since CUDA 13 the wheels' names have no suffix: see the METADATA of nvidia-cublas.
        wheels={m: f"{wheel}~={numbers[m]}.0" if m >= 13 else f"{wheel}-cu{m}~={numbers[m]}.0" for m in versions},
        after=after,
    )


def _cudnn(part: str, after: tuple[str, ...]) -> LibrarySpec:
    stem = f"libcudnn{part}"
    return LibrarySpec(
        stem=stem,
        sonames={11: f"{stem}.so.8", 12: f"{stem}.so.9", 13: f"{stem}.so.9"},
        dlls={11: f"cudnn{part}64_8.dll", 12: f"cudnn{part}64_9.dll", 13: f"cudnn{part}64_9.dll"},
        dll_stem=f"cudnn{part}64_",
        wheels={11: "nvidia-cudnn-cu11~=8.0", 12: "nvidia-cudnn-cu12~=9.0", 13: "nvidia-cudnn-cu13~=9.0"},
        after=after,
        part_of="libcudnn" if part else None,
    )


_EACH = {11: "11", 12: "12", 13: "13"}
_TEN = dict.fromkeys(_EACH, "10")

LIBRARIES: tuple[LibrarySpec, ...] = (
    _toolkit(
        "libcudart", "nvidia-cuda-runtime", {11: "11.0", 12: "12", 13: "13"}, wheel_versions=_EACH,
        dll_versions={11: "110", 12: "12", 13: "13"},
    ),
    _toolkit("libcublasLt", "nvidia-cublas", _EACH),
    _toolkit("libcublas", "nvidia-cublas", _EACH, after=("libcublasLt",)),
    _toolkit("libcurand", "nvidia-curand", _TEN, after=("libcudart",)),  # It links libcudart since 10.4.5.
    _toolkit(
        "libnvJitLink", "nvidia-nvjitlink", {12: "12", 13: "13"}, dll_stem="nvJitLink_",
        dll_versions={12: "120_0", 13: "130_0"},
    ),
    _toolkit(
        "libnvrtc", "nvidia-cuda-nvrtc", {11: "11.2", 12: "12", 13: "13"}, wheel_versions=_EACH,
        dll_versions={11: "112_0", 12: "120_0", 13: "130_0"},
    ),
    _toolkit("libcufft", "nvidia-cufft", {11: "10", 12: "11", 13: "12"}, after=("libnvJitLink",)),
    _cudnn("", after=("libcublas", "libnvrtc")),
    _cudnn("_graph", after=("libcudnn",)),
    _cudnn("_ops", after=("libcudnn_graph",)),
    _cudnn("_cnn", after=("libcudnn_ops",)),
    _cudnn("_adv", after=("libcudnn_ops",)),
    _cudnn("_heuristic", after=("libcudnn_graph",)),
    _cudnn("_engines_precompiled", after=("libcudnn_graph",)),
    _cudnn("_engines_runtime_compiled", after=("libcudnn_graph",)),
    _cudnn("_engines_tensor_ir", after=("libcudnn_graph",)),
    _cudnn("_ext", after=("libcudnn_graph",)),
    _cudnn("_ops_infer", after=("libcudnn",)),
    _cudnn("_cnn_infer", after=("libcudnn_ops_infer",)),
    _cudnn("_adv_infer", after=("libcudnn_ops_infer",)),
)  # fmt: skip

BY_STEM = {spec.stem: spec for spec in LIBRARIES}
_BY_DLL_STEM = {spec.dll_stem.lower(): spec for spec in LIBRARIES}

# The parts that cuDNN opens at the first convolution, by its major version. If one is missing, cuDNN aborts the process
# (CTranslate2 issue 1826). The other parts exist in some releases only.
CUDNN_CORE_PARTS = {
    8: ("libcudnn_ops_infer", "libcudnn_cnn_infer"),
    9: ("libcudnn_graph", "libcudnn_ops", "libcudnn_cnn"),
}

# These files of cuDNN 9 together name the GPUs that all of cuDNN supports.
CUDNN_CODE = ("libcudnn_ops", "libcudnn_cnn")


@functools.lru_cache(maxsize=1024)  # Each session asks again for the same few names.
def spec_for(name: str) -> LibrarySpec | None:
    """Return the table's entry for a soname or a DLL of any version, or None for a library that is not CUDA's."""
    if is_dll(name):
        return _BY_DLL_STEM.get(_parts_of_dll(name)[0].lower())
    return BY_STEM.get(name.split(".so", 1)[0])


def stem_of(name: str) -> str:
    """Return ``libcudnn_ops`` for libcudnn_ops.so.9 and cudnn_ops64_9.dll; empty if the library is not CUDA's."""
    spec = spec_for(name)
    return spec.stem if spec is not None else ""


def is_dll(name: str) -> bool:
    return name[-4:].lower() == ".dll"


def canonical(name: str) -> str:
    """Return a file name in the table's spelling: Windows does not tell CUBLAS64_13.DLL from cublas64_13.dll."""
    spec = spec_for(name) if is_dll(name) else None
    return f"{spec.dll_stem}{_parts_of_dll(name)[1]}.dll" if spec is not None else name


def major_of(name: str) -> int | None:
    """Return the major version in a name: 13 of libcublas.so.13, 11 of libcudart.so.11.0, 12 of nvrtc64_120_0.dll."""
    if is_dll(name):
        digits = _parts_of_dll(name)[1].split("_")[0]
        return int(digits[:-1] if len(digits) > 2 else digits) if digits else None  # 110 means 11.0.
    number = name.partition(".so.")[2].split(".")[0]
    return int(number) if number.isdigit() else None


def _parts_of_dll(name: str) -> tuple[str, str]:
    """Split the name of a DLL into the part before the version, and the version: ``cudart64_`` and ``110``."""
    match = re.fullmatch(r"(.*?_)([0-9]+(?:_[0-9]+)?)\.dll", name, re.IGNORECASE)
    return (match[1], match[2]) if match else ("", "")


def wheel_name(requirement: str) -> str:
    """Return the name in a requirement: ``nvidia-cublas`` of ``nvidia-cublas~=13.0``."""
    return requirement.split("~", 1)[0]
