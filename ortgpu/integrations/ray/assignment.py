"""Pure functions: is a session on the GPU that Ray assigned to its worker, and where are the ranks of a preflight?

All facts are arguments, so that every case can be tested without Ray and without a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...environment.gpu.driver import GPU
from ...environment.ranks import Rank, visibility
from ...errors import NoDeviceError, RankDeviceError, manual
from ...provider.devices import DeviceRequest, digits_of

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def none_assigned(visible_devices: str | None) -> NoDeviceError:
    """Return the error for a worker without an assigned GPU.

    Such a worker sees all GPUs. Since release 2.60 at the latest, Ray leaves its CUDA_VISIBLE_DEVICES unchanged unless
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO says otherwise.
    """
    return NoDeviceError(
        "Ray assigned no GPU to this worker",
        evidence=[
            'get_runtime_context().get_accelerator_ids()["GPU"] is empty',
            visibility(visible_devices) + (": CUDA shows it every GPU of the node" if visible_devices is None else ""),
        ],
        fixes=[
            manual(
                'ask for one: num_gpus=1 in ray.remote or map_batches, ray_actor_options={"num_gpus": 1} in a Serve '
                "deployment"
            )
        ],
    )


def refusal(
    assigned: Collection[str], visible_devices: str | None, device: DeviceRequest, *, kept_by_ray: bool
) -> RankDeviceError | None:
    """Return the error that keeps a session off the assigned GPUs, or None. There is at least one GPU.

    ``kept_by_ray`` is False if the variable :data:`NOSET` keeps Ray from setting CUDA_VISIBLE_DEVICES.
    """
    shown = {name.strip() for name in (visible_devices or "").split(",")}
    if shown != set(assigned):
        return RankDeviceError(
            f"Ray assigned GPU {', '.join(sorted(assigned))} to this worker, but CUDA shows it others",
            evidence=[visibility(visible_devices), *([] if kept_by_ray else [f"{NOSET} is set"])],
            fixes=[
                manual("leave CUDA_VISIBLE_DEVICES to Ray: do not set it in the worker")
                if kept_by_ray
                else manual(f"start Ray without {NOSET}", needs="host")
            ],
        )
    if len(assigned) > 1 and device is None:
        return RankDeviceError(
            f"Ray assigned {len(assigned)} GPUs to this worker, and a session uses one",
            evidence=[visibility(visible_devices)],
            fixes=[
                manual("ask for num_gpus=1 for each worker, and for more workers"),
                manual('or say which of them this session uses: device="cuda:0" is the first of those assigned'),
            ],
        )
    return None


def uuids_of(assigned: Collection[str], gpus: Sequence[GPU], device_order: str | None) -> frozenset[str] | None:
    """Return the UUIDs of the GPUs that a session may be on, or None if unknown.

    Ray's ids are numbers as in CUDA_VISIBLE_DEVICES, or UUIDs if Ray was started with UUIDs. ``gpus`` are the GPUs of
    the whole node from NVML. Unless CUDA_DEVICE_ORDER is PCI_BUS_ID, CUDA and NVML number them alike only if all GPUs
    are alike.
    """
    uuids: set[str] = set()
    in_order = device_order == "PCI_BUS_ID" or len({(gpu.name, gpu.compute_capability) for gpu in gpus}) == 1
    for name in assigned:
        if not name.isdecimal():
            uuids.add(name)
        elif in_order and int(name) < len(gpus) and (uuid := gpus[int(name)].uuid) is not None:
            uuids |= {uuid, *gpus[int(name)].mig_uuids}
        else:
            return None
    return frozenset(uuids)


def is_among(uuid: str, allowed: Collection[str]) -> bool:
    """Compare digits: CUDA writes GPU- before the UUID of a MIG instance, and an allowed UUID may be shortened."""
    return any(digits_of(uuid).startswith(digits_of(allowed_uuid)) for allowed_uuid in allowed)


def elsewhere(uuid: str, allowed: Collection[str]) -> RankDeviceError:
    return RankDeviceError(
        "the session is not on the GPU that Ray assigned to this worker",
        evidence=[
            f"assigned: {', '.join(sorted(allowed))}",
            f"CUDA gave it: {uuid}",
            "CUDA reads CUDA_VISIBLE_DEVICES once in a process: it was in use here before Ray assigned this GPU",
        ],
        fixes=[manual("let Ray end the worker after a task with a GPU, which it does unless max_calls says otherwise")],
    )


def ranks_of(nodes: Sequence[str]) -> list[Rank]:
    every = list(nodes)
    return [
        Rank(number, len(every), every[:number].count(node), every.count(node)) for number, node in enumerate(every)
    ]


def address_of(places: Sequence[tuple[str, str, int]]) -> str:
    """Return the address of rank 0. ``places`` has node id, node address and port of each rank.

    If all ranks are on one node, it is the loopback address: the network cannot reach it.
    """
    _, ip, port = places[0]
    host = "127.0.0.1" if len({node for node, _, _ in places}) == 1 else ip
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
