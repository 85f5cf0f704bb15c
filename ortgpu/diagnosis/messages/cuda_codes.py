"""The error codes of CUDA: their names, their recognition in a text, and their meaning for a session.

CUresult in cuda.h and cudaError_t in driver_types.h agree from 100 upwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...environment.gpu.cuda import RESULT_NAMES
from ...errors import Fix, PoisonedContextError, ProviderFailureError, manual, shell

# cudaGetErrorName of CUDA 13.0 returns these names. Names for features that ONNX Runtime does not use are left out:
# textures and surfaces, peers, graphics, mapped and registered memory, kernels that start kernels.
CODES = {
    "cudaErrorInvalidValue": 1, "cudaErrorMemoryAllocation": 2, "cudaErrorInitializationError": 3,
    "cudaErrorInvalidConfiguration": 9, "cudaErrorInvalidSymbol": 13, "cudaErrorInvalidMemcpyDirection": 21,
    "cudaErrorStubLibrary": 34, "cudaErrorInsufficientDriver": 35, "cudaErrorCallRequiresNewerDriver": 36,
    "cudaErrorDevicesUnavailable": 46, "cudaErrorInvalidDeviceFunction": 98, "cudaErrorNoDevice": 100,
    "cudaErrorInvalidDevice": 101, "cudaErrorDeviceNotLicensed": 102, "cudaErrorInvalidKernelImage": 200,
    "cudaErrorDeviceUninitialized": 201, "cudaErrorNoKernelImageForDevice": 209, "cudaErrorECCUncorrectable": 214,
    "cudaErrorInvalidPtx": 218, "cudaErrorNvlinkUncorrectable": 220, "cudaErrorJitCompilerNotFound": 221,
    "cudaErrorUnsupportedPtxVersion": 222, "cudaErrorJitCompilationDisabled": 223, "cudaErrorContained": 226,
    "cudaErrorFileNotFound": 301, "cudaErrorSharedObjectSymbolNotFound": 302, "cudaErrorSharedObjectInitFailed": 303,
    "cudaErrorOperatingSystem": 304, "cudaErrorInvalidResourceHandle": 400, "cudaErrorSymbolNotFound": 500,
    "cudaErrorNotReady": 600, "cudaErrorIllegalAddress": 700, "cudaErrorLaunchOutOfResources": 701,
    "cudaErrorLaunchTimeout": 702, "cudaErrorContextIsDestroyed": 709, "cudaErrorAssert": 710,
    "cudaErrorHardwareStackError": 714, "cudaErrorIllegalInstruction": 715, "cudaErrorMisalignedAddress": 716,
    "cudaErrorInvalidAddressSpace": 717, "cudaErrorInvalidPc": 718, "cudaErrorLaunchFailure": 719,
    "cudaErrorCooperativeLaunchTooLarge": 720, "cudaErrorTensorMemoryLeak": 721, "cudaErrorNotPermitted": 800,
    "cudaErrorNotSupported": 801, "cudaErrorSystemNotReady": 802, "cudaErrorSystemDriverMismatch": 803,
    "cudaErrorCompatNotSupportedOnDevice": 804, "cudaErrorMpsConnectionFailed": 805, "cudaErrorMpsRpcFailure": 806,
    "cudaErrorMpsServerNotReady": 807, "cudaErrorMpsMaxClientsReached": 808, "cudaErrorMpsMaxConnectionsReached": 809,
    "cudaErrorMpsClientTerminated": 810, "cudaErrorStreamCaptureUnsupported": 900,
    "cudaErrorStreamCaptureInvalidated": 901, "cudaErrorStreamCaptureMerge": 902,
    "cudaErrorStreamCaptureUnmatched": 903, "cudaErrorStreamCaptureUnjoined": 904,
    "cudaErrorStreamCaptureIsolation": 905, "cudaErrorStreamCaptureImplicit": 906, "cudaErrorCapturedEvent": 907,
    "cudaErrorStreamCaptureWrongThread": 908, "cudaErrorTimeout": 909, "cudaErrorFunctionNotLoaded": 913,
    "cudaErrorUnknown": 999,
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}

# ONNX Runtime reports "CUDA error NAME:text" for a kernel that was not launched (cuda_kernel.h), and thrust reports
# "NAME: text" (system_error.h). The number comes from cuda_call.cc.
REPORTED = re.compile(r"CUDA (?:failure|error)[ :]+(\d+)|\b(?:" + "|".join(CODES) + r"):")


def code_in(match: re.Match[str]) -> int:
    return int(match[1]) if match[1] else CODES[match[0].rstrip(":")]


# The codes that checks distinguish.
OUT_OF_MEMORY, NO_DEVICE, ECC_UNCORRECTABLE, MISMATCH, COMPAT, UNKNOWN = 2, 100, 214, 803, 804, 999


@dataclass(frozen=True, slots=True)
class Meaning:
    what: str
    fixes: tuple[Fix, ...]


_RELOAD = "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"
_NO_HMM = "echo options nvidia_uvm uvm_disable_hmm=1 | sudo tee /etc/modprobe.d/nvidia-uvm.conf"
_NO_LICENSE = "this virtual GPU has no license, without which it computes nothing"
_NOT_INITIALISED = "the driver could not initialise in this process"

UNUSABLE: dict[int, Meaning] = {
    3: Meaning(
        _NOT_INITIALISED,
        (
            manual("if this process was forked from one that used CUDA, start it with multiprocessing's spawn method"),
            # See NVIDIA/open-gpu-kernel-modules issues 797, 901 and 947; release notes of CUDA 13, "known issues".
            shell(f"{_NO_HMM} && {_RELOAD}", needs="root"),
        ),
    ),
    34: Meaning(
        "the libcuda.so.1 that was loaded is the toolkit's linking stub, not a driver",
        (manual("take the toolkit's folder lib64/stubs out of LD_LIBRARY_PATH"),),
    ),
    102: Meaning(
        _NO_LICENSE,
        (manual("give the machine's NVIDIA license service (nvidia-gridd) its token, and restart it", needs="root"),),
    ),
    214: Meaning(
        "the GPU reports an uncorrectable memory error",
        (shell("nvidia-smi -q -d ECC", needs="host"), manual("take this GPU out of service", needs="hardware")),
    ),
    304: Meaning(
        "a system call of the driver failed: a limit of this process, or its sandbox, forbids it",
        (manual("raise the limits of this process (ulimit -a), and check what its sandbox forbids", needs="host"),),
    ),
    500: Meaning(  # See NVIDIA/nvidia-container-toolkit issue 520.
        "the driver's library does not find all of its files, as in a container that has only some of them",
        (
            manual("in a container: restart it with nvidia-container-toolkit 1.14.4 or newer", needs="host"),
            manual("otherwise install the driver again", needs="driver"),
        ),
    ),
    802: Meaning(  # See pytorch issue 35710 and NVIDIA/nvtrust issue 56.
        "the NVSwitch fabric is not ready: the fabric manager is not running, or its version differs from the driver's",
        (
            shell("sudo systemctl restart nvidia-fabricmanager", needs="root"),
            manual("without such a service, install nvidia-fabricmanager in the driver's exact version", needs="root"),
            manual("for a virtual machine or a container, do all of this on its host", needs="host"),
        ),
    ),
    803: Meaning(  # See NVIDIA/nvidia-docker issue 1256.
        "the driver's library and its kernel module differ in version, as after an upgrade without a reboot",
        (manual("reboot, or reload the nvidia kernel modules", needs="reboot"),),
    ),
    804: Meaning(
        "a forward-compatibility libcuda (package cuda-compat) is loaded, which this GPU does not support",
        (manual("take the cuda-compat folder out of LD_LIBRARY_PATH and the loader's configuration", needs="root"),),
    ),
    **dict.fromkeys(
        range(805, 810),
        Meaning(
            "the Multi-Process Service (MPS), through which processes share the GPU, refuses this process",
            (
                manual("make sure that nvidia-cuda-mps-control runs for this user and accepts clients", needs="host"),
                manual("or point CUDA_MPS_PIPE_DIRECTORY at an empty folder, to use the GPU without MPS"),
            ),
        ),
    ),
    999: Meaning(  # See issue 14211.
        "the driver failed and gives no reason; usual ones: a suspend, a GPU error (Xid), no nvidia_uvm",
        (shell("sudo dmesg | grep -i xid", needs="root"), shell(_RELOAD, needs="root")),
    ),
}

RESTART_WINDOWS = manual("restart Windows; if that does not help, install the NVIDIA driver again", needs="reboot")

# In the place of the above, on Windows; of other codes nothing more is known there than that the driver refuses.
_ON_WINDOWS: dict[int, Meaning] = {
    3: Meaning(_NOT_INITIALISED, (RESTART_WINDOWS,)),
    102: Meaning(
        _NO_LICENSE,
        (manual("give this machine a license for its virtual GPU: NVIDIA Control Panel, Licensing", needs="root"),),
    ),
    214: UNUSABLE[214],
    803: Meaning(
        "the parts of the driver differ in version, as after an upgrade without a restart", (RESTART_WINDOWS,)
    ),
    999: Meaning("the driver failed and gives no reason; usual ones: sleep, a GPU error", (RESTART_WINDOWS,)),
}
# There is a kernel for other GPUs only, in the words "no kernel image" or "invalid device function" (issue 8972), or
# its PTX cannot be compiled for this one (kijai/ComfyUI-WanAnimatePreprocess issue 4, on an RTX 5090).
NO_CODE = frozenset({98, 200, 209, 218})

# These codes are about the GPU rather than the driver, and no check of the device has a better answer.
OF_THE_DEVICE: dict[int, Meaning] = {
    36: Meaning(
        "a CUDA library calls what only a newer driver has",
        (manual("install a newer NVIDIA driver, or older releases of NVIDIA's wheels", needs="driver"),),
    ),
    101: Meaning(
        "the driver knows no such device", (manual("choose a device that exists, and look at CUDA_VISIBLE_DEVICES"),)
    ),
    222: Meaning(
        "code for this GPU would have to be compiled by a newer driver",
        (manual("install a newer NVIDIA driver", needs="driver"),),
    ),
}

# A libcuda.so.1 from outside the driver returns these codes.
OF_ANOTHER_LIBRARY = frozenset({34, 804})

# A driver that has to restart returns these codes.
OF_A_DRIVER_TO_RESTART = frozenset({3, 803, 999})

# After these errors every later CUDA call of the process fails. driver_types.h of CUDA 13 says: "the process must be
# terminated and relaunched". This is about the process, not the device: its other GPUs may fail, too.
STICKY = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810})

# A capture of a CUDA graph in this process forbids many calls of other streams and threads:
# cudaErrorStreamCaptureUnsupported and its neighbours in driver_types.h.
CAPTURING = frozenset(range(900, 909))

# These errors mean that a device is gone, and say nothing about the process (cuda.h): it is not available or removed,
# memory or NVLink is beyond correction, its context is destroyed, or it failed without a reason.
LOST = frozenset({46, 100, 101, 214, 220, 709, 999})


def process_error(code: int, evidence: list[str]) -> PoisonedContextError | ProviderFailureError | None:
    """Return the error for a code about this process, whatever the session did; None for other codes."""
    name = name_of(code)
    if code in STICKY:
        restart = manual("restart this process: CUDA cannot recover from this error within one")
        summary = f"a CUDA error ended this process's use of the GPU: {name}"
        return PoisonedContextError(summary, evidence=evidence, fixes=[restart], cuda_code=code)
    if code not in CAPTURING:
        return None
    before = manual(
        "open sessions before such a capture, or let it forbid its own thread alone: torch.cuda.graph(..., "
        'capture_error_mode="thread_local"); this failure has made it invalid'
    )
    summary = f"this process is capturing a CUDA graph, which forbids what the session was about to do: {name}"
    return ProviderFailureError(summary, evidence=evidence, fixes=[before], library="CUDA", status=name)


def name_of(code: int) -> str:
    return RESULT_NAMES.get(code) or NAMES.get(code) or f"CUDA error {code}"


def returned_by_cuinit(code: int) -> str:
    return f"cuInit returned {code} ({name_of(code)})"


def meaning_of(code: int, windows: bool) -> Meaning:
    log = RESTART_WINDOWS if windows else shell("sudo dmesg | grep -iE 'xid|nvrm'", needs="root")
    meanings = _ON_WINDOWS if windows else UNUSABLE
    return meanings.get(code) or OF_THE_DEVICE.get(code) or Meaning("the driver refuses to work", (log,))
