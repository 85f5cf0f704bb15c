"""Each change of a healthy machine, and the one finding that it is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from ortgpu.diagnosis.probe.result import ProbeStep
from ortgpu.environment.gpu.cuda import CudaState
from ortgpu.environment.gpu.driver import RefusedNode, UnlinkedFile
from ortgpu.environment.host import OpenFiles
from ortgpu.environment.libraries.search import Candidate
from ortgpu.environment.libraries.wheel import Architecture, ProviderLibrary
from ortgpu.environment.packages.installed import Distribution, RefusedPath
from ortgpu.environment.packages.installer import Manager
from ortgpu.environment.packages.interpreter import IN_SUB_INTERPRETER
from ortgpu.environment.packages.plugins import Arrival, PluginPackage
from ortgpu.environment.variables import Variables
from ortgpu.model.contents import ModelFacts
from ortgpu.provider.placement import PlacedNode
from ortgpu.provider.preloading import MissingLibrary
from tests.support.made_facts import (
    CPU_ENGINE,
    CPU_ENGINE_THERE,
    CUDA_H200,
    CUDNN_13,
    ENGINE,
    FOLDER,
    H200,
    HEALTHY,
    NO_DRIVER,
    NO_ENGINE,
    NO_LIBRARIES,
    NO_PROVIDER,
    PROVIDER,
    SITE,
    SYMBOL,
    UUID,
    Change,
    all_of,
    cuda_failed,
    engine,
    environment,
    gpus,
    nvml,
    observed,
    owned,
    part,
    preloaded,
    probed,
    processes,
    refused,
    request,
    variables,
    without,
)

NO_MODULE: dict[str, Any] = {"available": False, "error": "Driver Not Loaded", "driver_version": None,
    "cuda_version": None, "gpus": (), "code": 9}  # fmt: skip


OLD_DRIVER = all_of(
    part("driver", cuda_version=(12, 8), kernel_version="570.86.15"),
    nvml(cuda_version=(12, 8), driver_version="570.86.15"),
)
OF_WINDOWS = all_of(
    part("host", wsl=True),
    part("driver", libcuda="/usr/lib/wsl/lib/libcuda.so.1.1", device_nodes=("/dev/dxg",), kernel_version=None),
)
OF_A_JETSON = part("driver", device_nodes=("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap"))

#: ONNX Runtime for CUDA 12 has code for it, and cuDNN 9.11 has none
OLD_GPU = all_of(
    gpus((7, 0)),
    part("provider", architectures=(Architecture(7, 0, False, False),)),
    environment(cudnn_architectures=(Architecture(7, 5, False, False), Architecture(8, 0, False, False))),
)

PLUGIN = PluginPackage("onnxruntime-ep-cuda13", "1.31.1", SITE, f"{SITE}/onnxruntime_ep_cuda13",
    f"{SITE}/onnxruntime_ep_cuda13/libonnxruntime_providers_cuda.so")  # fmt: skip
WITHOUT_LIBRARY = replace(PLUGIN, library=None)
PLUGIN_THERE = all_of(
    engine(build_name="onnxruntime", owners=(CPU_ENGINE,), cuda_version=None, provider_library=PLUGIN.library,
        plugins=(PLUGIN,), arrival=Arrival("plugin package", str(PLUGIN.library), PLUGIN)),
    environment(provider=HEALTHY.environment.provider, bridge=HEALTHY.environment.bridge),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``error`` is the finding's class, ``says`` what its text holds."""

    name: str
    change: Change
    error: str
    says: str
    severity: str = "fatal"
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = [
    # Packages
    Case("another system", part("host", system="Darwin", machine="arm64"), "UnsupportedPlatformError", "Darwin arm64",
        details={"system": "Darwin", "machine": "arm64"}),
    Case("a Python for 32 bits", all_of(NO_ENGINE, part("host", system="Windows", machine="x86")),
        "UnsupportedPlatformError", "use a Python for 64 bits"),
    Case("a package that may not be read", all_of(engine(importable=False),
        part("packages", refused=(RefusedPath(FOLDER, "drwx------", False),))), "BrokenPackageError",
        f"sudo chmod -R a+rX {FOLDER}"),
    Case("a guard that may not be read", all_of(variables(ORTGPU_ENFORCE="1"),
        part("packages", refused=(RefusedPath(f"{SITE}/_ortgpu_hook.py", "-rw-------", False),))), "BrokenPackageError",
        f"sudo chmod -R a+rX {SITE}/_ortgpu_hook.py", "warning"),
    Case("nothing installed", NO_ENGINE, "OnnxRuntimeNotInstalledError", "pip install"),
    Case("nothing installed on a Jetson", all_of(NO_ENGINE, OF_A_JETSON), "OnnxRuntimeNotInstalledError",
        "NVIDIA's build of ONNX Runtime for this Jetson's JetPack"),
    Case("the CPU package on a Jetson", all_of(CPU_ENGINE_THERE, OF_A_JETSON), "CPUOnlyPackageError",
        "uninstall -y onnxruntime, then install NVIDIA's build of ONNX Runtime for this Jetson's JetPack"),
    Case("two packages on a Jetson, the GPU build was overwritten",
        all_of(NO_PROVIDER, engine(owners=(ENGINE, CPU_ENGINE), build_name="onnxruntime"), OF_A_JETSON),
        "ConflictingPackagesError", "uninstall -y onnxruntime-gpu onnxruntime, then install NVIDIA's build"),
    Case("a stray module", engine(shadowed_by="/app/onnxruntime.py"), "BrokenPackageError", "/app/onnxruntime.py",
        details={"files": ("/app/onnxruntime.py",)}),
    Case("a leftover folder", engine(importable=False), "BrokenPackageError", f"rm -rf {FOLDER}"),
    Case("a missing file", owned(missing_files=("onnxruntime/capi/_pybind_state.py",)), "BrokenPackageError",
        "--force-reinstall", details={"files": ("onnxruntime/capi/_pybind_state.py",)}),
    Case("an altered file", owned(altered_files=("onnxruntime/__init__.py",)), "BrokenPackageError",
        "changed since its installation: onnxruntime/__init__.py"),
    Case("a missing provider on record",
        all_of(NO_PROVIDER, owned(missing_files=("onnxruntime/capi/libonnxruntime_providers_cuda.so",))),
        "BrokenPackageError", "libonnxruntime_providers_cuda.so"),
    Case("a missing provider", NO_PROVIDER, "BrokenPackageError", "CUDA provider library"),
    Case("two packages, the GPU build whole", engine(owners=(CPU_ENGINE, ENGINE)), "ConflictingPackagesError",
        "onnxruntime and onnxruntime-gpu share one folder", "warning",
        details={"packages": ("onnxruntime", "onnxruntime-gpu")}),
    Case("two packages, the GPU build was overwritten",
        all_of(NO_PROVIDER, engine(owners=(ENGINE, CPU_ENGINE), build_name="onnxruntime")), "ConflictingPackagesError",
        "the GPU build was overwritten"),
    Case("a GPU build that was upgraded after it was held",
        part("packages", held=(replace(CPU_ENGINE, version="1.30.0"),)),
        "ConflictingPackagesError", "onnxruntime-gpu 1.31.1 is held as onnxruntime 1.30.0", "warning"),
    Case("two packages, holes",
        engine(owners=(CPU_ENGINE, replace(ENGINE, altered_files=("onnxruntime/__init__.py",)))),
        "ConflictingPackagesError", "1 of its files missing or overwritten"),
    Case("the CPU package", CPU_ENGINE_THERE, "CPUOnlyPackageError", "pip uninstall -y onnxruntime &&",
        details={"package": "onnxruntime", "version": "1.31.1"}),
    *(
        Case(f"{name} in a project of {manager.name}", all_of(facts, part("installer", manager=manager)), error, words)
        for name, facts, error in (
            ("the CPU package", CPU_ENGINE_THERE, "CPUOnlyPackageError"),
            ("two packages", all_of(NO_PROVIDER, engine(owners=(ENGINE, CPU_ENGINE), build_name="onnxruntime")),
                "ConflictingPackagesError"),
        )
        for manager, words in (
            (Manager("uv", "/app/uv.lock", "uv add"), "or else /app/uv.lock brings it back"),
            (Manager("poetry", "/app/poetry.lock", "poetry add"), "or else /app/poetry.lock brings it back"),
        )
    ),
    Case("the CPU package before the GPU one",
        all_of(CPU_ENGINE_THERE, engine(elsewhere=(replace(ENGINE, location="/usr"),))), "CPUOnlyPackageError",
        "shadowed by it: onnxruntime-gpu 1.31.1 in /usr"),
    Case("no CUDA in the build", observed(available_providers=("CPUExecutionProvider",)), "CPUOnlyPackageError",
        "without CUDA"),
    Case("the GPU build, installed after the CPU build was imported", all_of(
        engine(imported_as=("onnxruntime", "1.31.1")), observed(available_providers=("CPUExecutionProvider",))),
        "BrokenPackageError", "restart its kernel"),
    Case("the CPU build, installed after the GPU build was imported", all_of(
        NO_PROVIDER, engine(owners=(ENGINE, CPU_ENGINE), build_name="onnxruntime",
        imported_as=("onnxruntime-gpu", "1.31.1"))), "ConflictingPackagesError", "the GPU build was overwritten"),
    *(
        Case(f"a damaged {name}", part(name, problem="truncated: 5 of 9 bytes"), "BrokenPackageError",
            "truncated: 5 of 9 bytes",)
        for name in ("extension", "bridge", "provider")
    ),
    Case("import fails", observed(import_error="ImportError: DLL load failed"), "BrokenPackageError",
        "DLL load failed"),
    Case("a sub-interpreter", observed(import_error=IN_SUB_INTERPRETER), "BrokenPackageError", "WSGIApplicationGroup"),
    Case("a processor that NumPy has no code for", observed(
        import_error="ImportError: import numpy failed",
        numpy_error="RuntimeError: NumPy was built with baseline optimizations: \n(AVX2) but your machine doesn't"),
        "BrokenPackageError", "libvirt: host-passthrough"),
    Case("no InferenceSession", observed(has_session=False), "BrokenPackageError", "InferenceSession"),
    Case("an old C library", observed(import_error="ImportError: /lib/libc.so.6: version `GLIBC_2.34' not found"),
        "UnsupportedPlatformError", "GLIBC_2.34"),
    Case("a library of Visual C++ missing", all_of(
        environment(system_libraries_missing=("MSVCP140_ATOMIC_WAIT.dll",)),
        observed(import_error="ImportError: DLL load failed while importing onnxruntime_pybind11_state: ?")),
         "LibraryNotFoundError", "Visual C++ Redistributable", details={"missing": ("MSVCP140_ATOMIC_WAIT.dll",)}),
    Case("a library of Visual C++ that the provider links", all_of(
        environment(system_libraries_missing=("MSVCP140_ATOMIC_WAIT.dll",)),
        observed(provider_error="MSVCP140_ATOMIC_WAIT.dll, which it links, was not found (error 126)")),
         "LibraryNotFoundError", "Visual C++ Redistributable", details={"missing": ("MSVCP140_ATOMIC_WAIT.dll",)}),
    Case("an ONNX Runtime of Windows' own", all_of(
        environment(mapped=(r"C:\Windows\System32\onnxruntime.dll",)),
        observed(import_error="ImportError: The requested API version [24] is not available, only [1, 17] are")),
         "LibraryConflictError", r"C:\Windows\System32\onnxruntime.dll"),
    Case("an executable stack", observed(
        import_error="ImportError: cannot enable executable stack as shared object requires: Invalid argument"),
        "BrokenPackageError", "onnxruntime-gpu>=1.28"),
    # CUDA as a plugin
    Case("a plugin package without its library", all_of(CPU_ENGINE_THERE, engine(plugins=(WITHOUT_LIBRARY,))),
        "BrokenPackageError", f"expected in {PLUGIN.folder}", details={"package": "onnxruntime-ep-cuda13"}),
    Case("a plugin package without its module", all_of(CPU_ENGINE_THERE,
        engine(plugins=(replace(WITHOUT_LIBRARY, folder=None),))), "BrokenPackageError", f"is not in {SITE}"),
    Case("a plugin package without its library beside CUDA built in",
        engine(plugins=(WITHOUT_LIBRARY,), arrival=Arrival("built in", PROVIDER)), "BrokenPackageError",
        "the plugin package onnxruntime-ep-cuda13 1.31.1 has no CUDA provider library", "warning"),
    Case("a plugin and a release before there were any", all_of(PLUGIN_THERE, engine(build_version="1.22.0"),
        observed(plugin_problem="no plugins")), "CPUOnlyPackageError", "1.22.0 has no CUDA, and supports no plugins",
        details={"version": "1.22.0"}),
    Case("a plugin of another release", all_of(PLUGIN_THERE, engine(build_version="1.32.0"),
        environment(release_wanted="1.31.1")), "LibraryVersionError",
        "belongs to ONNX Runtime 1.31.1, but onnxruntime 1.32.0 is installed", details={"needed":
        ("onnxruntime 1.31.1",)}),
    Case("a plugin package with a damaged library", all_of(PLUGIN_THERE, environment(
        provider=ProviderLibrary(str(PLUGIN.library), "not an ELF file", (), (), None))),
        "BrokenPackageError", "install onnxruntime-ep-cuda13 again",
        details={"package": "onnxruntime-ep-cuda13"}),
    Case("a provider that is no plugin", all_of(PLUGIN_THERE, observed(
        provider_error=f"{PLUGIN.library}: undefined symbol: CreateEpFactories")), "LibraryVersionError",
        "lacks CreateEpFactories"),
    Case("a plugin that lists no GPU", all_of(PLUGIN_THERE, observed(plugin_problem="no device")), "NoDeviceError",
        "/sys/bus/pci/devices"),
    Case("a plugin that nobody registered", all_of(PLUGIN_THERE, observed(plugin_problem="not registered")),
        "CPUOnlyPackageError", "import onnxruntime, onnxruntime_ep_cuda13 as plugin"),
    Case("a bundled plugin that was not registered", all_of(PLUGIN_THERE,
        engine(arrival=Arrival("bundled plugin", PROVIDER)), observed(plugin_problem="not registered")),
        "CPUOnlyPackageError", "was not registered when it was imported"),
    Case("a plugin for a newer CUDA than the driver's", all_of(PLUGIN_THERE, OLD_DRIVER), "DriverTooOldError",
        "or else install this plugin for CUDA 12"),
    Case("a plugin without a package that nobody registered", all_of(PLUGIN_THERE,
        engine(arrival=Arrival("registered by the program", "/app/libplugin.so")),
        observed(plugin_problem="not registered")), "CPUOnlyPackageError",
        "register_execution_provider_library('CUDAExecutionProvider', '/app/libplugin.so')"),
    # Libraries
    Case("a model that works between processes",
         all_of(request(collective_operators=("AllReduce",)), observed(has_collective_ops=False)),
         "CollectiveOpsUnavailableError", "AllReduce"),
    Case("one library missing", without("libcurand.so.10"), "LibraryNotFoundError", "nvidia-curand~=10.0",
        details={"missing": ("libcurand.so.10",)}),
    Case("a library of a project of Poetry", all_of(without("libcurand.so.10"),
        part("installer", manager=Manager("poetry", "/app/poetry.lock", "poetry add"))),
        "LibraryNotFoundError", "poetry add 'nvidia-curand~=10.0'", details={"missing": ("libcurand.so.10",)}),
    Case("all libraries missing", NO_LIBRARIES, "LibraryNotFoundError", "found nowhere",
        details={"missing": ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10")}),
    Case("another version of it", without("libcublas.so.13", found="libcublas.so.12"), "LibraryVersionError",
        "/usr/lib/libcublas.so.12", details={"found": {"libcublas.so.13": "/usr/lib/libcublas.so.12"}}),
    Case("a library that could not be opened", preloaded(missing=(MissingLibrary("libcurand.so.10", True,
        "nvidia-curand~=10.0",
        (Candidate("libcurand.so.10", "/x/libcurand.so.10", "directory", "/x", "file too short"),),),)),
        "LibraryNotFoundError", "/x/libcurand.so.10 is unusable (directory): file too short"),
    Case("a library that no wheel has", preloaded(missing=(MissingLibrary("libfoo.so.1", True, None, ()),)),
        "LibraryNotFoundError", "install the system package that has libfoo.so.1"),
    Case("a missing symbol", all_of(preloaded(), observed(provider_error=SYMBOL)), "LibraryVersionError",
        "cublasLtMatmul", details={"needed": ("libcublasLt.so.13",)}),
    Case("a provider that needs more",
        all_of(preloaded(), observed(provider_error="libfoo.so.1: cannot open shared object file")),
        "LibraryNotFoundError", "libfoo.so.1"),
    Case("a provider that does not open", all_of(preloaded(), observed(provider_error="invalid ELF header")),
        "BrokenPackageError", "invalid ELF header"),
    Case("no cuDNN", without(CUDNN_13), "LibraryNotFoundError", "models with convolutions", "warning"),
    Case("no cuDNN for a model that needs it", all_of(without(CUDNN_13), request(cudnn_operators=("Conv",))),
        "LibraryNotFoundError", "this model's Conv nodes need libcudnn.so.9", details={"missing": (CUDNN_13,)}),
    Case("no cuFFT", without("libcufft.so.12"), "LibraryNotFoundError", "Fourier", "warning"),
    Case("no cuFFT for a model that needs it", all_of(without("libcufft.so.12"), request(cufft_operators=("Rfft",))),
        "LibraryNotFoundError", "this model's Rfft nodes need libcufft.so.12"),
    Case(
        "cuDNN for another CUDA", preloaded(cudnn_cuda_major=12), "LibraryConflictError", "built for CUDA 12",
        "warning"),
    Case("cuDNN for another CUDA, and a model that needs it",
        all_of(preloaded(cudnn_cuda_major=12), request(cudnn_operators=("Conv",))), "LibraryConflictError",
        "ONNX Runtime for CUDA 13"),
    Case("cuDNN of two releases", preloaded(cudnn_mixed=("/b/libcudnn.so.9", "/b/libcudnn_ops.so.9")),
        "LibraryConflictError", "from /b: libcudnn.so.9, libcudnn_ops.so.9", "warning"),
    Case("cuDNN of two releases, and a model that needs it",
        all_of(preloaded(cudnn_mixed=("/b/libcudnn.so.9",)), request(cudnn_operators=("Conv",))),
        "LibraryConflictError", "install cuDNN again: /b holds files of several releases"),
    Case("cuDNN of two folders", all_of(preloaded(cudnn_mixed=("/b/libcudnn.so.9", "/a/libcudnn_ops.so.9")),
        variables(LD_LIBRARY_PATH="/a:/c")), "LibraryConflictError", "export LD_LIBRARY_PATH=/c", "warning",
        details={"libraries": ("/b/libcudnn.so.9", "/a/libcudnn_ops.so.9")}),
    Case("a NumPy with a hole", part("packages", others=(
        Distribution("numpy", "2.4.6", SITE, altered_files=("numpy/_core/_multiarray_umath.so",)),
    )), "BrokenPackageError", "numpy==2.4.6"),
    Case("a library of another size", part("packages", nvidia=(
        Distribution("nvidia-cublas", "13.1.0", SITE, altered_files=("nvidia/cu13/lib/libcublas.so.13",)),)),
        "BrokenPackageError", "--force-reinstall --no-deps nvidia-cublas==13.1.0", "warning"),
    # Devices
    Case("a device that is not there", request(device=3), "DeviceNotFoundError", UUID, details={"requested": 3}),
    Case("a UUID that is not there", request(device="GPU-9999"), "DeviceNotFoundError", UUID),
    Case("a device that CUDA does not have",
        all_of(observed(cuda=CudaState(0, (CUDA_H200,), 1)), request(device="cuda:1")), "DeviceNotFoundError",
        "cuda:0 NVIDIA H200", details={"requested": "cuda:1"}),
    Case("a GPU that is too old", gpus((6, 1)), "UnsupportedDeviceError", "sm_80, sm_90a",
        details={"compute_capability": (6, 1), "architectures": ("sm_80", "sm_90a")}),
    Case("a GPU that is too new", gpus((12, 1)), "UnsupportedDeviceError", "12.1"),
    Case("machine code that CUDA is told to pass over", variables(CUDA_FORCE_PTX_JIT="1"), "UnsupportedDeviceError",
        "unset CUDA_FORCE_PTX_JIT", details={"compute_capability": (9, 0)}),
    Case("two of them", gpus((6, 1), (7, 0)), "UnsupportedDeviceError", "6.1"),
    Case("a cuDNN without code for the GPU", all_of(OLD_GPU, request(cudnn_operators=("Conv",))),
        "UnsupportedDeviceError", "the installed cuDNN holds no code for GPU (7, 0)",
        details={"compute_capability": (7, 0), "architectures": ("sm_75", "sm_80")}),
    Case("the one that is named", all_of(gpus((9, 0), (7, 0)), request(device="GPU-1")), "UnsupportedDeviceError",
        "7.0"),
    Case("a Jetson, and a build for other GPUs", all_of(OF_A_JETSON, gpus((8, 7)),
        part("provider", architectures=(Architecture(8, 9, False, False), Architecture(9, 0, False, True)))),
        "UnsupportedDeviceError", "NVIDIA's build of ONNX Runtime for this Jetson's JetPack"),
    Case("every GPU hidden", variables(CUDA_VISIBLE_DEVICES=""), "NoDeviceError", "unset CUDA_VISIBLE_DEVICES"),
    Case("every GPU hidden by -1", variables(CUDA_VISIBLE_DEVICES="-1"), "NoDeviceError", "hides every GPU"),
    *(
        Case(f"every GPU hidden {when}", environment(variables=Variables({"CUDA_VISIBLE_DEVICES": "-1"}, at_start)),
            "NoDeviceError", what)
        for when, at_start, what in (
            ("by the program", {}, "sets CUDA_VISIBLE_DEVICES itself: remove that"),
            ("by the program, and another before", {"CUDA_VISIBLE_DEVICES": "0"}, "sets CUDA_VISIBLE_DEVICES itself"),
            ("before the start, or not", None, "unset CUDA_VISIBLE_DEVICES"),
        )
    ),
    Case("machine code that the program tells CUDA to pass over",
        environment(variables=Variables({"CUDA_FORCE_PTX_JIT": "1"}, {})), "UnsupportedDeviceError",
        "sets CUDA_FORCE_PTX_JIT itself"),
    Case("no GPU", nvml(gpus=()), "NoDeviceError", "NVML sees 0 GPUs"),
    Case("a GPU that the driver left out", all_of(nvml(gpus=()), cuda_failed(100)), "NoDeviceError",
        "To fix it:\n    sudo dmesg | grep -i nvrm\n    install the right driver"),
    *(
        Case(f"no GPU for the driver {where}", all_of(nvml(gpus=()), cuda_failed(100), part("host", **there)),
            "NoDeviceError", f"To fix it:\n    {start} with its GPU: `docker run --gpus all")
        for where, start, there in (("in a container", "start the container", {"container": "docker"}),
            ("on the bus", "in a container, start it", {"display_vendors": frozenset({0x8086})}),
            ("where nothing is known of the bus", "in a container, start it", {"display_vendors": None}))
    ),
    Case("a driver without a module for an older GPU", all_of(nvml(**NO_MODULE), part("driver", kernel_version=None),
        cuda_failed(100)), "DriverUnusableError", "a GPU older than the RTX 20 series with driver 590 or newer"),
    Case("CUDA sees none", cuda_failed(100), "NoDeviceError", "cuInit returned 100"),
    Case("CUDA counts none", observed(cuda=CudaState(0, (), 1)), "NoDeviceError", "CUDA sees no GPU"),
    Case("CUDA sees none of NVML's", cuda_failed(100), "NoDeviceError",
        "To fix it:\n    sudo dmesg | grep -iE 'xid|nvrm'\n    reboot"),
    Case("CUDA sees none of NVML's in a container", all_of(cuda_failed(100), part("host", container="podman")),
        "NoDeviceError", "start this container again with its GPU: `podman run --device nvidia.com/gpu=all"),
    Case("CUDA sees none of NVML's in WSL", all_of(OF_WINDOWS, cuda_failed(100)), "NoDeviceError",
        "To fix it:\n    restart WSL"),
    Case("compute mode prohibited", processes("prohibited"), "DeviceBusyError", "nvidia-smi -i",
        details={"uuid": UUID}),
    Case("compute mode prohibited, in a container", all_of(processes("prohibited"), part("host", container="docker")),
        "DeviceBusyError", "on the container's host: sudo nvidia-smi -i"),
    *(Case(f"the driver of a container's host failed with {code}", all_of(cuda_failed(code),
        part("host", container="docker")), "DriverUnusableError", f"on the container's host: {fix}")
      for code, fix in ((123, "sudo dmesg"), (803, "reboot"), (999, "sudo dmesg | grep -i xid"))),
    Case("another process holds it", cuda_failed(46), "DeviceBusyError", "no further process",
        details={"uuid": UUID}),
    # Driver
    Case("no driver", NO_DRIVER, "DriverNotFoundError", "580.65 or newer"),
    *(Case(f"no driver in {runtime}", all_of(NO_DRIVER, part("host", container=runtime)), "DriverNotFoundError", how)
      for runtime, how in (("docker", "--gpus all"), ("kubernetes", "nvidia.com/gpu: 1"), ("apptainer", "--nv"),
                           ("podman", "--device nvidia.com/gpu=all"), ("systemd-nspawn", "with its GPU"))),
    *(Case(f"no GPU on {service}", all_of(NO_DRIVER, part("host", container="docker", service=service)),
        "DriverNotFoundError", how)
      for service, how in (("Google Colab", "Change runtime type"), ("AWS Lambda", "AWS Lambda has none"),
                           ("Hugging Face ZeroGPU", "@spaces.GPU"))),
    Case("the driver of a service without a GPU", all_of(cuda_failed(100), nvml(gpus=()),
        part("driver", kernel_version=None, device_nodes=()), part("host", service="Kaggle")), "NoDeviceError",
        "Settings > Accelerator"),
    Case("no compute in the container", all_of(part("driver", libcuda=None, libcuda_error="not found"),
        part("host", container="docker"), variables(NVIDIA_DRIVER_CAPABILITIES="utility"),), "DriverNotFoundError",
        "NVIDIA_DRIVER_CAPABILITIES=utility"),
    Case("no driver in WSL", all_of(NO_DRIVER, part("host", wsl=True), part("driver", device_nodes=("/dev/dxg",))),
        "DriverNotFoundError", "/usr/lib/wsl/lib"),
    Case("no GPU in WSL, and no driver", all_of(NO_DRIVER,
        part("host", wsl=True, display_vendors=frozenset({0x1414}))), "DriverNotFoundError",
        "wsl --set-version"),
    Case("no GPU in WSL", all_of(part("host", wsl=True), part("driver", libcuda="/usr/lib/wsl/lib/libcuda.so.1"),
        cuda_failed(100), nvml(gpus=())), "NoDeviceError", "wsl --set-version"),
    Case("no driver in a container in WSL", all_of(NO_DRIVER, part("host", wsl=True, container="docker")),
        "DriverNotFoundError", "docker run --gpus all"),
    Case("a part of the driver is not installed", all_of(NO_DRIVER, part("driver", kernel_version="580.95.05")),
        "DriverNotFoundError", "the part of driver 580.95.05 that has libcuda.so.1"),
    Case("the driver may not be mapped", all_of(NO_DRIVER,
        part("driver", libcuda_error="libcuda.so.1: failed to map segment from shared object")),
        "DriverNotFoundError", "without noexec"),
    Case("a driver where the loader does not look", all_of(NO_DRIVER, part("host", container="kubernetes"),
        part("driver", libcuda_elsewhere=("/usr/local/nvidia/lib64/libcuda.so.1",))), "DriverNotFoundError",
        'export LD_LIBRARY_PATH=/usr/local/nvidia/lib64"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"'),
    Case("a driver without its link", all_of(NO_DRIVER, part("host", container="kubernetes"),
        part("driver", libcuda_unlinked=(UnlinkedFile("/usr/lib64/libcuda.so.580.65.06", True),))),
        "DriverNotFoundError", "/sbin/ldconfig -n /usr/lib64"),
    Case("a driver without its link, on a read-only file system", all_of(NO_DRIVER,
        part("driver", libcuda_unlinked=(UnlinkedFile("/usr/lib64/libcuda.so.580.65.06", False),))),
        "DriverNotFoundError", 'ln -s /usr/lib64/libcuda.so.580.65.06 "$links/libcuda.so.1"'),
    Case("the files that another container left", all_of(NO_DRIVER, part("host", container="docker"),
        part("driver", libcuda_error="/usr/lib64/libcuda.so.1: file too short")), "DriverNotFoundError",
        "find /usr/lib64 -name 'lib*.so*' -size 0 -delete"),
    Case("an AMD GPU", all_of(NO_DRIVER, part("host", display_vendors=frozenset({0x1002}))), "DriverNotFoundError",
        "onnxruntime-migraphx"),
    Case("a GPU of Intel", all_of(NO_DRIVER, part("host", display_vendors=frozenset({0x8086}))), "DriverNotFoundError",
        "no GPU of NVIDIA is on the PCI bus"),
    Case("an old driver", OLD_DRIVER, "DriverTooOldError", "CUDA up to 12.8",
        details={"driver_cuda": (12, 8), "needed_cuda": (13, 0), "driver_version": "570.86.15"}),
    Case("an old driver, as NVML says", all_of(part("driver", cuda_version=None, kernel_version="470.57.02"),
        nvml(cuda_version=(11, 4), driver_version="470.57.02")), "DriverTooOldError", "CUDA up to 11.4"),
    Case("an old driver, as CUDA says", cuda_failed(35), "DriverTooOldError", "580.65"),
    *(
        Case(f"an old driver {where}", all_of(OLD_DRIVER, change), "DriverTooOldError", says)
        for where, change, says in (
            ("in a container", part("host", container="docker"), "the host has NVIDIA driver 580.65 or newer"),
            ("in WSL", OF_WINDOWS, "install an NVIDIA driver for CUDA 13 in Windows, and none inside WSL"),
            # nvidia-container-toolkit issue 289: the library of Windows lies where those of Linux do
            ("of Windows, in a container in WSL", all_of(OF_WINDOWS, part("host", container="docker"),
                part("driver", libcuda="/usr/lib/x86_64-linux-gnu/libcuda.so.1.1")), "in Windows, and none inside WSL"),
            ("on a Jetson", OF_A_JETSON, "install a JetPack with CUDA 13"),
        )
    ),
    *(
        Case(f"cuInit {code}", cuda_failed(code), "DriverUnusableError", says, details={"cuda_code": code})
        for code, says in {
            3: "spawn",
            34: "stub",
            214: "memory error",
            802: "fabric",
            803: "reboot",
            804: "cuda-compat",
            999: "Xid",
            304: "CUDA_ERROR_OPERATING_SYSTEM",
            12345: "CUDA error 12345",
        }.items()
    ),
    *(
        Case(f"cuInit {code} in WSL", all_of(OF_WINDOWS, cuda_failed(code)), "DriverUnusableError", says)
        for code, says in ((3, "spawn method\n    restart WSL"), (803, "To fix it:\n    restart WSL (wsl --shutdown"),
            (999, "To fix it:\n    restart WSL (wsl --shutdown"))
    ),
    Case("no right to a device file", all_of(refused(RefusedNode("/dev/nvidiactl", "EACCES", "video")),
        cuda_failed(999)), "DriverUnusableError", "make this user a member of video", details={"cuda_code": 999}),
    *(
        Case(f"no right to a device file of {group} in a container", all_of(part("host", container="docker"),
            refused(RefusedNode("/dev/nvidiactl", "EACCES", group)), cuda_failed(999)), "DriverUnusableError", word)
        for group, word in (("video", "docker run --group-add video"), ("root", "on the container's host: "))
    ),
    Case("SELinux", all_of(refused(RefusedNode("/dev/nvidiactl", "EACCES", "root", by_mode=False)), cuda_failed(999)),
        "DriverUnusableError", "--security-opt label=disable"),
    Case("a service of systemd that may open few devices", all_of(
        refused(RefusedNode("/dev/nvidiactl", "EPERM", "root")), cuda_failed(100)), "DriverUnusableError",
        "DeviceAllow=char-nvidia* rw", details={"cuda_code": 100}),
    Case("a right that was withdrawn", all_of(refused(RefusedNode("/dev/nvidia-uvm", "EPERM", "root")),
        cuda_failed(304)), "DriverUnusableError", "daemon-reload", details={"cuda_code": 304}),
    Case("no right to any GPU, and CUDA sees none", all_of(refused(RefusedNode("/dev/nvidia0", "EACCES", "root")),
        cuda_failed(100)), "DriverUnusableError", "may not open /dev/nvidia0",
        details={"cuda_code": 100}),
    Case("no file for unified memory", all_of(part("driver", device_nodes=("/dev/nvidia0", "/dev/nvidiactl")),
        cuda_failed(999)), "DriverUnusableError", "sudo nvidia-modprobe -u -c=0", details={"cuda_code": 999}),
    Case("no file for unified memory in a container", all_of(part("host", container="docker"),
        part("driver", device_nodes=("/dev/nvidia0", "/dev/nvidiactl")), cuda_failed(999)), "DriverUnusableError",
        "start the container with /dev/nvidia-uvm too"),
    Case("no host memory left", cuda_failed(2), "DriverUnusableError", "vm.overcommit_memory",
        details={"cuda_code": 2}),
    Case("a poisoned context", cuda_failed(700), "PoisonedContextError", "restart this process",
        details={"cuda_code": 700}),
    Case("no right to the memory of a Jetson", all_of(part("driver", device_nodes=("/dev/nvidiactl", "/dev/nvmap")),
        refused(RefusedNode("/dev/nvmap", "EACCES", "video")), cuda_failed(999)), "DriverUnusableError",
        "make this user a member of video"),
    Case("a driver for Linux in WSL", all_of(part("host", wsl=True), cuda_failed(100),
        part("driver", libcuda="/usr/lib/x86_64-linux-gnu/libcuda.so.535.171.04")), "DriverUnusableError",
        "/usr/lib/wsl/lib"),
    Case("a driver for Linux in the image of a container in WSL", all_of(part("host", wsl=True, container="docker"),
        cuda_failed(100), part("driver", libcuda="/usr/lib/x86_64-linux-gnu/libcuda.so.535.171.04")),
        "DriverUnusableError", "from the image"),
    Case("the kernel module is not loaded", all_of(nvml(**NO_MODULE), part("driver", kernel_version=None),
        cuda_failed(100)), "DriverUnusableError", "sudo modprobe nvidia", details={"cuda_code": 100}),
    *(
        Case(f"the driver of Windows is not reached{what}", all_of(OF_WINDOWS, nvml(**NO_MODULE), cuda_failed(100),
            change), "DriverUnusableError", says)
        for what, change, says in (
            ("", part("driver"), "the NVIDIA driver of Windows, then restart WSL"),
            (", nor its device", part("driver", device_nodes=()), "wsl --set-version"),
        )
    ),
    Case("the kernel module of a container's host is not loaded", all_of(nvml(**NO_MODULE), cuda_failed(999),
        part("driver", kernel_version=None), part("host", container="docker")), "DriverUnusableError",
        "on the container's host"),
    Case("a container without a GPU on a host with its driver", all_of(nvml(**NO_MODULE), cuda_failed(100),
        part("host", container="docker"), variables(NVIDIA_VISIBLE_DEVICES="none")), "NoDeviceError",
        "NVIDIA_VISIBLE_DEVICES='none': no GPU"),
    Case("upgraded and not started anew", all_of(part("driver", libcuda="/usr/lib/libcuda.so.590.44.01"),
        cuda_failed(804)), "DriverUnusableError", "reboot", details={"cuda_code": 804}),
    Case("an image with the library of another driver", all_of(part("driver", libcuda="/usr/lib/libcuda.so.535.171.04"),
        part("host", container="docker"), cuda_failed(803)), "DriverUnusableError", "from the image"),
    Case("an older library beside the driver's", all_of(part("driver", libcuda="/opt/libcuda.so.535.171.04"),
        cuda_failed(803)), "DriverUnusableError", "find the driver's libcuda.so.1 before /opt/libcuda.so.535.171.04"),
    Case("cuda-compat in the loader's configuration",
        all_of(part("driver", libcuda="/usr/local/cuda-13.0/compat/libcuda.so.580.65.06"), cuda_failed(803)),
        "DriverUnusableError", "the loader's configuration"),
    # What was tried
    Case("the driver's library is an older one",
        part("driver", libcuda="/old/libcuda.so.1", cuda_version=(12, 2)), "DriverTooOldError",
        "make the loader find the driver's libcuda.so.1 before /old/libcuda.so.1"),
    Case("loading a library of a wheel crashes",
        probed(died_in="libraries", opening=f"{SITE}/nvidia/cu13/lib/libcurand.so.10"), "BrokenPackageError",
        "it was opening"),
    Case("NVML hangs", probed(died_in="driver", opening="NVML", timed_out=True), "DriverUnusableError", "asking NVML"),
    Case("MIG without instances",
        all_of(nvml(gpus=(replace(H200, mig_enabled=True, mig_uuids=()),)), cuda_failed(100)), "NoDeviceError",
        "nvidia-smi -mig 0"),
    Case("too little address space for the driver", all_of(part("host", address_space=1 << 30), cuda_failed(2)),
        "DriverUnusableError", "it is 1024 MiB"),
    Case("too few descriptors for the driver",
        all_of(part("host", open_files=OpenFiles(1015, 1024, 4096)), cuda_failed(100)), "DriverUnusableError",
        "setrlimit(resource.RLIMIT_NOFILE, (4096, "),
    Case("too few descriptors, and no more to be had",
        all_of(part("host", open_files=OpenFiles(1015, 1024, 1024)), cuda_failed(304)), "DriverUnusableError",
        "has 1015 open"),
    Case("a CUDA name that is there twice", variables(CUDA_VISIBLE_DEVICES="0,0"), "NoDeviceError",
        "unset CUDA_VISIBLE_DEVICES"),
    Case("the driver crashes", probed(died_in="driver"), "DriverUnusableError", "SIGSEGV"),
    *(
        Case(f"the driver {how}, and a library before it", all_of(part("driver", interposed=("/vgpu/libvgpu.so",)),
            probed(died_in="driver", timed_out=timed_out), change), "DriverUnusableError", says)
        for how, timed_out, change, says in (
            ("crashes", False, variables(), "To fix it:\n    remove /vgpu/libvgpu.so from /etc/ld.so.preload"),
            ("hangs", True, variables(LD_PRELOAD="/a.so /vgpu/libvgpu.so"), "export LD_PRELOAD=/a.so"),
        )
    ),
    Case("the driver crashes in WSL", all_of(OF_WINDOWS, probed(died_in="driver")), "DriverUnusableError",
        "To fix it:\n    restart WSL"),
    Case(
        "the driver hangs", probed(died_in="driver", timed_out=True, seconds=30.0), "DriverUnusableError",
        "within 30 s"),
    Case("the import crashes", probed(died_in="import"), "BrokenPackageError", "import onnxruntime ended the process"),
    Case("loading crashes", probed(died_in="libraries"), "BrokenPackageError", "loading the CUDA libraries"),
    Case("the provider crashes", probed(died_in="provider"), "BrokenPackageError", "Segmentation fault"),
    Case("a session crashes", probed(died_in="session"), "ProviderFallbackError", "opening a session"),
    Case("a session of the model crashes", probed(died_in="model"), "ProviderFallbackError", "with this model ended"),
    Case("a session fails", probed(ProbeStep("session", False, "strange words")), "ProviderFallbackError",
        "strange words"),
    Case("a session fails for a reason", probed(ProbeStep("session", False, "CUDA failure 999: unknown error")),
        "DriverUnusableError", "999"),
    Case("the model fails", probed(ProbeStep("session", True), ProbeStep("model", False, "No Op registered for Foo")),
        "ProviderError", "No Op registered for Foo"),
    # The model
    Case("no model", request(model=ModelFacts("m.onnx", problem="no such file")), "GPUError", "no such file"),
    Case("no weights", request(model=ModelFacts("m.onnx", data_problems=(("m.data", "no such file"),))),
        "GPUError", "m.data: no such file"),
    Case("operators of others", request(model=ModelFacts("m.onnx", operators=frozenset({("Foo", "my.ops")}))),
        "ProviderError", "my.ops:Foo", "warning"),
    Case("nodes on the CPU", probed(ProbeStep("model", True, data={"nodes": (PlacedNode("n",
        "NonMaxSuppression", "", "CPUExecutionProvider", "compute"),)})),
        "PlacementError", "NonMaxSuppression", "warning"),
]  # fmt: skip
