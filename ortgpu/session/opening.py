"""Open an InferenceSession on the GPU and verify it, or raise the reason.

It works on any instance of ``onnxruntime.InferenceSession`` under construction; the caller passes the original
constructor. ``onnxruntime`` must be imported already.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..environment.gpu.cuda import CudaDevice, CudaState, context_is_active, initialise
from ..environment.libraries.catalogue import CUDNN_CODE, LIBRARIES, stem_of
from ..environment.libraries.loader import loader_of_this_process
from ..environment.libraries.wheel import Architecture, coverage_by, read_architectures_of_cudnn
from ..errors import (
    CollectiveOpsUnavailableError,
    CPUExecutionWarning,
    GPUError,
    PlacementError,
    PoisonedContextError,
    ProviderError,
    ProviderFallbackError,
    ProviderRequestError,
    manual,
)
from ..model.contents import read_collective_operators, read_model
from ..model.structure import NO_REGULAR_FILE, ModelSource
from ..process.background import Task
from ..provider import lifetime, requests
from ..provider import placement as placements
from ..provider.devices import CPU, Device, DeviceRequest, check_form, choose_visible, ordinal_of, unlisted
from ..provider.living import stacklevel
from ..provider.options import CPU_FALLBACK_KEY, carries_providers, keeps_cpu_out
from ..provider.placement import CPUNodesWarning, Placement
from ..provider.preloading import PreloadReport
from ..provider.requests import CPUNodes
from ..provider.runtime import Runtime, load_lazily_opened, load_runtime, look_again, open_provider
from ..running.onnxruntimes import InferenceSession
from .arguments import cpu_is_allowed_by_variable
from .construction import Constructed, construct_recording, constructed_as_chosen
from .request import SessionRequest, Verified

logger = logging.getLogger("ortgpu")

_has_opened = False  # True once a session has opened, so the provider is loaded

# Errors that do not depend on the model, by process, device, variables and files
_known: dict[tuple[Any, ...], GPUError] = {}
_MANY = 32
# Variables that the driver and the search for libraries read at each call, not only at the start of the process
_DECISIVE = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_HOME", "CUDA_PATH", "CUDNN_HOME",
    "CUDNN_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PATH",
)  # fmt: skip


def open_verified(
    session: Any, construct: Callable[..., None], request: SessionRequest, driver: Task[CudaState] | None = None
) -> Verified:
    """Construct ``session`` on the GPU that the request names, and verify that it is there.

    Constructs it on the CPU at once if that is allowed and an earlier error keeps this process from the GPU.

    Args:
        construct: InferenceSession's own ``__init__``, bound to ``session``.
        driver: the initialisation of the driver, if it has begun.

    The caller then calls :func:`check_cpu_nodes`, from where its warning should point.

    Raises:
        GPUError: the cause. The instance may be half made, and the caller must drop what it holds.
        Exception: ONNX Runtime's own, if it is not about the GPU.
    """
    global _has_opened
    check_form(request.device)
    _refuse_providers_in(request.sess_options)
    runtime = load_runtime() if _has_opened else look_again()
    if request.providers is None and request.provider_options is None:
        known = _known_refusal(request, request.device, False, runtime)
        if known is not None:  # no provider arguments to check first
            return open_on_cpu(session, construct, request, known)
    requested = requests.parse(request.providers, request.provider_options)
    for name in requested.repeated:
        warnings.warn(f"{name} is named more than once: the first counts", stacklevel=stacklevel(session))
    available = runtime.available_providers or ()
    requests.check_names(requested, _all_providers(available), available)
    requests.check_options(requested, runtime.provider_library)
    options_chosen = {
        name: choice
        for name, choice in requests.CHOSEN_OPTIONS.items()
        if request.choose_options and name not in requested.options_of(requests.CUDA)
    }
    with_defaults = requested.with_cuda_options({name: value for name, (value, _) in options_chosen.items()})
    if request.cuda_graph:
        from ..running.graph_requests import with_capture

        with_defaults = with_capture(with_defaults)
    device = _device_asked_for(with_defaults, request.device)
    cudnn_disabled = with_defaults.options_of(requests.CUDA).get("enable_cudnn", "1").lower() in ("0", "false")
    context = OpeningContext(runtime, device, request.model, cudnn_disabled)
    lifetime.refuse_if_lost()
    known = _known_refusal(request, device, cudnn_disabled, runtime)
    if known is not None:
        return open_on_cpu(session, construct, request, known)
    try:
        gpu = _gpu_for(context, driver)
    except GPUError as error:
        if not context.depends_on_model:
            if len(_known) >= _MANY:
                _known.clear()
            _known[_surroundings(device, cudnn_disabled, context.runtime)] = lifetime.fresh_copy(error)
        raise
    _check_tensorrt(with_defaults, context.runtime)
    final, constructed = _construct(session, construct, request, requested, with_defaults, gpu, context)
    _verify_providers(session, final, gpu, context)
    _check_lazily_opened(constructed.placement, gpu.compute_capability, context)
    _has_opened = True
    return Verified(_describe(gpu), constructed.placement, {**options_chosen, **constructed.chosen})


def _gpu_for(context: OpeningContext, driver: Task[CudaState] | None) -> CudaDevice:
    """Return the requested GPU. Raises GPUError if this process cannot open sessions on it."""
    runtime = context.runtime
    if requests.CUDA not in (runtime.available_providers or ()) or runtime.packages.onnxruntime.is_of_another_release:
        raise context.diagnose()
    context.runtime = open_provider()
    context.cuda = driver.result() if driver is not None else initialise()
    report = context.runtime.preload
    if report is None or not report.ok or report.driver_missing or context.runtime.provider_error is not None:
        raise context.diagnose()
    if context.cuda.code != 0:
        raise lifetime.forked_error(context.cuda.code) or context.diagnose()
    return _choose(context.device, context)


def _known_refusal(
    request: SessionRequest, device: DeviceRequest, cudnn_disabled: bool, runtime: Runtime
) -> GPUError | None:
    """Return the error that kept this process from the device before, or None.

    None also if the CPU is not allowed instead, or if the surroundings have changed.
    """
    if not cpu_is_allowed(request.allow_cpu, request.sess_options):
        return None
    known = _known.get(_surroundings(device, cudnn_disabled, runtime))
    return lifetime.fresh_copy(known) if known is not None else None


def _surroundings(device: DeviceRequest, cudnn_disabled: bool, runtime: Runtime) -> tuple[Any, ...]:
    """Return the facts that decide whether the device can be used, as far as each session reads them again."""
    loaded = len(loader_of_this_process().handles)
    variables = tuple(map(os.environ.get, _DECISIVE))
    return os.getpid(), device, cudnn_disabled, runtime.provider_stamp, loaded, variables


def cpu_is_allowed(allow_cpu: bool | None, options: Any, error: GPUError | None = None) -> bool:
    """Return True if the session may run on the CPU after ``error``, or after any error if it is None.

    An error of the request itself never allows the CPU, which would not mend it.
    """
    if keeps_cpu_out(options) or (error is not None and _is_of_the_request(error)):
        return False
    return cpu_is_allowed_by_variable() if allow_cpu is None else allow_cpu


def warn_of_cpu(session: Any, error: GPUError, model: ModelSource) -> None:
    """Warn that a session is on the CPU because of ``error``. Log it too, since a program may hide warnings."""
    warning = CPUExecutionWarning(error, "<bytes>" if isinstance(model, bytes) else os.fsdecode(model))
    text = "%s runs on the CPU, which was allowed [%s]: %s"
    logger.warning(text, warning.model, error.code, error.summary, extra={"warning": warning})
    warnings.warn(warning, stacklevel=stacklevel(session))


def _is_of_the_request(error: GPUError) -> bool:
    of_the_request = (ProviderError, PlacementError, CollectiveOpsUnavailableError)
    return isinstance(error, of_the_request) and not isinstance(error, ProviderFallbackError)


def refuse_broken_model(request: SessionRequest, error: GPUError) -> None:
    """Raise ONNX Runtime's own error for a model that it cannot read, if ``error`` came before it saw the model.

    ONNX Runtime is asked only if our own reader finds a problem, since it would parse the whole model. A model that
    then opens on the CPU is not broken.
    """
    if error.__cause__ is not None or _is_of_the_request(error):
        return
    facts = read_model(request.model)
    if facts.problem == NO_REGULAR_FILE or (facts.problem is None and not facts.data_problems):
        return
    in_file = not isinstance(request.model, bytes)
    options = request.sess_options if request.sess_options is not None else native.get_default_session_options()
    try:
        # Not an InferenceSession, which guards, tracers and ortgpu.sessions() would see
        model = os.fspath(request.model) if in_file else request.model
        opened = native.InferenceSession(options, model, in_file, False)
        opened.initialize_session([requests.CPU], [{}], set())
    except Exception as refusal:
        if _placement_refused(refusal) is None:
            raise refusal from None


def open_on_cpu(session: Any, construct: Callable[..., None], request: SessionRequest, error: GPUError) -> Verified:
    """Construct ``session`` on the CPU instead of raising ``error``, if its caller allowed that.

    Raises:
        GPUError: ``error``, if it is not allowed.
        Exception: ONNX Runtime's own, if it refuses the model.
    """
    if not cpu_is_allowed(request.allow_cpu, request.sess_options, error):
        refuse_broken_model(request, error)
        raise error
    construct_recording(construct, request.model, request.sess_options, [requests.CPU], request.kwargs)
    verified = Verified(CPU, _placement_of(session, request), {})
    session._keep(verified)
    warn_of_cpu(session, error, request.model)  # after opening, since ONNX Runtime may refuse the model
    return verified


def _placement_of(session: Any, request: SessionRequest) -> Placement:
    return placements.read_placement(session, without_options=request.sess_options is None)


def _construct(
    session: Any,
    construct: Callable[..., None],
    request: SessionRequest,
    requested: requests.ProviderList,
    with_defaults: requests.ProviderList,
    gpu: CudaDevice,
    context: OpeningContext,
) -> tuple[requests.ProviderList, Constructed]:
    """Construct ``session``. Return the providers that were asked of ONNX Runtime, and the result."""
    final = _with_device(requests.cuda_first(with_defaults, keep_cpu=not keeps_cpu_out(request.sess_options)), gpu)
    if request.cuda_graph:
        from ..running.graph_requests import on_own_stream

        final = on_own_stream(session, final)

    def construct_with(providers: requests.ProviderList) -> None:
        arguments = providers.as_arguments()
        construct_recording(construct, request.model, request.sess_options, arguments, request.kwargs)

    constructed = constructed_as_chosen(session, construct, request, requested, final, gpu.compute_capability)
    if constructed is not None:
        return final, constructed
    try:
        construct_with(final)
    except Exception as cause:
        error = _placement_refused(cause) or _capture_refused(cause, session, construct_with, final, request)
        error = error or context.diagnose(cause)
        if error is None or (isinstance(error, PoisonedContextError) and lifetime.gpu_works(gpu.ordinal)):
            raise  # ONNX Runtime's own error, not about the GPU
        if context_is_active(gpu.ordinal) is False:
            raise error from cause  # this process has no CUDA context that could be lost
        raise lifetime.noted(error) from cause
    return final, Constructed({}, _placement_of(session, request))


def _choose(device: DeviceRequest, context: OpeningContext) -> CudaDevice:
    """Return the requested device. Only its ordinal is known if the driver lists no devices to this process."""
    cuda = context.cuda
    if cuda is None or cuda.devices is None:
        return unlisted(device)
    if not cuda.devices:
        raise context.diagnose()
    chosen = choose_visible(device, cuda)
    provider = context.runtime.preload.provider if context.runtime.preload is not None else None
    capability = chosen.compute_capability
    if provider is not None and capability is not None and provider.coverage(capability, os.environ) == "none":
        raise context.diagnose()
    return chosen


def _verify_providers(session: Any, final: requests.ProviderList, chosen: CudaDevice, context: OpeningContext) -> None:
    bound = tuple(InferenceSession.get_providers(session))  # a subclass may override it
    if requests.CUDA not in bound:
        raise context.diagnose()
    if bound[: len(final.names)] != final.names:
        raise _other_providers(final.names, bound)
    ordinal = InferenceSession.get_provider_options(session)[requests.CUDA].get("device_id", "0")
    listed = context.cuda is not None and context.cuda.devices is not None
    if ordinal != str(chosen.ordinal):
        raise ProviderFallbackError(
            f"ONNX Runtime bound cuda:{ordinal} and cuda:{chosen.ordinal} was asked for", bound=bound
        )
    if listed and context_is_active(chosen.ordinal) is False:
        raise ProviderFallbackError(
            f"ONNX Runtime bound cuda:{ordinal}, and this process has no CUDA context there", bound=bound
        )


def _check_lazily_opened(placement: Placement, capability: tuple[int, int] | None, context: OpeningContext) -> None:
    """Raise the error that the first node needing cuDNN or cuFFT would raise.

    ONNX Runtime 1.28 and newer bind CUDA without these libraries and fail at that node. Any release fails there if
    cuDNN has no code for the GPU.
    """
    placed = [(node.op_type, node.domain) for node in placement.nodes if node.provider == requests.CUDA]
    operators = placements.cudnn_operators(placed)
    if context.cudnn_disabled:
        if operators:
            from ..diagnosis.checks.opening import cudnn_disabled

            raise cudnn_disabled(operators, [])
        return
    transforms = placements.cufft_operators(placed)
    if operators or transforms or not placement.known:
        context.runtime = load_lazily_opened(_stems_for(operators, transforms, everything=not placement.known))
    report = context.runtime.preload
    if report is None:
        return
    lacks_cudnn = report.path_of("libcudnn") is None or any(
        stem_of(lib.soname).startswith("libcudnn") for lib in report.missing
    )
    if (operators and (lacks_cudnn or report.cudnn_mixed)) or (transforms and report.path_of("libcufft") is None):
        context.operators = frozenset(placed)
        raise context.diagnose()
    if (operators or not placement.known) and _cudnn_lacks_code(report, capability):
        context.operators = frozenset(placed) if placement.known else read_model(context.model).operators
        if placements.cudnn_operators(context.operators):
            raise context.diagnose()


def _cudnn_lacks_code(report: PreloadReport, capability: tuple[int, int] | None) -> bool:
    held = _code_of(tuple(filter(None, map(report.path_of, CUDNN_CODE))))
    return capability is not None and coverage_by(held, capability, os.environ) == "none"


@functools.cache  # loaded files do not change
def _code_of(cudnn: tuple[str, ...]) -> tuple[Architecture, ...] | None:
    return read_architectures_of_cudnn(cudnn)


def _stems_for(cudnn: tuple[str, ...], cufft: tuple[str, ...], *, everything: bool) -> frozenset[str]:
    """Return the stems of the libraries that these operators open."""
    stems: set[str] = set()
    if cudnn or everything:
        stems |= {spec.stem for spec in LIBRARIES if spec.is_cudnn} | {"libnvrtc", "libcudart"}
        if not everything and not {"RNN", "GRU", "LSTM"} & set(cudnn):
            stems -= {"libcudnn_adv", "libcudnn_ext"}  # recurrent networks and attention, causal convolutions
    if cufft or everything:
        stems |= {"libcufft", "libnvJitLink"}
    return frozenset(stems)


def check_cpu_nodes(placement: Placement, cpu_nodes: CPUNodes, stacklevel: int) -> None:
    """Warn of nodes that compute on the CPU, or raise PlacementError. ``stacklevel`` counts from the caller."""
    if cpu_nodes == "forbid":
        refusal = placements.refusal(placement)
        if refusal is not None:
            raise refusal
    elif cpu_nodes == "warn":
        warning = placements.warning(placement)
        if warning is not None:
            warnings.warn(CPUNodesWarning(warning), stacklevel=stacklevel + 1)


class OpeningContext:
    """The facts that a diagnosis needs if this session does not open."""

    def __init__(self, runtime: Runtime, device: DeviceRequest, model: Any, cudnn_disabled: bool) -> None:
        self.runtime = runtime
        self.device = device
        self.model = model
        self.cudnn_disabled = cudnn_disabled
        self.cuda: CudaState | None = None
        self.operators: frozenset[tuple[str, str]] | None = None  # as placed; None: read them from the model file
        self.depends_on_model = False  # of the last diagnosis

    def diagnose(self, cause: BaseException | None = None) -> Any:
        """Return the error to raise, or None if ``cause`` has nothing to do with the GPU."""
        operators = self.operators
        if operators is None:  # read the model only if these libraries are in doubt: it takes longest
            report = self.runtime.preload
            absent = [stem_of(library.soname) for library in report.missing] if report is not None else []
            in_doubt = any(stem.startswith(("libcudnn", "libcufft")) for stem in absent)
            in_doubt = in_doubt or (report is not None and bool(report.cudnn_mixed))
            operators = read_model(self.model).operators if in_doubt else frozenset()
        from ..diagnosis import failure
        from ..diagnosis.facts import Request

        request = Request(
            device=self.device,
            cudnn_operators=placements.cudnn_operators(operators),
            cufft_operators=placements.cufft_operators(operators),
            cudnn_disabled=self.cudnn_disabled,
            collective_operators=read_collective_operators(self.model),
        )
        self.depends_on_model = bool(request.cudnn_operators or request.cufft_operators or request.collective_operators)
        return failure.why_unusable(self.runtime, request=request, cuda=self.cuda, cause=cause)


def _all_providers(available: Sequence[str]) -> list[str]:
    names = getattr(onnxruntime, "get_all_providers", None)
    return list(names()) if names is not None else [*available, requests.CUDA, requests.CPU]


def _device_asked_for(requested: requests.ProviderList, device: DeviceRequest) -> DeviceRequest:
    """Return the one device that the argument and the options of CUDA and TensorRT name.

    Raises:
        ProviderRequestError: they name different GPUs.
    """
    options = {name: requested.options_of(name).get("device_id", "") for name in (requests.CUDA, *requests.TENSORRT)}
    named = {name: int(text) for name, text in options.items() if text.strip().isdecimal()}
    if not named:
        return device
    ordinal = next(iter(named.values()))
    if set(named.values()) != {ordinal} or (device is not None and ordinal_of(device) != ordinal):
        given = [f"device_id={number} in the options of {name}" for name, number in named.items()]
        raise ProviderRequestError(
            "this session is asked for on different GPUs",
            evidence=[*([f"device={device!r}"] if device is not None else []), *given],
            fixes=[manual("name the GPU once")],
            requested=requested.names,
        )
    return ordinal


def _with_device(providers: requests.ProviderList, chosen: CudaDevice) -> requests.ProviderList:
    """Return ``providers`` with the device's ordinal.

    Ordinal 0 is left out unless the caller named it, since naming it makes 1.31 log a warning about plugin providers.
    """
    named = any("device_id" in options for options in providers.options.values())
    if chosen.ordinal == 0 and not named:
        return providers
    on_device = {name: {"device_id": str(chosen.ordinal)} for name in (requests.CUDA, *requests.TENSORRT)}
    options = {name: {**providers.options_of(name), **on_device.get(name, {})} for name in providers.names}
    return requests.ProviderList(providers.names, options)


def _check_tensorrt(requested: requests.ProviderList, runtime: Runtime) -> None:
    from ..provider.tensorrt import check_loadable

    if requests.TENSORRT[0] in requested.names and runtime.provider_library is not None:
        check_loadable(runtime.provider_library)


def _refuse_providers_in(options: Any) -> None:
    if carries_providers(options):
        raise ProviderRequestError(
            "the SessionOptions carry execution providers of their own, which cannot be verified",
            evidence=[
                "set by add_provider, add_provider_for_devices or set_provider_selection_policy",
                "a GPUSession is on the CUDA provider that is part of onnxruntime-gpu",
            ],
            fixes=[
                manual("leave them out of the SessionOptions, and name those beside CUDA as providers="),
                manual("or use onnxruntime.InferenceSession for a provider that a plugin brought"),
            ],
        )


def _placement_refused(cause: BaseException) -> PlacementError | None:
    if "fallback to CPU EP has been explicitly disabled" not in str(cause):
        return None
    return PlacementError(
        "nodes of this model are on the CPU, and the session options forbid that",
        evidence=[str(cause).strip().splitlines()[0], f"{CPU_FALLBACK_KEY}=1, which counts shape nodes too"],
        fixes=[manual('leave that entry out and pass cpu_nodes="forbid": it tells compute nodes from shape nodes')],
    )


def _capture_refused(
    cause: BaseException,
    session: Any,
    construct_with: Callable[[requests.ProviderList], None],
    final: requests.ProviderList,
    request: SessionRequest,
) -> GPUError | None:
    from ..running.graph_requests import is_refusal, why_not_captured, without_capture

    if not is_refusal(cause):
        return None
    try:
        construct_with(without_capture(final))  # open it without capture to learn its placement
        placement = placements.read_placement(session)
    except Exception:  # noqa: BLE001 - the refusal stands, with fewer details
        placement = placements.UNKNOWN
    return why_not_captured(cause, placement, request.model)


def _other_providers(expected: tuple[str, ...], bound: tuple[str, ...]) -> ProviderFallbackError:
    return ProviderFallbackError(
        "ONNX Runtime bound other providers than those asked for",
        evidence=[f"asked for: {', '.join(expected)}", f"bound: {', '.join(bound)}"],
        bound=bound,
    )


def _describe(chosen: CudaDevice) -> Device:
    from ..environment.gpu.driver import read_driver_version

    version = read_driver_version()
    return Device(
        "cuda", chosen.ordinal, chosen.uuid, chosen.name, chosen.compute_capability, chosen.total_memory, version
    )
