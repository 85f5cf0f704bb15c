"""Group C, continued: a libcuda.so.1 that is not the driver's, and what NVML knows that CUDA does not say."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.case import H200, MENDED, Break, Case, in_group
from tests.faults.driver import CODE_FOR_FEWER, IN_CONTAINER, OLD_DRIVER, REBOOT, ROOT
from tests.lab import NVML, Cuda, Overlay
from tests.lab.fixtures import Lab
from tests.lab.installed import CUDA
from tests.support.releases import OLDEST

OLDER_COMPAT = {12: "470.57.02", 13: "550.54.14"}[CUDA]  # what CUDA 11.4 and 12.4 came with


def compat(version: str) -> Break:
    """The folder of the package cuda-compat behind the usual link, and NVML elsewhere."""

    def breaks(lab: Lab, overlay: Overlay) -> None:
        folder = overlay.root / "cuda-older" / "compat"
        folder.mkdir(parents=True)
        (overlay.root / "cuda").symlink_to("cuda-older")
        (folder / f"libcuda.so.{version}").write_bytes(lab.stubs.cuda.read_bytes())
        (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
        (overlay.root / "nvml").mkdir()
        (overlay.root / "nvml" / "libnvidia-ml.so.1").write_bytes(lab.stubs.nvml.read_bytes())

    return breaks


def unlinked(lab: Lab, overlay: Overlay) -> None:
    """As a container has them whose runtime could not run ldconfig."""
    (overlay.root / "driver").mkdir()
    for made, name in ((lab.stubs.cuda, "libcuda"), (lab.stubs.nvml, "libnvidia-ml")):
        (overlay.root / "driver" / f"{name}.so.580.65.06").write_bytes(made.read_bytes())


def linked_to_nothing(lab: Lab, overlay: Overlay) -> None:
    """What a driver that was upgraded on the host leaves."""
    unlinked(lab, overlay)
    (overlay.root / "driver" / "libcuda.so.1").symlink_to("libcuda.so.550.54.14")


def linking_stub(lab: Lab, overlay: Overlay) -> None:
    """The toolkit's, whose file has no number in its name, in a folder behind a link."""
    folder = overlay.root / "cuda-13.0" / "lib64" / "stubs"
    folder.mkdir(parents=True)
    (overlay.root / "cuda").symlink_to("cuda-13.0")
    (folder / "libcuda.so").write_bytes(lab.stubs.cuda.read_bytes())


def shares_out_the_gpu(lab: Lab, overlay: Overlay) -> None:
    """As HAMi's libvgpu.so does it: by a dlsym of its own, which gives away functions that nothing else can see."""
    (overlay.root / "vgpu").mkdir()
    made = lab.stubs.compile("libvgpu.so", _SHARING, "-fvisibility=hidden")
    (overlay.root / "vgpu" / "libvgpu.so").write_bytes(made.read_bytes())


