"""GPUSession: an InferenceSession that is on the GPU it names, or does not exist."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..provider.runtime import load_runtime

_runtime = load_runtime()
if _runtime.module is None:
    from ..diagnosis import failure

    raise failure.why_no_module(_runtime)

# ruff: noqa: E402 - what follows imports ONNX Runtime, which load_runtime does after what it links where it links CUDA
import onnxruntime

from ..environment.gpu.cuda import initialising
from ..errors import ExecutionError, GPUError, ProviderRequestError, manual
from ..provider import lifetime
from ..provider.devices import Device, DeviceRequest
from ..running.direct_runs import DirectRuns, direct_runs_of
from ..running.onnxruntimes import InferenceSession
from . import arguments, failures
from .arguments import CPUNodes  # typing.get_type_hints asks for it, as frameworks do
from .facts import SessionFacts

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it; typing has it since Python 3.11

    from ..provider.placement import Placement
    from ..running.cuda_graph import CapturingSession
    from ..running.pinned import PinnedMemory
    from ..running.staging import Staging
    from .request import SessionRequest, Verified

_PINNED_MEMORY_LIMIT = 2 << 30

_HELD = ("_request", *lifetime.HELD_BY_ONNXRUNTIME)  # and what keeps the model's bytes alive


class GPUSession(SessionFacts):
    """An ``onnxruntime.InferenceSession`` that runs on the GPU it names for its whole life.

    Args:
        path_or_bytes, sess_options, providers, provider_options: as for InferenceSession. CUDA is put first whatever
            ``providers`` says; a TensorRT provider named before it stays before it; the CPU is last, for the nodes that
            ONNX Runtime runs there. ``sess_options`` keeps every setting. The entry that makes ONNX Runtime record
            where it places nodes is "1" while the session is made and "0" afterwards, unless the caller set it.
        device: an ordinal, "cuda:1", a UUID ("GPU-..."), or "auto": the most free memory when the session is made; also
            the ``device`` of another session, or a ``torch.device``. None is the provider option ``device_id``, or 0.
        cpu_nodes: what to do about nodes that compute on the CPU: "warn", "forbid" (raises PlacementError), "allow".
            Nodes that only handle shapes belong there and do not count. Of a model in ONNX Runtime's own format (.ort)
            nobody can know: that is warned of and refused like a node on the CPU.
        allow_cpu: True: run on the CPU where the GPU cannot be had, with a CPUExecutionWarning and a warning in the log
            "ortgpu" for each session. False: never. None: as the variable ORTGPU_ALLOW_CPU says (1: True). What keeps
            the process from a GPU is found out once and then taken for granted, until a variable, the provider's file,
            the loaded libraries or ``device`` are others: a driver, a GPU or a library that is installed later is not
            noticed. Without ``allow_cpu`` each session tries again.
        cuda_graph: capture a CUDA graph of each shape of inputs at its first run and replay it from then on, which
            saves the launches of single kernels; see below.
        pinned_memory_limit: bytes of host memory that runs, captured ones too, and ``pinned_empty`` may pin, 2 GiB
            unless given. ``run`` keeps as much ordinary memory for results at most. With 0 it copies nothing itself.

    Raises:
        GPUError: a subclass that names the cause and what mends it. Nothing is left behind.
        TypeError, ValueError: an argument means nothing, or is nearly the name of one.
        Exception: ONNX Runtime's own for what is not about the GPU: no such file, an invalid model; InvalidProtobuf
            also where the file of a large model changes while it is read.

    While it runs, what fails on the GPU is raised as an ExecutionError: out of memory (the session goes on working), a
    sticky CUDA error (from then on every GPUSession of the process refuses, and the process must be restarted), a
    failure of the provider or of its libraries. Wrong inputs stay ONNX Runtime's own exceptions.

    With ``cuda_graph`` the model must be all on the GPU, without control flow, strings and sequences, use all of its
    inputs and compute all of its outputs, whose shapes must follow from those of the inputs; else ProviderRequestError
    or PlacementError, when the session is made where that is known, or at the first run. That is slow, and no other
    thread may use CUDA meanwhile. Buffers of 16 shapes are kept. ONNX Runtime keeps every graph until ``close()``: 64
    are captured, further shapes run without.
    Only ``run`` and ``map`` work, one run at a time, those of other threads than the main one handed over to one
    thread. Random numbers repeat themselves. The run option gpu_graph_id=-1 makes a run without a graph.

    A session that is made does not read its model file again: change or remove that as you like. To replace a model
    while sessions open, write the new one to another file, and rename that over the old one.

    A session serves many threads. In a forked child every method raises ForkedSessionError. Pickling carries the model,
    the arguments, and attributes that a subclass or a user added; on arrival the session is opened and verified again,
    without the constructor of the subclass, unless that has ``__getstate__`` and ``__setstate__`` of its own. Of
    ``sess_options`` it carries the properties and the configuration entries that the installed release knows, not
    registered libraries, initialisers or overrides of free dimensions, which cannot be read back; a copy has them all.

    Not promised: that two runs give the same bits, or those of plain ONNX Runtime: ``options_chosen`` has the options,
    of the provider and ``intra_op_num_threads``, that are set where the caller set none, each with value and reason.
    """

    __module__ = "ortgpu.session"  # its public name, which pickles and users' programs hold

    device: Device
    options_chosen: Mapping[str, tuple[str, str]]
    if TYPE_CHECKING:  # these types arrive with the first session, and typing.get_type_hints would miss them before
        placement: Placement
        _request: SessionRequest
        _verified: Verified  # a derived class may keep something of its own under the names of its fields
        _capturing: CapturingSession | None
        _pinned: PinnedMemory | None
        _staging: Staging | None
    _sess: Any
    _chooses_options = True
    _stream: Any = None  # of a session that captures, while it is being made
    _capturing = _pinned = _staging = None
    _direct: DirectRuns | None = None
    _pinned_memory_limit = _PINNED_MEMORY_LIMIT
    _own_names: frozenset[str] = frozenset()  # of attributes that this class and ONNX Runtime's set

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        device: Device | DeviceRequest = None,
        cpu_nodes: CPUNodes = "warn",
        allow_cpu: bool | None = None,
        cuda_graph: bool = False,
        pinned_memory_limit: int = _PINNED_MEMORY_LIMIT,
        **kwargs: Any,
    ) -> None:
        others = vars(self).keys() - self._own_names
        request: dict[str, Any] = {
            "model": arguments.checked_model(path_or_bytes),
            "sess_options": arguments.checked_options(sess_options, onnxruntime.SessionOptions),
            "providers": providers,
            "provider_options": provider_options,
            "device": arguments.checked_device(device),
            "cpu_nodes": arguments.checked_cpu_nodes(cpu_nodes),
            "cuda_graph": arguments.checked_flag("cuda_graph", cuda_graph),
            "choose_options": self._chooses_options,
            "kwargs": arguments.checked_others(kwargs),
        }
        self._allow_cpu = allow_cpu = arguments.checked_allow_cpu(allow_cpu)
        self._pinned_memory_limit = arguments.checked_limit("pinned_memory_limit", pinned_memory_limit)
        driver = None
        try:
            self._refuse_if_lost()
            driver = initialising() if load_runtime().provider_library is not None else None
            # Imported while the driver is being initialised: neither waits for the other.
            from ..provider.living import stacklevel
            from .opening import check_cpu_nodes, cpu_is_allowed, open_verified
            from .request import SessionRequest

            try_again = not cpu_is_allowed(allow_cpu, request["sess_options"])
            self._request = SessionRequest(**request, try_again=try_again)
            verified = open_verified(self, super().__init__, self._request, driver)
            check_cpu_nodes(verified.placement, cpu_nodes, stacklevel(self))
            self._keep(verified)
            if cuda_graph:
                from ..running.graph_requests import captured

                self._sess = self._capturing = captured(self)
            else:
                from ..running.staging import staging_of

                self._staging = staging_of(self)
        except GPUError as error:
            self._let_go(error)
            try:  # what fails now leaves nothing behind either
                self._open_on_cpu(super().__init__, request, error)
            except BaseException as final:
                self._let_go(final)
                raise
        except BaseException as error:
            self._let_go(error)
            raise
        finally:
            if driver is not None:
                driver.result()  # whatever was raised, no thread is left behind
        if not cuda_graph:
            self._direct = direct_runs_of(self)
        from ..provider.living import register  # not imported yet where a GPU that was lost is refused above

        register(self)
        self._own_names = frozenset((*vars(self), "_own_names", "_pinned")) - others

    @classmethod
    def for_rank(
        cls,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> Self:
        """A session on the GPU of this process's rank, under torchrun, mpirun or srun; without them, on the first.

        That GPU is the one with the number of the local rank among those that CUDA shows this process; or the only one,
        where the launcher shows each rank its own. No other rank of the job on this host may have it, for as long as
        this process lives; further sessions of the rank on it are fine. Arguments are those of the constructor but
        ``device``; ``allow_cpu`` does not let a rank without a GPU pass.

        Raises:
            LauncherConflictError: the launchers' variables contradict each other, or are not whole.
            RankDeviceError: the rank has no GPU, or another rank has the same one.
            GPUError, Exception: as the constructor.

        Not promised: that ranks in containers of their own, which do not share a folder for temporary files, notice
        that they have the same GPU. ``ortgpu.distributed.preflight`` does.
        """
        from ..distributed.rank_devices import claimed_ordinal

        if "device" in kwargs:
            raise TypeError("for_rank() takes no device: the rank decides")
        return cls(path_or_bytes, sess_options, providers, provider_options, device=claimed_ordinal(), **kwargs)

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        """As InferenceSession.run; see the class for what is raised.

        Also takes arrays of other libraries, anything with ``__dlpack__``, without a copy where they are on this
        session's GPU. What their library still computes on them is waited for. On another GPU, and where they are on
        the GPU and not contiguous, they are refused, with ProviderRequestError.

        Large NumPy arrays are copied in several threads, through pinned memory. Large results may be in memory that is
        used again when the array and all views of it are gone.
        """
        try:
            # Looked up now, for tracers put theirs in its place
            run, direct = InferenceSession.run, self._direct
            if run_options is None:
                if direct is not None and run is direct.stands_in_for and direct.take(input_feed):
                    return self._sess.run(output_names or direct.output_names, input_feed, None)
                staging, capturing, results = self._staging, self._capturing, None
                if capturing is not None and capturing is self._sess and run is capturing.stands_in_for:
                    results = capturing.replay(output_names, input_feed)
                elif (
                    staging is not None
                    and run is staging.stands_in_for
                    and (staging.has_large_outputs or staging.has_input_of(input_feed))
                ):
                    results = staging.run(self, output_names, input_feed)
                if results is not None:
                    return results
            return super().run(output_names, input_feed, run_options)
        except Exception as error:  # noqa: BLE001 - what is not about the GPU is raised as it is
            from ..running.device_arrays import with_values

            values = with_values(self, input_feed)
            if values is None:
                raise failures.explained(self, error)  # noqa: B904 - which sets the cause
        return GPUSession.run(self, output_names, values, run_options)  # a derived class has had its say

    def run_with_ort_values(self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None) -> Any:
        """As InferenceSession.run_with_ort_values; see the class for what is raised."""
        try:
            return super().run_with_ort_values(output_names, input_dict_ort_values, run_options)
        except Exception as error:  # noqa: BLE001 - what is not about the GPU is raised as it is
            raise failures.explained(self, error)  # noqa: B904 - which sets the cause

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """As InferenceSession.run_with_iobinding; see the class for what is raised."""
        try:
            super().run_with_iobinding(iobinding, run_options)
        except Exception as error:  # noqa: BLE001 - what is not about the GPU is raised as it is
            raise failures.explained(self, error)  # noqa: B904 - which sets the cause

    def run_with_ortvaluevector(
        self, run_options: Any, feed_names: Any, feeds: Any, fetch_names: Any, fetches: Any, fetch_devices: Any
    ) -> None:
        """As InferenceSession.run_with_ortvaluevector; see the class for what is raised."""
        try:
            super().run_with_ortvaluevector(run_options, feed_names, feeds, fetch_names, fetches, fetch_devices)
        except Exception as error:  # noqa: BLE001 - what is not about the GPU is raised as it is
            raise failures.explained(self, error)  # noqa: B904 - which sets the cause

    def run_async(
        self, output_names: Any, input_feed: Any, callback: Any, user_data: Any, run_options: Any = None
    ) -> None:
        """As InferenceSession.run_async. What fails later reaches ``callback`` as ONNX Runtime's text; a sticky CUDA
        error among them makes every session of the process refuse, as it does from the other methods.

        Callbacks are called in the session's threads for the CPU: three where ``options_chosen`` has
        ``intra_op_num_threads``. One that waits for a later run may wait for ever. Until the run has ended, session,
        arrays, ``callback`` and ``user_data`` are kept; what nothing else refers to is then destroyed in a thread of
        this library, since ONNX Runtime does not survive the end of a session in a thread of its own."""
        if not callable(callback):  # ONNX Runtime would find out in a thread of its own, and end the process
            raise TypeError(f"callback must be callable, not {callback!r}")

        from .async_runs import run_async

        try:
            run_async(self, super().run_async, output_names, input_feed, callback, user_data, run_options)
        except Exception as error:  # noqa: BLE001 - what is not about the GPU is raised as it is
            raise failures.explained(self, error)  # noqa: B904 - which sets the cause

    def io_binding(self) -> Any:
        """As InferenceSession.io_binding; see the class for what is raised, also by the methods of the binding."""
        from .bindings import explaining

        lifetime.refuse_if_unusable(self)
        if self._capturing is not None:
            self._capturing.refuse_binding()
        try:
            return explaining(super().io_binding(), self)
        except Exception as error:  # noqa: BLE001 - what is not about the GPU is raised as it is
            raise failures.explained(self, error)  # noqa: B904 - which sets the cause

    if hasattr(InferenceSession, "create_ortvalue_from_shape_and_type"):

        def create_ortvalue_from_shape_and_type(
            self, shape: Any, element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
        ) -> Any:
            """As InferenceSession.create_ortvalue_from_shape_and_type; see the class for what is raised."""
            try:
                make = super().create_ortvalue_from_shape_and_type
                return make(shape, element_type, device_type, device_id, vendor_id)
            except Exception as error:  # noqa: BLE001 - what is not about the GPU is raised as it is
                raise failures.explained(self, error)  # noqa: B904 - which sets the cause

    def close(self) -> None:
        """Give up the session and its GPU memory; any later use raises ExecutionError. Closing twice is fine.

        ONNX Runtime frees the memory when nothing refers to the session: an IOBinding, an OrtValue or an input's
        metadata that the caller keeps holds it. The CUDA context stays until the process ends.
        """
        if not isinstance(self.__dict__.get("_sess"), lifetime.UnusableSession):
            lifetime.abandon_if_context_is_gone(self)
            error = ExecutionError("this GPUSession is closed", fixes=[manual("open a new GPUSession")])
            closed = lifetime.UnusableSession(error)
            for name in _HELD:
                if hasattr(self, name):
                    setattr(self, name, closed)
            self._model_bytes = None
            if self._capturing is not None:
                self._capturing.close(error)
                self._capturing = None
            if self._staging is not None:
                self._staging.close()
                self._staging = None
            if self._pinned is not None:
                self._pinned.close()

    def __enter__(self) -> Self:
        lifetime.refuse_if_unusable(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        from .pickling import reduced

        return reduced(self)

    def _open_again(self, *arguments: Any, **settings: Any) -> None:
        """Unpickling does not call the constructor of a subclass, which may take other arguments."""
        GPUSession.__init__(self, *arguments, **settings)

    @property
    def _enable_fallback(self) -> bool:
        """Off, whatever ONNX Runtime's constructor sets: before 1.23 it ignores its argument enable_fallback."""
        return False

    @_enable_fallback.setter
    def _enable_fallback(self, value: bool) -> None:
        pass

    def enable_fallback(self) -> None:
        """A GPUSession has no fallback: raises ProviderRequestError."""
        lifetime.refuse_if_unusable(self)
        raise arguments.no_fallback("enable_fallback() was called")

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Open the model again with these providers, verified as by the constructor, with its other arguments.

        The GPU has to have room for both sessions meanwhile. After an error the session is as it was; it never moves to
        the CPU, whatever ``allow_cpu`` says. One that was made with ``device="auto"`` stays on its GPU.

        Raises:
            ProviderRequestError: providers without CUDA, or malformed ones.
            GPUError, Exception: as the constructor.
        """
        from .guard.policy import judge
        from .pickling import requested
        from .reopening import unchanged_on_error

        lifetime.refuse_if_unusable(self)
        if judge(providers, provider_options) != "guarded":
            raise ProviderRequestError(
                "a GPUSession stays on the GPU",
                evidence=[f"set_providers({providers!r}) asks for providers without CUDA"],
                fixes=[manual("name CUDAExecutionProvider too, or open an onnxruntime.InferenceSession with these")],
                requested=providers,
            )
        (model, options, *_), settings = requested(self)
        device = lifetime.device_of(self)
        if settings["device"] == "auto" and device.is_gpu:
            settings["device"] = device.ordinal
        with unchanged_on_error(self):
            self._open_again(model, options.options, providers, provider_options, **{**settings, "allow_cpu": False})
        self._allow_cpu = settings["allow_cpu"]

    def _open_on_cpu(self, construct: Callable[..., None], request: dict[str, Any], error: GPUError) -> None:
        """Raise ``error``, or ONNX Runtime's of a broken model, where the CPU is not allowed instead."""
        from .opening import cpu_is_allowed, open_on_cpu, refuse_broken_model, warn_of_cpu
        from .request import SessionRequest

        self._request = SessionRequest(**request)
        if not cpu_is_allowed(self._allow_cpu, self._request.sess_options, error):
            refuse_broken_model(self._request, error)
            raise error
        self._keep(open_on_cpu(self, construct, self._request))
        warn_of_cpu(self, error, request["model"])  # not before: ONNX Runtime may refuse the model

    def _keep(self, verified: Verified) -> None:
        """Not by assignment, and not over what is not ours: a class that the guard takes in may have a property of such
        a name, or have set an attribute."""
        held, before = self.__dict__, self.__dict__.get("_verified")
        for name in (each.name for each in dataclasses.fields(verified)):
            if name not in held or (before is not None and held[name] is getattr(before, name)):
                held[name] = getattr(verified, name)
        held["_verified"] = verified
        # Of what it was, if it is constructed again
        if self._pinned is not None:
            self._pinned.close()  # what gives it back with the session refers to it
        for name in ("_capturing", "_direct", "_pinned", "_staging"):
            held.pop(name, None)
        model = self._request.model
        if not isinstance(model, bytes):  # what opens it again later may do so in another working directory
            path = os.path.abspath(os.fsdecode(model))
            if path != model:
                self._request = dataclasses.replace(self._request, model=path)

    def _refuse_if_lost(self) -> None:
        """Raise what keeps this process from the GPU, before anything is tried. A subclass may know of more."""
        lifetime.refuse_if_lost()

    def _let_go(self, error: BaseException) -> None:
        """Of all that was made, also the C++ session that failed, with its memory of the GPU."""
        for name in (*_HELD, "_model_bytes", "_stream", "_staging"):
            self.__dict__.pop(name, None)
        lifetime.let_go_of_variables(error)


# Where __module__ says that it is: pickle looks there, and typing.get_type_hints() for the names in its annotations.
vars(sys.modules[__package__]).update(GPUSession=GPUSession, Device=Device, Mapping=Mapping)
