"""GPUSession: an InferenceSession that is on the GPU it names, or does not exist."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from .runtime import Opening, Runtime, load_runtime, why_no_module, why_unusable

_runtime = load_runtime()
if _runtime.module is None:
    raise why_no_module(_runtime)

import onnxruntime  # noqa: E402 - load_runtime imports it, after what it links where it links CUDA itself

from . import placement as placements  # noqa: E402
from . import providers as requests  # noqa: E402
from .devices import CPU as CPU_DEVICE  # noqa: E402
from .devices import Device, DeviceRequest, check_form, choose  # noqa: E402
from .environment.cuda import CudaDevice, CudaState, context_is_active, initialise, initialised_in  # noqa: E402
from .errors import (  # noqa: E402
    CPUExecutionWarning,
    ExecutionError,
    ForkedSessionError,
    GPUError,
    PlacementError,
    ProviderError,
    ProviderFallbackError,
    ProviderRequestError,
    manual,
    python,
)
from .models import read_model  # noqa: E402
from .placement import CPUNodes, CPUNodesWarning, Placement  # noqa: E402

if TYPE_CHECKING:
    InferenceSession: Any = object
else:
    InferenceSession = onnxruntime.InferenceSession

_CPU_FALLBACK_KEY = "session.disable_cpu_ep_fallback"
_TRUE = ("1", "true", "yes", "on")


class _Closed:
    """Stands in for everything that a closed session gave up: any use of it says so."""

    def _refuse(self) -> NoReturn:
        raise ExecutionError("this GPUSession is closed", fixes=[manual("open a new GPUSession")])

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()


_CLOSED = _Closed()
# Everything of an InferenceSession that keeps the C++ session alive, in any release since 1.18.
_HELD = (
    "_sess", "_inputs_meta", "_outputs_meta", "_overridable_initializers", "_input_meminfos", "_output_meminfos",
    "_input_epdevices", "_model_meta", "_sess_options", "_profiling_start_time_ns",
)  # fmt: skip


class GPUSession(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
    """An ``onnxruntime.InferenceSession`` that runs on the GPU it names for its whole life.

    Args:
        path_or_bytes, sess_options, providers, provider_options: as for InferenceSession. CUDA is put first whatever
            ``providers`` says; a TensorRT provider named before it stays before it; the CPU is last, for the nodes that
            ONNX Runtime runs there. ``sess_options`` keeps every setting; one entry is added to it, which makes
            ONNX Runtime record where it places nodes, unless the caller set that entry.
        device: an ordinal, "cuda:1", a UUID ("GPU-..."), or "auto": the most free memory when the session is made.
            None is the provider option ``device_id``, or 0.
        cpu_nodes: what to do about nodes that compute on the CPU: "warn", "forbid" (raises PlacementError), "allow".
            Nodes that only handle shapes belong there and do not count.
        allow_cpu: run on the CPU, with a CPUExecutionWarning, where the GPU cannot be had. Also ORTGPU_ALLOW_CPU=1.

    Raises:
        GPUError: a subclass that names the cause and what mends it. Nothing is left behind.
        Exception: ONNX Runtime's own, unchanged, for what is not about the GPU: no such file, an invalid model.

    Not promised: that two runs give the same bits, or what NVML says about other processes. A session serves many
    threads, and one process: it does not survive a fork.
    """

    device: Device
    placement: Placement

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        device: DeviceRequest = None,
        cpu_nodes: CPUNodes = "warn",
        allow_cpu: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(path_or_bytes, (str, bytes, os.PathLike)):
            raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        if cpu_nodes not in ("allow", "warn", "forbid"):
            raise ValueError(f'cpu_nodes must be "allow", "warn" or "forbid", not {cpu_nodes!r}')
        if int(kwargs.pop("enable_fallback", 0)):
            raise _no_fallback("enable_fallback=1 was passed")
        self._cpu_nodes: CPUNodes = cpu_nodes
        self._kwargs = kwargs
        try:
            self._open(path_or_bytes, sess_options, providers, provider_options, device)
        except GPUError as error:
            self._let_go()
            if not _cpu_is_allowed(allow_cpu, error):
                raise
            warnings.warn(CPUExecutionWarning(error), stacklevel=2)
            self._open_on_cpu(path_or_bytes, sess_options)
        except BaseException:
            self._let_go()
            raise

    def _open(
        self, model: Any, sess_options: Any, providers: Any, provider_options: Any, device: DeviceRequest
    ) -> None:
        check_form(device)
        requested = requests.parse(providers, provider_options)
        runtime = load_runtime()
        available = runtime.available_providers or ()
        requests.check_names(requested, _all_providers(available), available)
        requests.check_options(requested, runtime.provider_library)
        device = _device_asked_for(requested, device)
        cudnn_disabled = requested.options_of(requests.CUDA).get("enable_cudnn", "1").lower() in ("0", "false")
        why = _Why(runtime, device, model, cudnn_disabled)
        if requests.CUDA not in available:
            raise why.unusable()
        _refuse_after_fork()
        opening = Opening(runtime)
        try:
            why.cuda = initialise() if opening.promising else None
        finally:
            why.runtime = opening.finish()
        report = why.runtime.preload
        if report is None or not report.ok or report.driver_missing or why.runtime.provider_error is not None:
            raise why.unusable()
        if why.cuda is None or why.cuda.code:
            raise why.unusable()
        _check_tensorrt(requested, why.runtime)
        asked, chosen = self._construct(model, sess_options, requested, why)
        self._verify(asked, chosen, why)

    def _construct(
        self, model: Any, sess_options: Any, requested: requests.ProviderList, why: _Why
    ) -> tuple[requests.ProviderList, CudaDevice | None]:
        chosen = self._choose(why.device, why)
        options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
        asked = _with_device(requests.cuda_first(requested, keep_cpu=not _keeps_cpu_out(options)), chosen)
        _refuse_providers_in(options)
        _record_placement(options)
        try:
            super().__init__(model, options, providers=asked.as_arguments(), enable_fallback=0, **self._kwargs)
        except Exception as cause:
            error = _placement_refused(cause) or why.unusable(cause)
            if error is None:
                raise  # not about the GPU: ONNX Runtime's own
            raise error from cause
        return asked, chosen

    def _choose(self, device: DeviceRequest, why: _Why) -> CudaDevice | None:
        """The device among those that the driver shows; None when the driver answers only ONNX Runtime."""
        cuda = why.cuda
        if cuda is None or cuda.devices is None:
            return None
        if not cuda.devices:
            raise why.unusable()
        chosen = choose(device, cuda.devices, _free_memory, os.environ.get("CUDA_VISIBLE_DEVICES"))
        provider = why.runtime.preload.provider if why.runtime.preload is not None else None
        capability = chosen.compute_capability
        if provider is not None and capability is not None and provider.coverage(capability) == "none":
            raise why.unusable()
        return chosen

    def _verify(self, asked: requests.ProviderList, chosen: CudaDevice | None, why: _Why) -> None:
        bound = tuple(self.get_providers())
        if requests.CUDA not in bound:
            raise why.unusable()
        if bound[: len(asked.names)] != asked.names:
            raise _other_providers(asked.names, bound)
        ordinal = self.get_provider_options()[requests.CUDA].get("device_id", "0")
        if chosen is not None and (ordinal != str(chosen.ordinal) or context_is_active(chosen.ordinal) is False):
            raise ProviderFallbackError(
                f"ONNX Runtime bound cuda:{ordinal} and cuda:{chosen.ordinal} was asked for", bound=bound
            )
        self.placement = placements.read_placement(self)
        self._check_lazily_opened(why)
        self._check_cpu_nodes()
        self.device = _describe(chosen, int(ordinal))

    def _check_lazily_opened(self, why: _Why) -> None:
        """1.28 and newer bind without cuDNN and cuFFT, and fail at the first node that needs them."""
        placed = [(node.op_type, node.domain) for node in self.placement.nodes if node.provider == requests.CUDA]
        operators = tuple(sorted({op for op, domain in placed if placements.needs_cudnn(op, domain)}))
        if why.cudnn_disabled:
            if operators:
                from .diagnosis.messages import cudnn_disabled

                raise cudnn_disabled(operators, [])
            return
        transforms = tuple(sorted({op for op, domain in placed if placements.needs_cufft(op, domain)}))
        report = why.runtime.preload
        if report is None:
            return
        lacks_cudnn = report.path_of("libcudnn") is None or any("libcudnn" in lib.soname for lib in report.missing)
        if (operators and lacks_cudnn) or (transforms and report.path_of("libcufft") is None):
            why.operators = frozenset(placed)
            raise why.unusable()

    def _check_cpu_nodes(self) -> None:
        if self._cpu_nodes == "allow" or (self._cpu_nodes == "warn" and not self.placement.known):
            return
        refusal = placements.refusal(self.placement)
        if refusal is None:
            return
        if self._cpu_nodes == "forbid":
            raise refusal
        # Three frames up is the caller of the constructor: this, _verify, _open, __init__.
        warnings.warn(CPUNodesWarning(f"{refusal.summary}\n{self.placement}"), stacklevel=5)

    def _open_on_cpu(self, model: Any, sess_options: Any) -> None:
        options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
        _record_placement(options)
        super().__init__(model, options, providers=[requests.CPU], enable_fallback=0, **self._kwargs)
        self.placement = placements.read_placement(self)
        self.device = CPU_DEVICE

    def close(self) -> None:
        """Give up the session and its GPU memory; any later use raises ExecutionError. Closing twice is fine.

        ONNX Runtime frees the memory when nothing refers to the session: an IOBinding, an OrtValue or an input's
        metadata that the caller keeps holds it. The CUDA context stays until the process ends.
        """
        for name in _HELD:
            if hasattr(self, name):
                setattr(self, name, _CLOSED)
        self._model_bytes = None

    def __enter__(self) -> GPUSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enable_fallback(self) -> None:
        """A GPUSession has no fallback: raises ProviderRequestError."""
        raise _no_fallback("enable_fallback() was called")

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Not supported: a session is verified when it is made. Raises ProviderRequestError and changes nothing."""
        raise ProviderRequestError(
            "the providers of a GPUSession are set when it is made",
            evidence=[f"set_providers({providers!r}) would build the session anew, unverified"],
            fixes=[manual("open another GPUSession with these providers")],
            requested=providers,
        )

    def _let_go(self) -> None:
        for name in (*_HELD, "_model_bytes"):
            self.__dict__.pop(name, None)


