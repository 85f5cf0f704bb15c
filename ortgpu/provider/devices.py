"""Choose the GPU that a session runs on, or those of a pool."""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from ..environment.gpu.cuda import CudaDevice, CudaState, initialise
from ..environment.gpu.driver import read_gpu_memory
from ..errors import DeviceNotFoundError, Fix, ProviderRequestError, counted, manual

DeviceRequest = int | str | None

logger = logging.getLogger("ortgpu")

_UUID = r"(gpu|mig)-[0-9a-f]"
_FORMS = 'an index (0), "cuda", "cuda:0", "gpu", "gpu:0", a UUID ("GPU-..."), "auto" or None'


@dataclass(frozen=True, slots=True)
class Device:
    """The device that a session runs on. None means unknown.

    ``ordinal`` is CUDA's number in this process and depends on CUDA_VISIBLE_DEVICES. ``uuid`` names the GPU itself.
    ``compute_capability`` is (major, minor), and ``total_memory`` is in bytes. A session that ``allow_cpu`` put on the
    CPU has ``kind`` "cpu" and the name "CPU"; all else is None.
    """

    kind: str  # "cuda" or "cpu"
    ordinal: int | None
    uuid: str | None
    name: str | None
    compute_capability: tuple[int, int] | None
    total_memory: int | None
    driver_version: str | None

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def __str__(self) -> str:
        if not self.is_gpu:
            return "cpu"
        details = ", ".join(part for part in (self.name, self.uuid) if part)
        return f"cuda:{self.ordinal}" + (f" ({details})" if details else "")


CPU = Device("cpu", None, None, "CPU", None, None, None)


def plain_request(device: Any) -> Any:
    """Return the request for a :class:`Device`, ``torch.device`` or NumPy integer; other values stay unchanged."""
    if isinstance(device, Device):
        return (device.uuid or f"cuda:{device.ordinal or 0}") if device.is_gpu else device.kind
    if device is None or isinstance(device, (int, str)):  # The usual case; a test for a protocol takes 10 µs.
        return device
    if isinstance(device, SupportsIndex):
        return operator.index(device)
    kind = type(device)
    return str(device) if (kind.__module__, kind.__name__) == ("torch", "device") else device


def check_form(requested: DeviceRequest) -> None:
    """Raise TypeError or DeviceNotFoundError for a request that names no device in any environment."""
    if requested is None:
        return
    if isinstance(requested, bool) or not isinstance(requested, (int, str)):
        raise TypeError(f"device must be {_FORMS}, not {requested!r}")
    if isinstance(requested, int):
        if requested < 0:
            raise _not_understood(requested)
    elif requested != "auto" and _ordinal(requested) is None and not re.match(_UUID, requested.strip().lower()):
        raise _not_understood(requested)


def choose(
    requested: DeviceRequest,
    devices: Sequence[CudaDevice],
    free_memory: Callable[[str], int | None],
    narrowed: str | None = None,
) -> CudaDevice:
    """Return the device that a request names, among those that CUDA shows to this process.

    Args:
        requested: None is ordinal 0; "auto" is the device with the most free memory, the lowest ordinal among equals.
        devices: at least one.
        free_memory: UUID to free bytes, None where unknown; only called for "auto".
        narrowed: evidence of CUDA_VISIBLE_DEVICES for the message; see :func:`narrowed_by`.

    Raises:
        DeviceNotFoundError: nothing among ``devices`` has this ordinal or UUID.
    """
    check_form(requested)
    if requested == "auto":
        return max(devices, key=lambda d: ((free_memory(d.uuid) if d.uuid else None) or 0, -d.ordinal))
    ordinal = ordinal_of(requested)
    if ordinal is not None:
        matches = [device for device in devices if device.ordinal == ordinal]
    else:
        digits = digits_of(str(requested))  # CUDA does not mark the UUID of a MIG instance as such.
        matches = [device for device in devices if device.uuid and digits_of(device.uuid).startswith(digits)]
    if len(matches) == 1:
        return matches[0]
    available = [describe(device.ordinal, device.name, device.uuid) for device in devices]
    raise not_found(requested, available, ambiguous=bool(matches), narrowed=narrowed)


_TOO_LATE = "which came too late"


def narrowed_by(now: str | None, then: str | None) -> str | None:
    """Return the evidence that CUDA_VISIBLE_DEVICES chose the devices, or None if it was not set.

    CUDA reads the variable when it is initialised (``then``); later changes (``now``) come too late.
    """
    if now == then:
        return f"CUDA_VISIBLE_DEVICES={now}" if now is not None else None
    text = [repr(value) if value is not None else "not set" for value in (then, now)]
    return f"CUDA_VISIBLE_DEVICES was {text[0]} when this process initialised CUDA; it is {text[1]} now, {_TOO_LATE}"


def too_late(narrowed: str | None) -> tuple[Fix, ...]:
    """Return the fix for a variable that was set too late, according to :func:`narrowed_by`."""
    if narrowed is None or not narrowed.endswith(_TOO_LATE):
        return ()
    how = "or set CUDA_VISIBLE_DEVICES where this program is started, or before anything in it uses CUDA"
    return (manual(how, needs="host"),)


