"""Faults in Python for Windows itself: the error that each ends in, and whether its words are those of Windows.

They run under Wine, on demand: ``pytest -m windows``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.models import Models
from tests.lab.stubs import GPU, NVML, Cuda
from tests.lab.windows import PYTHON, Windows
from tests.support.children import Child

# What Windows is made of is downloaded in the setup of the first test.
pytestmark = [pytest.mark.windows, pytest.mark.timeout(1200)]

OF_LINUX = re.compile(
    r"\b(ldconfig|containers?|libcuda|sudo|docker|apt-get|LD_\w+|nvidia-smi|rm -rf|export|unset)\b"
    r"|/(proc|etc|usr)\b|\.so\b"
)

MODEL = "C:\\relu.onnx"
OPEN = """
import json, sys, numpy, ortgpu
found = {}
try:
    session = ortgpu.GPUSession(sys.argv[1], **json.loads(sys.argv[2]))
    found["providers"] = session.get_providers()
    found["y"] = session.run(None, {"x": numpy.array([-1, 2, -3, 4], "float32")})[0].tolist()
except ortgpu.GPUError as error:
    found["errors"] = {type(one).__name__: str(one) for one in (*error.others[::-1], error)}
    found["first"], found["fixes"] = type(error).__name__, error.fixes