class _Why:
    """What a diagnosis will need if this construction fails."""

    def __init__(self, runtime: Runtime, device: DeviceRequest, model: Any, cudnn_disabled: bool) -> None:
        self.runtime = runtime
        self.device = device
        self.model = model
        self.cudnn_disabled = cudnn_disabled
        self.cuda: CudaState | None = None
        self.operators: frozenset[tuple[str, str]] | None = None  # as placed; None: as the model file has them

    def unusable(self, cause: BaseException | None = None) -> Any:
        """The error to raise; with a ``cause`` that has nothing to do with the GPU, None."""
        operators = self.operators
        if operators is None:  # reading a model takes longer than all the rest, and only matters to these libraries
            absent = self.runtime.preload.missing if self.runtime.preload is not None else ()
            lacking = any(library.soname.startswith(("libcudnn", "libcufft")) for library in absent)
            operators = read_model(self.model).operators if lacking else frozenset()
        return why_unusable(
            self.runtime,
            device=self.device,
            cuda=self.cuda,
            cause=cause,
            cudnn_operators=tuple(sorted({op for op, domain in operators if placements.needs_cudnn(op, domain)})),
            cufft_operators=tuple(sorted({op for op, domain in operators if placements.needs_cufft(op, domain)})),
            cudnn_disabled=self.cudnn_disabled,
        )


