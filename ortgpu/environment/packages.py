"""Facts about installed distributions, read without importing any of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """One installed distribution, as its metadata and the disk tell it."""

    name: str  # normalised: "onnxruntime-gpu"
    version: str | None
    location: str  # the folder that holds its dist-info, e.g. .../site-packages
    missing_files: tuple[str, ...] = ()  # in RECORD and not on disk, relative to location
    altered_files: tuple[str, ...] = ()  # on disk with another size (or, small files, another hash) than RECORD says
    record_readable: bool = True


@dataclass(frozen=True, slots=True)
class OnnxRuntime:
    """What `import onnxruntime` would find."""

    folder: str | None  # of the package that would be imported; None: nothing would be
    importable: bool  # folder has an __init__.py (False: the namespace leftover of an uninstall)
    owners: tuple[Distribution, ...]  # distributions that claim files in that very folder
    elsewhere: tuple[Distribution, ...]  # distributions that own an onnxruntime folder in another place (shadowed)
    build_name: str | None  # package_name of capi/build_and_package_info.py
    build_version: str | None
    cuda_version: tuple[int, int] | None  # the CUDA that the build names
    provider_library: str | None  # path of libonnxruntime_providers_cuda.so / .dll, if it is there
    extension: str | None  # path of onnxruntime_pybind11_state
    tensorrt_library: str | None  # path of libonnxruntime_providers_tensorrt.so / .dll, if it is there


@dataclass(frozen=True, slots=True)
class Torch:
    version: str | None
    cuda_version: tuple[int, int] | None  # None: a build without CUDA, or unknown
    folder: str


@dataclass(frozen=True, slots=True)
class Packages:
    onnxruntime: OnnxRuntime
    torch: Torch | None
    nvidia: tuple[Distribution, ...]  # nvidia-* wheels (without RECORD comparison)
    others: tuple[Distribution, ...]  # numpy, onnx, protobuf, flatbuffers, nvidia-ml-py, cupy-*, torchvision ...
