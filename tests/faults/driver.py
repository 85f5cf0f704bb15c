"""Group C: the driver, and the GPUs that it shows."""

from __future__ import annotations

from ortgpu.environment.host import read_host
from tests.faults.case import H200, MENDED, Case, in_group, with_gpus
from tests.lab import GPU, NVML, Cuda, Overlay
from tests.lab.fixtures import Lab
from tests.lab.installed import CUDA, LINKS_DRIVER
from tests.support.releases import OLDEST, TOO_OLD

A100 = GPU(uuid="GPU-22222222-2222-3333-4444-555555555555", name="NVIDIA A100", capability=(8, 0))
P4 = GPU(uuid="GPU-33333333-2222-3333-4444-555555555555", name="Tesla P4", capability=(6, 1))
V100 = GPU(uuid="GPU-44444444-2222-3333-4444-555555555555", name="Tesla V100", capability=(7, 0))
GB10 = GPU(uuid="GPU-66666666-2222-3333-4444-555555555555", name="NVIDIA GB10", capability=(12, 1))
B200 = GPU(uuid="GPU-55555555-2222-3333-4444-555555555555", name="NVIDIA B200", capability=(10, 0))

#: What is found when all is well with a GPU that the stub driver describes: the CUDA runtime sees that it is a stub.
STUB_REFUSED = "DriverUnusableError"

IN_CONTAINER = read_host().container is not None
ROOT, REBOOT = ("host", "host") if IN_CONTAINER else ("root", "reboot")

OLD_CUDA, OLD_DRIVER = TOO_OLD[CUDA]

OLDER_RELEASE = STUB_REFUSED if CUDA > 12 else None  # after advice to install one for CUDA 12; none is for CUDA 11

#: The first release without code for these GPUs: neither for those before 7.5, nor PTX for those that came later.
CODE_FOR_FEWER = (1, 29)


def _at(path: str) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": f"{{overlay}}/{path}"}


def empty_driver_file(_lab: Lab, overlay: Overlay) -> None:
    """The placeholder that a container runtime mounts the host's library over, and did not."""
    _put(overlay, b"")


def driver_file_is_text(_lab: Lab, overlay: Overlay) -> None:
    _put(overlay, b"#!/bin/sh\n" * 200)


def driver_without_its_functions(lab: Lab, overlay: Overlay) -> None:
    """A libcuda.so.1 that is not a driver: another product's, or one that is much too old."""
    _put(overlay, lab.stubs.library("libcuda.so.1", {"cuInit": 0}).read_bytes())


def driver_that_kills(lab: Lab, overlay: Overlay) -> None:
    _put(overlay, lab.stubs.compile("killing", _KILLING, "-Wl,-soname,libcuda.so.1").read_bytes())


def driver_that_kills_when_it_is_loaded(lab: Lab, overlay: Overlay) -> None:
    _put(overlay, lab.stubs.compile("killing_at_once", _KILLING_AT_ONCE, "-Wl,-soname,libcuda.so.1").read_bytes())


def nvml_that_kills(lab: Lab, overlay: Overlay) -> None:
    made = lab.stubs.compile("killing_nvml", _KILLING_NVML, "-Wl,-soname,libnvidia-ml.so.1")
    _put(overlay, made.read_bytes(), "libnvidia-ml.so.1")


_KILLING_AT_ONCE = """
#include <stdlib.h>
__attribute__((constructor)) static void ends(void) { abort(); }
int cuInit(unsigned flags) { (void)flags; return 0; }
"""

_KILLING_NVML = """
#include <stdlib.h>
int nvmlInitWithFlags(unsigned flags) { (void)flags; abort(); }
"""

_KILLING = """
#include <signal.h>
int cuInit(unsigned flags) { (void)flags; raise(SIGSEGV); return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
"""


def _put(overlay: Overlay, content: bytes, name: str = "libcuda.so.1") -> None:
    folder = overlay.root / "driver"
    folder.mkdir()
    (folder / name).write_bytes(content)