def _refuse_after_fork() -> None:
    creator = initialised_in()
    if creator is None or creator == os.getpid():
        return
    raise ForkedSessionError(
        "CUDA was used before this process was forked, and CUDA does not survive a fork",
        evidence=[f"CUDA was initialised in process {creator}; this is process {os.getpid()}"],
        fixes=[
            python('multiprocessing.set_start_method("spawn")'),
            manual("or open the first session after the fork (gunicorn without --preload)"),
        ],
        creator_pid=creator,
        pid=os.getpid(),
    )


def _cpu_is_allowed(allow_cpu: bool, error: GPUError) -> bool:
    """A request that is wrong in itself stays an error: the CPU would not mend it."""
    if isinstance(error, (ProviderError, PlacementError)) and not isinstance(error, ProviderFallbackError):
        return False
    return allow_cpu or os.environ.get("ORTGPU_ALLOW_CPU", "").lower() in _TRUE


def _all_providers(available: Sequence[str]) -> list[str]:
    names = getattr(onnxruntime, "get_all_providers", None)
    return list(names()) if names is not None else [*available, requests.CUDA, requests.CPU]


def _device_asked_for(requested: requests.ProviderList, device: DeviceRequest) -> DeviceRequest:
    in_options = requested.options_of(requests.CUDA).get("device_id")
    if in_options is None:
        return device
    if device is not None and str(device) not in (in_options, f"cuda:{in_options}"):
        raise ProviderRequestError(
            f"device={device!r} and the provider option device_id={in_options} name different GPUs",
            fixes=[manual("name the GPU once")],
            requested=requested.names,
        )
    return int(in_options)