def choose_visible(device: DeviceRequest, cuda: CudaState) -> CudaDevice:
    """Return the device that a request names, among those that the driver shows.

    Raises DeviceNotFoundError; also for a UUID if the driver works and lists no devices.
    """
    if cuda.devices is None:
        return _unlisted(device)
    now = os.environ.get("CUDA_VISIBLE_DEVICES")
    narrowed = narrowed_by(now, cuda.hidden_by)
    gpu = choose(device, cuda.devices, free_memory, narrowed)
    if now != cuda.hidden_by:
        logger.warning("%s; this session is on %s", narrowed, gpu.uuid or f"cuda:{gpu.ordinal}")
    return gpu


def check_devices(devices: str | Iterable[Device | DeviceRequest]) -> list[DeviceRequest] | None:
    """Return the devices that a caller names; None for all. Raises TypeError, ProviderRequestError."""
    if isinstance(devices, str) and devices == "all":  # An array would compare element by element.
        return None
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
        raise TypeError(f'devices must be "all" or a sequence of devices, such as [0, 1], not {devices!r}')
    requests: list[DeviceRequest] = [plain_request(device) for device in devices]
    if not requests:
        raise _refused("devices names no GPU", requests, "name at least one, or leave devices out for all")
    for device in requests:
        check_form(device)
    return requests


def choose_devices(devices: list[DeviceRequest] | None) -> list[DeviceRequest]:
    """Return the devices for sessions: ordinals if the driver lists any, or the requests unchanged."""
    cuda = initialise()
    shown = cuda.devices
    if devices is None:
        return [device.ordinal for device in shown or ()] or [None]
    if shown:
        requests: list[DeviceRequest] = [choose_visible(device, cuda).ordinal for device in devices]
    else:  # A session raises the reason, or opens on the CPU.
        requests = devices
    keys = [str(request).lower() if ordinal_of(request) is None else ordinal_of(request) for request in requests]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            what = f"devices names one GPU twice: as {devices[keys.index(key)]!r} and as {devices[position]!r}"
            raise _refused(what, devices, "name each GPU once; sessions_per_device opens several sessions on each")
    return requests


def _refused(what: str, devices: Sequence[DeviceRequest], remedy: str) -> ProviderRequestError:
    return ProviderRequestError(
        what, evidence=[f"devices={list(devices)!r}"], fixes=[manual(remedy)], requested=tuple(devices)
    )


def free_memory(uuid: str) -> int | None:
    memory = read_gpu_memory(uuid)
    return memory[0] if memory is not None else None


def _unlisted(requested: DeviceRequest) -> CudaDevice:
    ordinal = 0 if requested == "auto" else ordinal_of(requested)
    if ordinal is None:
        raise DeviceNotFoundError(
            f"it is unknown which GPU is {requested!r}",
            evidence=["the NVIDIA driver initialised (cuInit returned 0) and did not list its devices"],
            fixes=[manual('name the GPU by its index, as in device=0 or device="cuda:1"')],
            requested=requested,
        )
    return CudaDevice(ordinal, None, None, None, None, None)


def ordinal_of(requested: DeviceRequest) -> int | None:
    """Return the ordinal that a request names, 0 for None; return None for a UUID and for "auto"."""
    if requested is None:
        return 0
    return requested if isinstance(requested, int) else _ordinal(requested)


def describe(ordinal: int, name: str | None, uuid: str | None) -> str:
    return f"cuda:{ordinal} {name or 'unnamed GPU'}" + (f" {uuid}" if uuid else "")


def not_found(
    requested: DeviceRequest,
    available: Sequence[str],
    *,
    ambiguous: bool = False,
    narrowed: str | None = None,
) -> DeviceNotFoundError:
    what = "names more than one GPU" if ambiguous else "is not among the GPUs that this process sees"
    return DeviceNotFoundError(
        f"device {requested!r} {what}",
        evidence=[f"visible to this process: {counted(len(available), 'GPU')}", *available, *filter(None, [narrowed])],
        fixes=[
            manual("pass the index or the UUID of a device that is listed above"),
            *too_late(narrowed),
        ],
        requested=requested,
        available=tuple(available),
    )


def _not_understood(requested: DeviceRequest) -> DeviceNotFoundError:
    return DeviceNotFoundError(
        f"device {requested!r} names no GPU",
        evidence=[f"a device is {_FORMS}"],
        fixes=[
            manual("for the CPU, open an onnxruntime.InferenceSession")
            if is_cpu(requested)
            else manual("name the GPU in one of these forms, or leave device out for the first one")
        ],
        requested=requested,
        available=(),
    )


def is_cpu(requested: object) -> bool:
    return isinstance(requested, str) and requested.strip().lower() == "cpu"


def _ordinal(text: str) -> int | None:
    match = re.fullmatch(r"(?:(?:cuda|gpu)(?::([0-9]{1,9}))?|([0-9]{1,9}))", text.strip().lower())
    if match is None:
        return None
    number = match[1] or match[2]
    return int(number) if number is not None else 0


def digits_of(uuid: str) -> str:
    return uuid.strip().lower().partition("-")[2]
