"""The plan of a session: the arguments for ONNX Runtime, and the reasons for them.

A plan is made of facts alone, step by step: from the request and the installed ONNX Runtime (:func:`plan_of`), from the
GPUs (:func:`bind_gpu`), and from the model (:func:`fit_to_model`). Each step raises the GPUError of a request that
cannot be met.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..environment.gpu.cuda import CudaDevice, CudaState
from ..errors import ProviderRequestError, manual
from ..model.outline import UNREADABLE, GraphOutline
from ..model.weights import bytes_of_initializers
from ..provider.devices import DeviceRequest, check_form, choose_visible, ordinal_of
from ..provider.options import carries_providers, keeps_cpu_out
from ..provider.placement import Placement
from ..provider.records import Found
from ..provider.requests import (
    CHOSEN_OPTIONS,
    CPU,
    CUDA,
    TENSORRT,
    ProviderList,
    check_names,
    check_options,
    cuda_first,
    drop_unintended,
)
from ..provider.runtime import Runtime
from ..provider.settings import CAPTURE, DIMENSIONS, LIMIT, SESSION_SETTINGS, SETTINGS
from ..provider.sizes import bytes_of_gpu, memory_by_variable, parse_gpu_size
from .budget import choose_limits, not_limited, share_with_graphs, share_with_plans, why_not_limited
from .chosen import choose
from .request import SessionRequest
from .undiagnosed import UndiagnosedError

logger = logging.getLogger("ortgpu")

STREAM = "user_compute_stream"
_UNKNOWN = CudaDevice(0, None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments for ONNX Runtime.

    Attributes:
        providers: the providers to bind, in order, with the options of the request and the options that it implies.
        device: the one device that the arguments and the options name.
        gpu: the GPU of ``device``. It is ``_UNKNOWN`` before the GPUs are read, and on the CPU.
        chosen: options that the caller did not set, of CUDA and ``SESSION_SETTINGS``, with value and reason.
        providers_in_options: the SessionOptions name the providers; they are read back after opening.
    """

    request: SessionRequest
    providers: ProviderList
    device: DeviceRequest = None
    gpu: CudaDevice = _UNKNOWN
    chosen: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    providers_in_options: bool = False
    budget: int | None = None  # bytes of the GPU that the session may take

    @property
    def cudnn_disabled(self) -> bool:
        return self.providers.options_of(CUDA).get("enable_cudnn", "1").lower() in ("0", "false")

    @property
    def captures(self) -> bool:
        """True if this library captures CUDA graphs. If the caller sets the option, ONNX Runtime captures them."""
        return CUDA in self.providers.names and (self.request.cuda_graph or CAPTURE in self.chosen)

    def provider_arguments(self) -> list[tuple[str, dict[str, str]]] | None:
        if self.providers_in_options:
            return None
        of_cuda = {name: value for name, (value, _) in self.chosen.items() if name not in SESSION_SETTINGS}
        providers = self.providers.replace_cuda_options(of_cuda) if of_cuda else self.providers
        return providers.provider_arguments()

    def without(self, names: Collection[str]) -> Plan:
        return replace(self, chosen={name: choice for name, choice in self.chosen.items() if name not in names})

    def replace_cuda_options(self, options: Mapping[str, str]) -> Plan:
        return replace(self, providers=self.providers.replace_cuda_options(options))

    def drop_ordinal(self, name: str) -> Plan:
        """Return the plan without the option ``device_id`` of one provider."""
        options = {option: value for option, value in self.providers.options_of(name).items() if option != "device_id"}
        return replace(self, providers=ProviderList(self.providers.names, {**self.providers.options, name: options}))


class Opened(NamedTuple):
    """A session that ONNX Runtime has opened: the plan that it was opened with, its placement, and the environment."""

    plan: Plan
    placement: Placement
    runtime: Runtime
    cuda: CudaState


def undiagnosed_for(
    plan: Plan,
    runtime: Runtime,
    cuda: CudaState | None = None,
    operators: frozenset[tuple[str, str]] | None = None,
    cause: BaseException | None = None,
) -> UndiagnosedError:
    """Return the failure of a session that does not open as planned; see :class:`UndiagnosedError`."""
    return UndiagnosedError(runtime, plan.device, plan.cudnn_disabled, cuda, operators, cause)


def cpu_plan(request: SessionRequest) -> Plan:
    return Plan(request, ProviderList((CPU,)))