def _with_device(asked: requests.ProviderList, chosen: CudaDevice | None) -> requests.ProviderList:
    """``asked`` with the device's ordinal, left out where it is ONNX Runtime's default: naming it makes 1.31 log a
    warning about plugin providers."""
    if chosen is None or (chosen.ordinal == 0 and "device_id" not in asked.options_of(requests.CUDA)):
        return asked
    on_device = {
        name: {"device_id": str(chosen.ordinal)} for name in (requests.CUDA, *requests.TENSORRT) if name in asked.names
    }
    options = {name: {**asked.options_of(name), **on_device.get(name, {})} for name in asked.names}
    return requests.ProviderList(asked.names, options)


def _check_tensorrt(requested: requests.ProviderList, runtime: Runtime) -> None:
    from .tensorrt import check_loadable

    if requests.TENSORRT[0] in requested.names and runtime.provider_library is not None:
        check_loadable(runtime.provider_library)


def _config_entry(options: Any, key: str) -> str | None:
    try:
        value: str = options.get_session_config_entry(key)
    except Exception:  # noqa: BLE001 - an entry that is not set raises, of a class that differs between releases
        return None
    return value


def _keeps_cpu_out(options: Any) -> bool:
    """With this entry ONNX Runtime refuses a list that names the CPU provider (issue 16016)."""
    return _config_entry(options, _CPU_FALLBACK_KEY) == "1"


def _record_placement(options: Any) -> None:
    if _config_entry(options, placements.RECORDING_KEY) is None:
        options.add_session_config_entry(placements.RECORDING_KEY, "1")


def _refuse_providers_in(options: Any) -> None:
    has_providers = getattr(options, "has_providers", None)
    if has_providers is not None and has_providers():
        raise ProviderRequestError(
            "the SessionOptions carry execution providers of their own, which cannot be verified",
            evidence=["set by add_provider, add_provider_for_devices or set_provider_selection_policy"],
            fixes=[manual("pass them as providers= instead")],
        )


def _placement_refused(cause: BaseException) -> PlacementError | None:
    if "fallback to CPU EP has been explicitly disabled" not in str(cause):
        return None
    return PlacementError(
        "nodes of this model are on the CPU, and the session options forbid that",
        evidence=[str(cause).strip().splitlines()[0], f"{_CPU_FALLBACK_KEY}=1, which counts shape nodes too"],
        fixes=[manual('leave that entry out and pass cpu_nodes="forbid": it tells compute nodes from shape nodes')],
    )


def _no_fallback(what: str) -> ProviderRequestError:
    return ProviderRequestError(
        "a GPUSession does not fall back to the CPU",
        evidence=[what],
        fixes=[manual("pass allow_cpu=True to accept the CPU where the GPU cannot be had")],
    )


def _other_providers(asked: tuple[str, ...], bound: tuple[str, ...]) -> ProviderFallbackError:
    return ProviderFallbackError(
        "ONNX Runtime bound other providers than those asked for",
        evidence=[f"asked for: {', '.join(asked)}", f"bound: {', '.join(bound)}"],
        bound=bound,
    )


def _free_memory(uuid: str) -> int | None:
    from .environment.driver import read_gpu_memory

    memory = read_gpu_memory(uuid)
    return memory[0] if memory is not None else None


def _describe(chosen: CudaDevice | None, ordinal: int) -> Device:
    from .environment.driver import read_driver_version

    version = read_driver_version()
    if chosen is None:
        return Device("cuda", ordinal, None, None, None, None, version)
    return Device(
        "cuda", chosen.ordinal, chosen.uuid, chosen.name, chosen.compute_capability, chosen.total_memory, version
    )
