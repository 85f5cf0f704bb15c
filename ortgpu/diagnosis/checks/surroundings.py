"""Find the GPUs of this process: by its variables, and by the container or service that runs it."""

from __future__ import annotations

import re

from ...environment.gpu.driver import GPU
from ...environment.inspection import Environment
from ...errors import Fix, manual

# The keys are the runtimes in environment/host.py. Sources: docs.nvidia.com/datacenter/cloud-native, "CDI Support" and
# "NVIDIA device plugin"; apptainer.org/docs, "GPU Support".
_BY_RUNTIME = {
    "kubernetes": "`nvidia.com/gpu: 1` under resources.limits in the specification of its pod, with NVIDIA's device "
    "plugin in the cluster, and `runtimeClassName: nvidia` where that is not the default",
    "podman": "`podman run --device nvidia.com/gpu=all ...`, after `nvidia-ctk cdi generate` on the host",
    "apptainer": "`apptainer exec --nv ...`",
}
_BY_DOCKER = "`docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...`"

# Sources: colab.research.google.com, "Resource limits"; kaggle.com/docs/notebooks; docs.aws.amazon.com/lambda;
# docs.cloud.google.com/run, "GPU support for services"; modal.com/docs/guide/gpu; huggingface.co/docs/hub, "Using GPU
# Spaces" and "ZeroGPU".
_BY_SERVICE = {
    "Google Colab": "choose a runtime with a GPU: Runtime > Change runtime type, and run the notebook from its start",
    "Kaggle": "choose a GPU as the notebook's accelerator: Settings > Accelerator, which starts it again",
    "AWS Lambda": "run it where there are GPUs, on EC2, ECS or SageMaker: AWS Lambda has none",
    "Google Cloud Run": "deploy it with a GPU: gcloud run deploy --gpu 1 --gpu-type nvidia-l4",
    "Modal": 'ask for a GPU: @app.function(gpu="T4")',
    "Hugging Face ZeroGPU": "make the session in a function that has the decorator @spaces.GPU: there is a GPU only "
    "while one runs",
    "Hugging Face Spaces": "choose hardware with a GPU in the settings of this Space",
}

_AMD, _NVIDIA = 0x1002, 0x10DE  # These are the numbers of PCI vendors.


def give_the_gpu(environment: Environment, start: str = "start the container") -> Fix:
    first = start if environment.host.container else "in a container, start it"
    return manual(f"{first} with its GPU: {how(environment)}", needs="host")


def how(environment: Environment) -> str:
    return _BY_RUNTIME.get(environment.host.container or "", _BY_DOCKER)


def service_advice(environment: Environment) -> tuple[str, Fix] | None:
    driver, service = environment.driver, environment.host.service
    if service is None or driver.device_nodes or driver.kernel_version or driver.nvml.gpus:
        return None
    return f"in {service}", manual(_BY_SERVICE[service], needs="host")


def has_nvidia(environment: Environment) -> bool:
    return _NVIDIA in (environment.host.display_vendors or ())


def no_nvidia_advice(environment: Environment) -> tuple[str, Fix] | None:
    host, driver = environment.host, environment.driver
    vendors = host.display_vendors if not host.wsl else None  # WSL lists only a device of Microsoft.
    if not vendors or has_nvidia(environment) or driver.device_nodes or driver.kernel_version or driver.nvml.available:
        return None
    why, advice = "no GPU of NVIDIA is on the PCI bus of this machine", "use a machine with an NVIDIA GPU"
    if _AMD in vendors:
        why = "the only GPU of this machine is AMD's"
        advice = "CUDA needs an NVIDIA GPU; for AMD, ONNX Runtime has another package (onnxruntime-migraphx)"
    return why, manual(advice, needs="hardware")


def wsl_advice(environment: Environment) -> Fix | None:
    """Return the fix for a WSL without a device for the GPU: learn.microsoft.com/windows/wsl."""
    host = environment.host
    if not host.wsl or host.container or "/dev/dxg" in environment.driver.device_nodes:
        return None
    use = "use WSL 2 (wsl --set-version NAME 2), install NVIDIA's driver in Windows, and let /etc/wsl.conf enable [gpu]"
    return manual(f"give WSL the GPU (/dev/dxg is missing): {use}", needs="host")


def are_hidden(environment: Environment) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES names no GPU that NVML sees. NVML may not know a MIG instance."""
    value, gpus = environment.variables.now.get("CUDA_VISIBLE_DEVICES"), environment.driver.nvml.gpus
    if value is None or not gpus or hides_everything(environment):
        return value is not None and hides_everything(environment)
    mig_is_off = all(gpu.mig_enabled is False for gpu in gpus)
    may_be_known = mig_is_off or not value.strip().upper().startswith("MIG-")
    return may_be_known and not visible_gpus(environment)


def hides_everything(environment: Environment) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES is set and means no GPU, whatever GPUs there are."""
    value = environment.variables.now.get("CUDA_VISIBLE_DEVICES")
    return value is not None and not _visible_names(value)


def visible_gpus(environment: Environment) -> list[GPU]:
    """Return NVML's GPUs, selected and ordered by CUDA_VISIBLE_DEVICES.

    Exact if all GPUs are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID; else CUDA may number the fastest first.
    """
    gpus = list(environment.driver.nvml.gpus)
    value = environment.variables.now.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return gpus
    visible: list[GPU] = []
    for name in _visible_names(value):
        found = [gpu for gpu in gpus if (gpu.uuid or "").lower().startswith(name.lower()) or name in gpu.mig_uuids]
        if name.isdecimal():
            found = gpus[int(name) : int(name) + 1]
        if len(found) != 1:  # The beginning of several UUIDs is ambiguous.
            break  # CUDA does the same: CUDA C++ Programming Guide, "CUDA Environment Variables".
        visible += found
    return visible


def _visible_names(value: str) -> list[str]:
    """Return the ordinals and UUIDs in CUDA_VISIBLE_DEVICES that CUDA heeds.

    The first invalid name ends the list, and a repeated name empties it. A number ends with its digits, so "1gpu" is 1.
    torch.cuda._parse_visible_devices follows the same rules as CUDA.
    """
    names: list[str] = []
    for part in map(str.strip, value.split(",")):
        number = re.match(r"\+?([0-9]{1,9})(?![0-9])", part)
        name = str(int(number[1])) if number else part
        if not number and not part.upper().startswith(("GPU-", "MIG-")):
            break
        if name in names:
            return []
        names.append(name)
    return names


def given_to_container(environment: Environment) -> list[str]:
    value = environment.variables.now.get("NVIDIA_VISIBLE_DEVICES")
    if value is None:
        return []
    return [f"NVIDIA_VISIBLE_DEVICES={value!r}" + (": no GPU" if value in ("", "void", "none") else "")]