def plan_of(request: SessionRequest, runtime: Runtime) -> Plan:
    """Return the plan for the installed ONNX Runtime. Its GPU is not looked for yet.

    Raises:
        DeviceNotFoundError: the device has a form that names no GPU.
        ProviderRequestError: providers that do not exist here, or requests that contradict each other.
        ProviderOptionError: the installed CUDA provider does not know an option or its value.
    """
    check_form(request.device)
    requested = request.providers
    if carries_providers(request.sess_options):
        if requested.names or request.cuda_graph or request.memory is not None:
            argument = "cuda_graph=True" if request.cuda_graph else "providers=" if requested.names else "memory="
            raise ProviderRequestError(
                f"the SessionOptions carry execution providers of their own, and {argument} would change them",
                evidence=["set by add_provider, add_provider_for_devices or set_provider_selection_policy"],
                fixes=[manual(f"leave {argument} out, or make the SessionOptions without providers")],
                requested=requested.names,
            )
        return Plan(request, cuda_first(requested), request.device, providers_in_options=True)
    if requested.names:
        available = runtime.available_providers or ()
        all_names = getattr(runtime.module, "get_all_providers", None)
        known_names = tuple(all_names()) if all_names is not None else (*available, CUDA, CPU)
        if not request.is_guarded:
            requested = drop_unintended(requested, known_names, available)
            if requested.names != request.providers.names:
                unmeant = [name for name in request.providers.names if name not in requested.names]
                logger.info("left out of the providers of a session: %s", ", ".join(unmeant))
                request = replace(request, providers=requested)
        check_names(requested, known_names, available)
        check_options(requested, runtime.provider_library)
    return Plan(
        request,
        cuda_first(_enable_capture(request), keep_cpu=not keeps_cpu_out(request.sess_options)),
        _device_named_by(request),
        chosen={
            name: choice
            for name, choice in CHOSEN_OPTIONS.items()
            if not request.is_guarded and name not in requested.options_of(CUDA)
        },
    )


def bind_gpu(plan: Plan, cuda: CudaState) -> Plan:
    """Return the plan with the GPU that it names. Raises DeviceNotFoundError if this process does not see that GPU.

    Ordinal 0 is left out of the options unless the caller named it: 1.31 then logs a warning about plugins.
    """
    if plan.providers_in_options and plan.device is None:  # The open session shows its GPU.
        return plan
    gpu = choose_visible(plan.device, cuda)
    providers = plan.providers
    if plan.providers_in_options:
        return replace(plan, gpu=gpu)
    plan = _limit_arena(plan, gpu.total_memory)
    if gpu.ordinal != 0 or any("device_id" in options for options in providers.options.values()):
        ordinal = {"device_id": str(gpu.ordinal)}
        options = {
            name: {**providers.options_of(name), **(ordinal if name in (CUDA, *TENSORRT) else {})}
            for name in providers.names
        }
        providers = ProviderList(providers.names, options)
    return replace(plan, gpu=gpu, providers=providers)


def _limit_arena(plan: Plan, total: int | None) -> Plan:
    """Return the plan with the limit that keeps the session within its budget, unless the caller set a limit.

    The budget of the variable ORTGPU_MEMORY is ignored if no limit would keep it.

    Raises:
        ProviderRequestError: no limit would keep the budget of the argument.
        ValueError: the budget is a part of a GPU, and the memory of the GPU is unknown.
    """
    request = plan.request
    size = request.memory if request.memory is not None else memory_by_variable()
    if size is None:
        return plan
    reason = why_not_limited(plan.providers, request.sess_options)
    if reason is not None:
        if request.memory is None:
            return plan
        raise not_limited(reason)
    budget = bytes_of_gpu(parse_gpu_size("memory", size), total)
    limits = choose_limits(budget, plan.providers.options_of(CUDA))
    return replace(plan, budget=budget, chosen={**plan.chosen, **limits})


def fit_to_model(plan: Plan, release: tuple[int, ...], outline: GraphOutline, record: Found | None = None) -> Plan:
    """Return the plan with the options that suit the model. ``release`` is the release of ONNX Runtime."""
    request = plan.request
    if not (request.is_guarded or request.others):  # Further arguments change how the graph is optimised.
        further = choose(request.providers, request.sess_options, release, outline)
        if record is not None:
            further |= _recorded(record, request.providers.options_of(CUDA))
        plan = replace(plan, chosen={**plan.chosen, **further})
    if plan.budget is None or LIMIT not in plan.chosen or not request.shares_budget:
        return plan
    if plan.captures:
        shared = share_with_graphs(plan.chosen[LIMIT])
    elif not (request.is_guarded or request.others) and _may_need_plans(outline):
        shared = share_with_plans(plan.chosen[LIMIT], bytes_of_initializers(outline))
    else:
        return plan
    return replace(plan, chosen={**plan.chosen, **shared})