CASES = in_group(
    "C",
    [
        Case(
            "no-driver",
            "DriverNotFoundError",
            ("libcuda.so.1", "driver", "with its GPU: "),
            rows=("B24",),
            needs=("driver", "host"),
            plain_since=LINKS_DRIVER,
        ),
        Case(
            "no-libcuda-and-working-nvml",
            "DriverNotFoundError",
            ("libcuda.so.1", "NVML works", "compute", "NVIDIA_DRIVER_CAPABILITIES"),
            rows=("B24", "G05"),
            nvml=NVML(gpus=(H200,)),
            needs=("host",) if IN_CONTAINER else ("driver", "host"),  # its host has a driver, and NVML says which
        ),
        Case(
            "driver-too-old",
            "DriverTooOldError",
            (f"{CUDA - 1}.8", f"CUDA {CUDA}", OLD_DRIVER, OLDEST[CUDA][1].partition(".")[0]),
            rows=("C01",),
            cuda=Cuda(version=OLD_CUDA, devices=(H200,)),
            nvml=NVML(gpus=(H200,), driver=OLD_DRIVER, cuda=OLD_CUDA),
            details={"driver_version": OLD_DRIVER, "driver_cuda": [CUDA - 1, 8], "needed_cuda": [CUDA, 0]},
            plain="printed",
            after=OLDER_RELEASE,
            needs=("driver",),
        ),
        Case(
            "driver-too-old-and-no-nvml",
            "DriverTooOldError",
            (f"{CUDA - 1}.8", f"CUDA {CUDA}"),
            rows=("C01",),
            cuda=Cuda(version=OLD_CUDA, devices=(H200,)),
            details={"driver_cuda": [CUDA - 1, 8], "needed_cuda": [CUDA, 0]},
            plain="printed",
            after=OLDER_RELEASE,
            needs=("driver",),
        ),
        Case(
            "no-device",
            "NoDeviceError",
            ("no GPU", "100"),
            rows=("C02", "G06"),
            cuda=Cuda(init=100),
            nvml=NVML(gpus=()),
            plain="printed",
            needs=("host", "hardware"),
        ),
        Case(
            "no-device-of-those-that-nvml-sees",
            "NoDeviceError",
            ("CUDA sees no GPU", "NVML sees 1 GPU", "dmesg"),
            cuda=Cuda(init=100),
            nvml=NVML(gpus=(H200,)),
            silent_about=("use a machine with",),
            plain="printed",
            needs=("host",) * 3 if IN_CONTAINER else ("root", "reboot"),
        ),
        Case(
            "no-device-and-no-nvml",
            "NoDeviceError",
            ("no GPU", "100"),
            rows=("C02",),
            cuda=Cuda(init=100),
            plain="printed",
            needs=("host", "hardware"),
        ),
        *(
            Case(
                f"cuinit-{code}",
                "DriverUnusableError",
                (str(code), name, *words),
                rows=(row,),
                cuda=Cuda(init=code, devices=(H200,)),
                nvml=NVML(gpus=(H200,)),
                details={"cuda_code": code},
                plain="printed",
                after="DriverNotFoundError" if code in (34, 804) else None,
                slow_fix=False,
                needs=needs,
            )
            for code, name, row, needs, words in (
                (3, "CUDA_ERROR_NOT_INITIALIZED", "C04", ("", ROOT), ("spawn", "uvm_disable_hmm")),
                (802, "CUDA_ERROR_SYSTEM_NOT_READY", "own", (ROOT, ROOT, "host"), ("fabric",)),
                (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "C08", (REBOOT,), ("reboot",)),
                (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "own", (), ("cuda-compat", "LD_LIBRARY_PATH")),
                (999, "CUDA_ERROR_UNKNOWN", "C10", (ROOT, ROOT), ("nvidia_uvm",)),
                (123, "123", "own", (ROOT,), ()),
                (34, "CUDA_ERROR_STUB_LIBRARY", "own", (), ("linking stub", "LD_LIBRARY_PATH")),
            )
        ),
        Case(
            "mismatch-seen-by-nvml-too",
            "DriverUnusableError",
            ("803", "reboot"),
            rows=("C08",),
            cuda=Cuda(init=803),
            nvml=NVML(init=18),
            details={"cuda_code": 803},
            plain="printed",
            needs=(REBOOT,),
        ),
        *(
            Case(
                f"hidden-by-{value or 'nothing'}",
                "NoDeviceError",
                ("CUDA_VISIBLE_DEVICES", repr(value), "unset CUDA_VISIBLE_DEVICES"),
                rows=("C02",),
                env={"CUDA_VISIBLE_DEVICES": value},
                plain="printed",
                after=STUB_REFUSED,
                slow_fix=False,
                **with_gpus(H200),
            )
            for value in ("", "-1")
        ),
        *(
            Case(
                f"hidden-by-{name}",
                "NoDeviceError",
                ("CUDA_VISIBLE_DEVICES", value, H200.uuid),
                env={"CUDA_VISIBLE_DEVICES": value},
                plain="printed",
                after=STUB_REFUSED,
                slow_fix=False,
                **with_gpus(H200),
            )
            for name, value in (
                ("an-unknown-uuid", "GPU-dead"),
                ("a-uuid-with-a-typing-error", H200.uuid.replace("4444", "4445")),
                ("the-word-all", "all"),
                ("an-ordinal-that-is-not-there", "5"),
            )
        ),
        Case(
            "hidden-by-the-program-itself",  # to keep another library off the GPU, and this one with it
            "NoDeviceError",
            ("CUDA_VISIBLE_DEVICES hides", "'-1'", "sets CUDA_VISIBLE_DEVICES itself: remove that"),
            prelude="import os; os.environ['CUDA_VISIBLE_DEVICES'] = '-1'",
            silent_about=("unset",),
            plain="printed",
            needs=("",),
            **with_gpus(H200),
        ),
        Case(
            "ordinal-too-high",
            "DeviceNotFoundError",
            ("3", "NVIDIA H200", H200.uuid),
            rows=("C03",),
            arguments={"device": 3},
            details={"requested": 3},
            plain="printed logged",
            needs=("",),
            **with_gpus(H200),
        ),
        Case(
            "ordinal-too-high-in-the-options",
            "DeviceNotFoundError",
            ("3", "NVIDIA H200", H200.uuid),
            rows=("C03",),
            arguments={"providers": [("CUDAExecutionProvider", {"device_id": 3})]},
            plain="printed logged",
            needs=("",),
            **with_gpus(H200),
        ),
        Case(
            "ordinal-hidden",
            "DeviceNotFoundError",
            ("cuda:1", "NVIDIA H200", "CUDA_VISIBLE_DEVICES"),
            rows=("C03",),
            arguments={"device": "cuda:1"},
            env={"CUDA_VISIBLE_DEVICES": "0"},
            plain="printed logged",
            needs=("",),
            **with_gpus(H200, A100),
        ),
        Case(
            "shown-too-late",
            "DeviceNotFoundError",
            ("cuda:1", "CUDA_VISIBLE_DEVICES was '0' when this process initialised CUDA", "'0,1' now", "came too late"),
            arguments={"device": "cuda:1"},
            env={"CUDA_VISIBLE_DEVICES": "0"},
            prelude="import os; from ortgpu.environment.gpu.cuda import initialise\n"
            "initialise(); os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'",
            plain="printed logged",
            needs=("", "host"),
            **with_gpus(H200, A100),
        ),
        Case(
            "uuid-unknown",
            "DeviceNotFoundError",
            ("GPU-dead", H200.uuid),
            arguments={"device": "GPU-dead"},
            plain="printed logged",
            needs=("",),
            **with_gpus(H200),
        ),
        Case(
            "ordinal-too-high-and-no-libcuda",
            "DeviceNotFoundError",
            ("7", H200.uuid),
            rows=("C03",),
            arguments={"device": 7},
            nvml=NVML(gpus=(H200,)),
            others=("DriverNotFoundError",),
            needs=("",),
        ),
        *(
            Case(
                f"generation-{gpu.capability[0]}.{gpu.capability[1]}",
                "UnsupportedDeviceError",
                (gpu.name, f"{gpu.capability[0]}.{gpu.capability[1]}"),
                details={"compute_capability": list(gpu.capability)},
                plain="printed",
                after=STUB_REFUSED,
                since=CODE_FOR_FEWER,
                **with_gpus(gpu),
            )
            for gpu in (P4, V100, B200, GB10)
        ),
        Case(
            "generation-6.1-and-no-libcuda",
            "UnsupportedDeviceError",
            ("Tesla P4", "6.1", "driver-not-found"),
            nvml=NVML(gpus=(P4,)),
            others=("DriverNotFoundError",),
            after="DriverNotFoundError",
            since=CODE_FOR_FEWER,
        ),
        Case(
            "taken-by-another-process",
            "DeviceBusyError",
            ("46", "process"),
            cuda=Cuda(init=46, devices=(H200,)),
            nvml=NVML(gpus=(GPU(uuid=H200.uuid, name=H200.name, compute_mode=3, processes=((1, 1 << 30),)),)),
            plain="printed",
            needs=("",),
        ),
        # Not in the corpus
        Case(
            "driver-file-empty",
            "DriverNotFoundError",
            ("libcuda.so.1", "file too short", "with its GPU: "),
            empty_driver_file,
            env=_at("driver"),
            needs=("driver", "host", *(["host"] if IN_CONTAINER else [])),  # the third: an image with empty files
        ),
        Case(
            "driver-file-is-text",
            "DriverNotFoundError",
            ("libcuda.so.1", "invalid ELF header"),
            driver_file_is_text,
            env=_at("driver"),
            needs=("driver", "host"),
        ),
        Case(
            "driver-file-of-something-else",
            "DriverTooOldError",
            ("libcuda.so.1 lacks cu", "or no driver"),
            driver_without_its_functions,
            env=_at("driver"),
            silent_about=("uninstall", "pip install", "libcudart"),
            needs=("driver",),
            since=LINKS_DRIVER,
        ),
        Case(
            "driver-that-ends-the-process",
            "DriverUnusableError",
            ("initialising the NVIDIA driver", "SIGSEGV"),
            driver_that_kills,
            env=_at("driver"),
            ask="probe",
            cpu=False,
            needs=(REBOOT,),
        ),
        Case(
            "driver-that-ends-the-process-when-it-is-loaded",
            "DriverUnusableError",
            ("initialising the NVIDIA driver", "SIGABRT"),
            driver_that_kills_when_it_is_loaded,
            env=_at("driver"),
            ask="probe",
            cpu=False,
            plain="aborted",
            needs=(REBOOT,),
        ),
        Case(
            "nvml-that-ends-the-process",
            "DriverUnusableError",
            ("asking NVML", "SIGABRT"),
            nvml_that_kills,
            env=_at("driver"),
            ask="probe",
            cpu=False,
            needs=(REBOOT,),
        ),
        Case(
            "older-libcuda-than-the-driver",
            "DriverTooOldError",
            (f"up to {CUDA - 1}.2", "this machine's driver up to 13.0", "loaded: "),
            cuda=Cuda(version=1000 * (CUDA - 1) + 20, devices=(H200,)),
            nvml=NVML(gpus=(H200,)),
            silent_about=("pip install", "install NVIDIA driver"),
            details={"driver_version": "580.65.06", "driver_cuda": [CUDA - 1, 2], "needed_cuda": [CUDA, 0]},
            plain="printed",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "mig-without-instances",
            "NoDeviceError",
            ("MIG is enabled", "nvidia-smi -mig 0"),
            cuda=Cuda(init=100),
            nvml=NVML(gpus=(GPU(uuid=H200.uuid, name=H200.name, mig=True),)),
            silent_about=("with its GPU",),
            plain="printed",
            needs=(ROOT, ROOT),
        ),
        Case(
            "hidden-by-a-number-twice",
            "NoDeviceError",
            ("CUDA_VISIBLE_DEVICES hides", "'0,0'", "unset CUDA_VISIBLE_DEVICES"),
            env={"CUDA_VISIBLE_DEVICES": "0,0"},
            plain="printed",
            after=STUB_REFUSED,
            slow_fix=False,
            **with_gpus(H200),
        ),
        *(
            Case(
                f"cuinit-{code}",
                "DriverUnusableError",
                (str(code), name, word),
                cuda=Cuda(init=code, devices=(H200,)),
                nvml=NVML(gpus=(H200,)),
                details={"cuda_code": code},
                plain="printed",
                needs=needs,
            )
            for code, name, word, needs in (
                (102, "CUDA_ERROR_DEVICE_NOT_LICENSED", "license", (ROOT,)),
                (304, "CUDA_ERROR_OPERATING_SYSTEM", "ulimit", ("host",)),
                (805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "nvidia-cuda-mps-control", ("host", "")),
            )
        ),
        Case(
            "nvml-answers-errors-to-everything",
            "DriverUnusableError",
            ("999", "CUDA_ERROR_UNKNOWN"),
            cuda=Cuda(init=999),
            nvml=NVML(error=999),
            plain="printed",
            needs=(ROOT, ROOT),
        ),
    ],
)