print(json.dumps(found))
"""

RTX_4090 = GPU(name="NVIDIA GeForce RTX 4090", capability=(8, 9))
CUBLAS = "cublasLt64_13.dll"


@pytest.fixture(autouse=True)
def _a_model(windows: Windows, models: Models) -> None:
    windows.write(MODEL, models.relu.read_bytes())


def last_line(child: Child) -> Any:
    return json.loads(child.ok().stdout.splitlines()[-1])


def opened(machine: Windows, **arguments: object) -> dict[str, Any]:
    """What opening a session comes to, in words that a user of Windows can use."""
    found: dict[str, Any] = last_line(machine.python("-c", OPEN, MODEL, json.dumps(arguments)))
    assert no_words_of_linux(json.dumps(found))
    return found


def no_words_of_linux(text: str) -> bool:
    assert OF_LINUX.findall(text) == []
    return True


def test_it_is_windows(windows: Windows) -> None:
    code = "import json, os, sys; print(json.dumps([sys.platform, sys.executable, os.path.exists('/etc/os-release')]))"
    assert last_line(windows.python("-c", code)) == ["win32", PYTHON, False]


def test_no_driver(windows: Windows) -> None:
    found = opened(windows)
    assert "nvcuda.dll cannot be loaded" in found["errors"]["DriverNotFoundError"]
    assert "install an NVIDIA driver for CUDA 13" in found["errors"]["DriverNotFoundError"]


@pytest.mark.parametrize(
    ("answers", "variable", "expected", "said", "fix"),
    [
        ({"init": 100}, None, "NoDeviceError", "cuInit returned 100", "use a machine with an NVIDIA GPU"),
        ({}, "-1", "NoDeviceError", "CUDA_VISIBLE_DEVICES='-1'", "remove CUDA_VISIBLE_DEVICES"),
        (
            {"init": 999},
            None,
            "DriverUnusableError",
            "nvcuda.dll: C:\\windows\\system32\\nvcuda.dll",
            "restart Windows",
        ),
        ({"version": 12040}, None, "DriverTooOldError", "supports CUDA up to 12.4", "driver for CUDA 13"),
    ],
    ids=["none", "hidden", "999", "old"],
)
def test_a_driver_that_does_not_serve(
    answers: dict[str, int], variable: str | None, expected: str, said: str, fix: str, windows: Windows
) -> None:
    gpus = (RTX_4090,) if variable else ()
    version: dict[str, Any] = {"driver": "551.61", "cuda": answers["version"]} if "version" in answers else {}
    windows.install_driver(Cuda(devices=(RTX_4090,), **answers), replace(NVML(gpus=gpus), **version))
    variables = {"CUDA_VISIBLE_DEVICES": variable} if variable else {}
    found = windows.python("-m", "ortgpu", "doctor", "--json", variables=variables)
    assert found.returncode == 1, found.output
    problems = {one["type"]: one for one in json.loads(found.stdout)["problems"]}
    assert said in " ".join([problems[expected]["summary"], *problems[expected]["evidence"]])
    text = problems[expected]["fixes"][0]["text"]
    assert fix in text
    assert not text.startswith("or ")


def test_a_library_is_missing(windows: Windows) -> None:
    windows.install_driver(Cuda(devices=(RTX_4090,)), NVML(gpus=(RTX_4090,)))
    found = opened(windows)
    assert found["first"] == "LibraryNotFoundError"
    assert "DriverNotFoundError" not in found["errors"]
    assert f"{CUBLAS}: found nowhere" in found["errors"]["LibraryNotFoundError"]
    assert f"{PYTHON} -m pip install nvidia-cublas" in found["fixes"][0]


def test_the_advice_for_a_python_without_pip(windows: Windows) -> None:
    (fix,) = opened(windows)["fixes"]
    assert f"{PYTHON} has no pip" in fix
    assert "get-pip.py" in fix
    assert "restart" not in fix


def test_the_cpu_package_over_the_other(windows: Windows) -> None:
    windows.install_cpu_package()
    found = opened(windows)
    assert found["first"] == "ConflictingPackagesError"
    assert f"{PYTHON} -m pip uninstall -y onnxruntime onnxruntime-gpu" in found["fixes"][0]


def test_the_cpu_package_alone(windows: Windows) -> None:
    windows.remove("onnxruntime", "onnxruntime_gpu-1.31.1.dist-info")
    windows.install_cpu_package()
    assert opened(windows)["first"] == "CPUOnlyPackageError"


def test_no_onnxruntime(windows: Windows) -> None:
    windows.remove("onnxruntime", "onnxruntime_gpu-1.31.1.dist-info")
    assert opened(windows)["first"] == "OnnxRuntimeNotInstalledError"


def test_no_provider_file(windows: Windows) -> None:
    windows.remove("onnxruntime/capi/onnxruntime_providers_cuda.dll")
    found = opened(windows)
    assert found["first"] == "BrokenPackageError"
    assert "onnxruntime_providers_cuda.dll" in found["errors"]["BrokenPackageError"]


def test_the_cpu_is_allowed(windows: Windows) -> None:
    found = opened(windows, allow_cpu=True)
    assert found == {"providers": ["CPUExecutionProvider"], "y": [0.0, 2.0, 0.0, 4.0]}


def test_a_misspelt_provider(windows: Windows) -> None:
    found = opened(windows, providers=["CUDAExecutionProvder"])
    assert (found["first"], found["fixes"]) == ("ProviderRequestError", ["write 'CUDAExecutionProvider'"])


def test_doctor(windows: Windows) -> None:
    windows.write("C:\\etc\\os-release", b'PRETTY_NAME="Debian"\n')
    windows.write("C:\\.dockerenv")
    windows.write("C:\\proc\\meminfo", b"MemTotal: 1 kB\n")
    windows.write("C:\\proc\\driver\\nvidia\\version", b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n")
    windows.write("C:\\dev\\nvidia0")
    found = windows.python("-m", "ortgpu", "doctor", "--json")
    assert found.returncode == 1, found.output
    said = json.loads(found.stdout)
    assert {problem["type"] for problem in said["problems"]} == {"LibraryNotFoundError", "DriverNotFoundError"}
    assert no_words_of_linux(json.dumps(said["problems"]))
    host, driver = said["environment"]["host"], said["environment"]["driver"]
    assert (host["system"], host["machine"], host["python"]) == ("Windows", "AMD64", [3, 11, 9])
    assert [host[name] for name in ("container", "libc", "wsl")] == [None, None, False]
    assert host["os_name"].startswith("Windows 10 10.0.")
    assert host["memory_total"] > 1 << 28
    assert (driver["kernel_version"], driver["device_nodes"], driver["libcuda"]) == (None, [], None)


def test_the_page_of_doctor(windows: Windows) -> None:
    found = windows.python("-m", "ortgpu", "doctor")
    assert found.returncode == 1, found.output
    assert re.search(r"^  driver +nvcuda\.dll cannot be loaded$", found.stdout, re.MULTILINE), found.output
    assert no_words_of_linux(found.stdout)


def test_check(windows: Windows) -> None:
    found = windows.python("-m", "ortgpu", "check", MODEL)
    assert found.returncode == 1, found.output
    assert "LibraryNotFoundError" in found.stdout + found.stderr
    assert no_words_of_linux(found.stdout + found.stderr)


def test_explain(windows: Windows) -> None:
    found = windows.python("-m", "ortgpu", "explain", "driver-not-found").ok()
    assert "nvcuda.dll" in found.stdout