_SHARING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
static int ends(void) { raise(SIGSEGV); return 0; }
__attribute__((visibility("default"))) void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    int is_first = !strcmp(name, "cuInit") || !strncmp(name, "cuGetProcAddress", 16);  // for the CUDA runtime
    return is_first ? (void *)ends : real(handle, name);
}
"""

_ONE_GPU = {**Cuda(devices=(H200,)).variables(), **NVML(gpus=(H200,)).variables()}
COMPAT_FIRST = {"LD_LIBRARY_PATH": "{overlay}/cuda/compat:{overlay}/nvml"}

CASES = in_group(
    "C",
    [
        Case(
            "cuda-compat-older-than-the-driver",
            "DriverTooOldError",
            (f"up to {CUDA - 1}.4", f"580.65.06, is new enough for CUDA {CUDA}", f"compat/libcuda.so.{OLDER_COMPAT}"),
            compat(OLDER_COMPAT),
            cuda=Cuda(init=803, version=1000 * (CUDA - 1) + 40, devices=(H200,)),
            nvml=NVML(gpus=(H200,), cuda=1000 * (CUDA - 1) + 40),  # which NVML reads from that library
            env=COMPAT_FIRST,
            silent_about=("NVIDIA driver 5", "pip install"),
            details={"driver_version": "580.65.06", "driver_cuda": [CUDA - 1, 4]},
            plain="printed",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "cuda-compat-on-a-gpu-that-does-not-support-it",
            "DriverUnusableError",
            ("804", "cuda-compat", f"driver {OLD_DRIVER}", f"{OLDEST[CUDA][1].rpartition('.')[0]} or newer"),
            compat("580.65.06"),
            cuda=Cuda(init=804, devices=(H200,)),
            nvml=NVML(gpus=(H200,), driver=OLD_DRIVER),
            env=COMPAT_FIRST,
            details={"cuda_code": 804},
            plain="printed",
            after=MENDED,
            slow_fix=False,
            needs=("driver",),
        ),
        *(
            Case(
                name,
                "DriverUnusableError",
                (str(init), *words),
                cuda=Cuda(init=init, devices=(H200,)),
                nvml=nvml,
                details={"cuda_code": init},
                silent_about=("dmesg | grep -i xid", "use a machine with"),
                plain="printed",
                needs=needs,
            )
            for name, init, nvml, words, needs in (
                ("gpu-lost", 999, NVML(init=15), ("GPU is lost", "reboot"), (REBOOT, "")),
                ("gpu-lost-since-it-was-counted", 100, NVML(error=15), ("GPU is lost", "reboot"), (REBOOT, "")),
                (
                    "one-gpu-of-two-lost",
                    999,
                    NVML(gpus=(H200, replace(H200, uuid="", handle=15))),
                    ("GPU is lost", "CUDA_VISIBLE_DEVICES"),
                    (REBOOT, ""),
                ),
                ("gpu-to-be-reset", 999, NVML(init=16), ("--gpu-reset",), (ROOT, REBOOT)),
                ("mismatch-that-only-nvml-knows", 999, NVML(init=18), ("differ in version", "reboot"), (REBOOT,)),
                (
                    "part-of-the-driver-missing",
                    500,
                    NVML(gpus=(H200,)),
                    ("nvidia-container-toolkit",),
                    ("host", "host" if IN_CONTAINER else "driver"),
                ),
                ("host-memory-limited", 2, NVML(gpus=(H200,)), ("host memory", "ulimit", "overcommit"), ("host",)),
            )
        ),
        *(
            Case(
                name,
                "DriverNotFoundError",
                ("without its link libcuda.so.1: ", "driver/libcuda.so.580.65.06", "ldconfig -n"),
                breaks,
                env={"LD_LIBRARY_PATH": "{overlay}/driver", "KUBERNETES_SERVICE_HOST": "10.0.0.1", **_ONE_GPU},
                silent_about=("NVIDIA driver 5", "--gpus all"),
                after="DriverUnusableError",  # of the stub
                slow_fix=False,
            )
            for name, breaks in (("driver-without-its-link", unlinked), ("driver-linked-to-nothing", linked_to_nothing))
        ),
        Case(
            "linking-stub-in-ld-preload",
            "DriverUnusableError",
            ("34", "linking stub", "unset LD_PRELOAD"),
            linking_stub,
            nvml=NVML(gpus=(H200,)),
            env={**Cuda(init=34).variables(), "LD_PRELOAD": "{overlay}/cuda/lib64/stubs/libcuda.so"},
            silent_about=("LD_LIBRARY_PATH",),
            details={"cuda_code": 34},
            plain="printed",
            after=MENDED,
            slow_fix=False,
        ),
        Case(
            "library-that-shares-out-the-gpu",
            "DriverUnusableError",
            ("initialising the NVIDIA driver", "SIGSEGV", "vgpu/libvgpu.so", "unset LD_PRELOAD"),
            shares_out_the_gpu,
            cuda=Cuda(init=100),
            nvml=NVML(gpus=(H200,)),
            env={"LD_PRELOAD": "{overlay}/vgpu/libvgpu.so"},
            ask="probe",
            cpu=False,
            plain="aborted",
            after="NoDeviceError",
            slow_fix=False,
            needs=(REBOOT,),
        ),
        Case(
            "job-without-a-gpu",
            "NoDeviceError",
            ("NoDevFiles", "--gres=gpu:1"),
            cuda=Cuda(devices=(H200,)),
            nvml=NVML(gpus=(H200,)),
            env={"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
            silent_about=("unset CUDA_VISIBLE_DEVICES",),
            plain="printed",
            needs=("host",),
        ),
        Case(
            "machine-code-passed-over",
            "UnsupportedDeviceError",
            ("CUDA_FORCE_PTX_JIT=1", "NVIDIA H200", "9.0", "sm_90"),
            cuda=Cuda(devices=(H200,)),
            nvml=NVML(gpus=(H200,)),
            env={"CUDA_FORCE_PTX_JIT": "1"},
            silent_about=("pip install",),
            details={"compute_capability": [9, 0]},
            plain="printed",
            after="DriverUnusableError",
            slow_fix=False,
            since=CODE_FOR_FEWER,
        ),
        Case(
            "hidden-by-a-mig-instance-that-is-not-there",
            "NoDeviceError",
            ("CUDA_VISIBLE_DEVICES hides", "MIG-", H200.uuid),
            cuda=Cuda(devices=(H200,)),
            nvml=NVML(gpus=(replace(H200, mig=False),)),
            env={"CUDA_VISIBLE_DEVICES": "MIG-11111111-2222-3333-4444-555555555555"},
            plain="printed",
            after="DriverUnusableError",
            slow_fix=False,
        ),
    ],
)
