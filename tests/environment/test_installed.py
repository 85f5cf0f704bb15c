"""Installed distributions: what there is, in prepared site-packages folders and in the real one."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from ortgpu.environment.packages.installed import Distribution, OnnxRuntime, Packages, locate_packages, read_packages
from ortgpu.environment.packages.plugins import Arrival
from tests.support.children import child_environment, run_child
from tests.support.made_packages import ENGINE, engine, install, names, read

# What is there


def test_one_healthy_install(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    capi = tmp_path / "onnxruntime" / "capi"
    assert engine(tmp_path) == OnnxRuntime(
        folder=str(tmp_path / "onnxruntime"),
        importable=True,
        owners=(Distribution("onnxruntime-gpu", "1.31.1", str(tmp_path), folder="onnxruntime_gpu-1.31.1.dist-info"),),
        elsewhere=(),
        build_name="onnxruntime-gpu",
        build_version="1.31.1",
        cuda_version=(13, 0),
        provider_library=str(capi / "libonnxruntime_providers_cuda.so"),
        extension=str(capi / "onnxruntime_pybind11_state.so"),
        tensorrt_library=str(capi / "libonnxruntime_providers_tensorrt.so"),
        arrival=Arrival("built in", str(capi / "libonnxruntime_providers_cuda.so")),
    )


def test_a_pipe_or_a_device_among_the_metadata_is_not_read(tmp_path: Path) -> None:
    """Reading them does not end."""
    for package, make in (("onnxruntime", os.mkfifo), ("onnx", lambda path: os.symlink("/dev/zero", path))):
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        for name in ("METADATA", "RECORD"):
            make(folder / name)
    code = "import ortgpu; ortgpu.inspect_environment()"
    run_child([sys.executable, "-c", code], env=child_environment(python_path=[tmp_path]), deadline=30).ok()


def test_nothing_installed(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found == Packages(
        OnnxRuntime(None, False, (), (), None, None, None, None, None, None), torch=None, nvidia=(), others=()
    )


def test_no_build_information_is_unknown(tmp_path: Path) -> None:
    files = dict(ENGINE)
    del files["onnxruntime/capi/build_and_package_info.py"]  # as in 1.18.1
    install(tmp_path, "onnxruntime_gpu", "1.18.1", files)
    found = engine(tmp_path)
    assert (found.build_name, found.build_version, found.cuda_version) == (None, None, None)
    assert found.importable


def test_a_cpu_build(tmp_path: Path) -> None:
    info = "package_name = 'onnxruntime'\n__version__ = '1.31.1'\n"
    install(
        tmp_path,
        "onnxruntime",
        "1.31.1",
        {"onnxruntime/__init__.py": "", "onnxruntime/capi/build_and_package_info.py": info},
    )
    found = engine(tmp_path)
    assert names(found.owners) == ["onnxruntime"]
    assert (found.build_name, found.cuda_version, found.provider_library) == ("onnxruntime", None, None)


def test_windows_names(tmp_path: Path) -> None:
    capi = tmp_path / "onnxruntime" / "capi"
    files = ("onnxruntime_providers_cuda.dll", "onnxruntime_providers_tensorrt.dll", "onnxruntime_pybind11_state.pyd")
    install(
        tmp_path,
        "onnxruntime_gpu",
        "1.31.1",
        {"onnxruntime/__init__.py": "", **{f"onnxruntime/capi/{name}": "MZ" for name in files}},
    )
    found = engine(tmp_path)
    assert (found.provider_library, found.tensorrt_library, found.extension) == tuple(str(capi / one) for one in files)


def test_the_extension_of_this_python_comes_first(tmp_path: Path) -> None:
    ours = "onnxruntime_pybind11_state" + importlib.machinery.EXTENSION_SUFFIXES[0]
    foreign = "onnxruntime_pybind11_state.cpython-30-other.so"
    install(tmp_path, "onnxruntime_gpu", "1", {"onnxruntime/__init__.py": "", f"onnxruntime/capi/{foreign}": ""})
    # One that does not fit is a fact too: the wheel of another Python was copied here.
    assert engine(tmp_path).extension == str(tmp_path / "onnxruntime" / "capi" / foreign)
    (tmp_path / "onnxruntime" / "capi" / ours).touch()
    assert engine(tmp_path).extension == str(tmp_path / "onnxruntime" / "capi" / ours)


def test_a_library_that_is_a_link_to_nothing_is_not_there(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    library = tmp_path / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    library.unlink()
    library.symlink_to("gone.so")
    found = engine(tmp_path)
    assert found.provider_library is None
    assert found.owners[0].missing_files == ("onnxruntime/capi/libonnxruntime_providers_cuda.so",)


# Other distributions


def test_which_others_are_reported(tmp_path: Path) -> None:
    for name, version in (
        ("nvidia_cublas_cu12", "12.4.5.8"),
        ("NVIDIA_cuFFT", "12.0.0"),
        ("nvidia_ml_py", "13.0"),
        ("cupy_cuda12x", "13.3.0"),
        ("numpy", "2.1.0"),
        ("tensorrt_cu13", "10.1"),
        ("requests", "2.0"),
    ):
        install(tmp_path, name, version, {})
    found = read(tmp_path)
    assert [(one.name, one.version) for one in found.nvidia] == [
        ("nvidia-cufft", "12.0.0"),
        ("nvidia-cublas-cu12", "12.4.5.8"),
    ]
    assert names(found.others) == ["cupy-cuda12x", "numpy", "nvidia-ml-py", "tensorrt-cu13"]


@pytest.mark.parametrize(
    ("text", "version", "cuda"),
    [
        pytest.param(
            "from typing import Optional\n\n__all__ = ['__version__', 'cuda']\n__version__ = '2.8.0+cu129'\n"
            "debug = False\ncuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n",
            "2.8.0+cu129",
            (12, 9),
            id="cuda",
        ),
        pytest.param("__version__ = '2.8.0+cpu'\ncuda: Optional[str] = None\n", "2.8.0+cpu", None, id="cpu"),
        pytest.param("\x00\x01", "2.9.0+cu130", None, id="garbage: the metadata's version"),
    ],
)
def test_torch(tmp_path: Path, text: str, version: str, cuda: tuple[int, int] | None) -> None:
    install(tmp_path, "torch", "2.9.0+cu130", {"torch/version.py": text})
    torch = read(tmp_path).torch
    assert torch is not None
    assert (torch.version, torch.cuda_version, torch.folder) == (version, cuda, str(tmp_path / "torch"))


def test_torch_known_by_its_metadata_only(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.9.0+cu130", {})
    torch = read(tmp_path).torch
    assert torch is not None
    assert (torch.version, torch.cuda_version) == ("2.9.0+cu130", None)


# The real environment


def installed_engine() -> importlib.metadata.Distribution | None:
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


needs_engine = pytest.mark.skipif(installed_engine() is None, reason="no onnxruntime is installed here")


@needs_engine
def test_the_real_install() -> None:
    real = installed_engine()
    assert real is not None
    found = read_packages().onnxruntime
    assert found.folder is not None
    assert Path(found.folder).samefile(Path(str(real.locate_file("onnxruntime"))))
    assert found.importable
    assert found.elsewhere == ()
    (owner,) = found.owners
    assert (owner.name, owner.version) == (real.metadata["Name"], real.version)
    assert (owner.missing_files, owner.altered_files, owner.record_readable) == ((), (), True)
    assert found.build_version == real.version
    assert found.extension is not None
    if real.metadata["Name"] == "onnxruntime-gpu":
        assert found.cuda_version is not None
        assert found.provider_library is not None


@needs_engine
def test_all_that_importlib_finds_is_found() -> None:
    found = read_packages()
    expected = {
        (one.metadata["Name"].lower().replace("_", "-"), one.version)
        for one in importlib.metadata.distributions()
        if one.metadata["Name"].lower().startswith(("nvidia", "numpy", "protobuf", "flatbuffers"))
    }
    assert {(one.name, one.version) for one in (*found.nvidia, *found.others)} >= expected
    assert expected


def test_locating_finds_the_same_files_and_no_distributions() -> None:
    located, read = locate_packages(), read_packages()
    assert located.onnxruntime.provider_library == read.onnxruntime.provider_library is not None
    assert located.onnxruntime.extension == read.onnxruntime.extension
    assert (located.onnxruntime.owners, located.nvidia, located.others) == ((), (), ())


def test_what_hides_modules_of_python_lies_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    for name in ("numbers.py", "queue.pyc", "mine.py", "random"):
        (tmp_path / "own" / name).touch()
    (tmp_path / "own" / "json").mkdir()
    (tmp_path / "own" / "json" / "__init__.py").touch()
    own, standard = str(tmp_path / "own"), os.path.dirname(os.__file__)
    hiding = (os.path.join(own, "json"), os.path.join(own, "numbers.py"))
    assert read_packages([own, standard]).hiding_standard == hiding
    assert read_packages([standard, own]).hiding_standard == ()
    monkeypatch.delattr(os, "__file__")
    assert read_packages([own]).hiding_standard == hiding