def _may_need_plans(outline: GraphOutline) -> bool:
    """Return True if convolutions may have inputs of several shapes."""
    try:
        has_convolutions = any(operator in (b"Conv", b"ConvTranspose") for operator, _ in outline.operators())
        return has_convolutions and any(None in (value.shape or ()) for value in outline.graph.inputs)
    except UNREADABLE:
        return False


def _recorded(record: Found, own: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the options of a record, without settings that contain an option of the caller's (``own``)."""
    own = {*own, CAPTURE} if STREAM in own else set(own)  # A captured session has a stream of its own.
    choices: dict[str, tuple[str, str]] = {}
    for name, value in record.choice.settings.items():
        if own.isdisjoint(option for options in SETTINGS[name].values() for option in options):
            why = f"{name} {value}: {record.why}"
            choices |= {option: (option_value, why) for option, option_value in SETTINGS[name][value].items()}
    if DIMENSIONS in choices:
        choices[DIMENSIONS] = (json.dumps(record.record.dimensions), choices[DIMENSIONS][1])
    return choices


def why_untuned(request: SessionRequest) -> str | None:
    """Return why the request uses no record of tune, whatever the record says; None if it may use a record."""
    if request.tuned is False or request.is_guarded:
        return "the session was not to choose options"
    if request.sess_options is not None:
        return "the caller passed SessionOptions"
    if request.others:
        return "the caller passed further arguments of InferenceSession"
    if request.providers.options_of(CUDA).get("use_tf32", "1").lower() in ("0", "false"):
        return "the caller set use_tf32=0"
    if not {CUDA, CPU}.issuperset(request.providers.names):
        return "the caller named other providers than CUDA"
    return None


def _enable_capture(request: SessionRequest) -> ProviderList:
    """Return the providers, with capturing enabled if requested. Raises ProviderRequestError for a contradiction."""
    requested = request.providers
    if not request.cuda_graph:
        return requested
    options = requested.options_of(CUDA)
    if options.get(CAPTURE, "1").lower() in ("0", "false"):
        raise ProviderRequestError(
            f"cuda_graph=True and the provider option {CAPTURE}=0 contradict each other",
            fixes=[manual(f"pass cuda_graph=True or {CAPTURE}, not both")],
            requested=requested.names,
        )
    if STREAM in options:
        raise ProviderRequestError(
            f"cuda_graph=True and the provider option {STREAM} contradict each other",
            evidence=["with cuda_graph a session uses a stream of its own for runs and copies"],
            fixes=[manual(f"leave {STREAM} out")],
            requested=requested.names,
        )
    return requested.replace_cuda_options({CAPTURE: "1"})


def _device_named_by(request: SessionRequest) -> DeviceRequest:
    """Return the one device that the argument and the options name. Raises ProviderRequestError if they name two."""
    device, requested = request.device, request.providers
    ordinals = {
        name: int(options["device_id"])
        for name in (CUDA, *TENSORRT)
        if "device_id" in (options := requested.options_of(name))
    }
    if not ordinals:
        return device
    ordinal = next(iter(ordinals.values()))
    if set(ordinals.values()) != {ordinal} or (device is not None and ordinal_of(device) != ordinal):
        raise ProviderRequestError(
            "the arguments name two different GPUs",
            evidence=[
                *([f"device={device!r}"] if device is not None else []),
                *(f"device_id={number} in the options of {name}" for name, number in ordinals.items()),
            ],
            fixes=[manual("pass only one of them")],
            requested=requested.names,
        )
    return ordinal


def bound_to(plan: Plan, ordinal: int, cuda: CudaState) -> Plan:
    """Return the plan with the GPU of carried providers. Raises ProviderRequestError if the request names another."""
    if plan.device is not None and plan.gpu.ordinal != ordinal:
        raise ProviderRequestError(
            "the arguments name two different GPUs",
            evidence=[f"device={plan.device!r}", f"the SessionOptions carry cuda:{ordinal}"],
            fixes=[manual("pass only one of them")],
        )
    return replace(plan, gpu=choose_visible(ordinal, cuda))
