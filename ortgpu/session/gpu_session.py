"""GPUSession: an InferenceSession that is on the GPU it names, or does not exist."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ..provider.runtime import load_runtime

_runtime = load_runtime()
if _runtime.module is None:
    from ..diagnosis import diagnosing

    raise diagnosing.why_no_module(_runtime)

# ruff: noqa: E402 - the imports below need ONNX Runtime, and load_runtime loads its libraries first
import onnxruntime

from ..environment.gpu.cuda import initialising
from ..errors import ExecutionError, GPUError, ProviderRequestError, escape_controls, manual
from ..model.files import stamp_of
from ..model.outline import GraphOutline
from ..process.background import cached_property
from ..process.late import late
from ..provider import lifetime
from ..provider.devices import Device, DeviceRequest, plain_request
from ..provider.living import register
from ..provider.rank_devices import claimed_ordinal
from ..provider.requests import CUDA, CPUNodes, check_names, parse  # typing.get_type_hints needs CPUNodes.
from ..provider.settings import CAPTURE
from ..provider.sizes import GPUSize, Size, parse_size
from ..running.device_arrays import run_on_device, wrap_arrays
from ..running.memory import holdings_of, read_memory, trim
from ..running.one_stream import set_device_in_runs
from ..running.onnxruntimes import InferenceSession, LastOfOurs, Results
from ..running.pinned import memory_of
from ..running.pipeline import map_session
from ..running.plain_runs import PlainRunner
from ..running.shaped_runs import ShapedRunner
from ..running.staging import StagedRunner, may_stage
from ..running.streams import order_results, streams_of, wait_for_caller, wait_for_values
from ..running.turns import take_turns, trim_when_idle
from ..running.warming import warm, warm_sizes
from . import failures
from .async_runs import run_async, run_here, run_in_thread
from .budget import holdings_within
from .guard_policy import judge
from .reopening import reduced, reopen, unchanged_on_error
from .request import (
    FACTS,
    PINNED_MEMORY_LIMIT,
    BatchedOptions,
    InferenceSessionArguments,
    SessionArguments,
    SessionRequest,
    Tuned,
    Unpack,
    checked,
    no_fallback,
)
from .shapes import maker_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import Self  # type checkers bring it; typing has it since Python 3.11

    from ..model.files import ModelSource
    from ..provider.placement import Placement
    from ..running import graph_requests
    from ..running.kept_shapes import SessionShapes
    from ..running.memory import Holdings, SessionMemory
    from ..running.pinned import PinnedMemory
    from . import allowed_cpu, opening, placement_details, verifying
    from .placement_details import PlacementDetails
    from .pool import batching
    from .pool.batching import Batched
    from .request import Verified
    from .tuning import tuning
else:
    opening = late("ortgpu.session.opening")
    verifying = late("ortgpu.session.verifying")
    allowed_cpu = late("ortgpu.session.allowed_cpu")
    tuning = late("ortgpu.session.tuning.tuning")
    batching = late("ortgpu.session.pool.batching")
    placement_details = late("ortgpu.session.placement_details")
    graph_requests = late("ortgpu.running.graph_requests")

Measured = TypeVar("Measured")

_HELD = ("_request", *lifetime.HELD_BY_ONNXRUNTIME)  # _request keeps the model's bytes alive


class measured(Generic[Measured]):  # noqa: N801 - it replaces property
    """A property that an attribute of the same name hides. A subclass may have such an attribute."""

    def __init__(self, function: Callable[[Any], Measured]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, session: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, session: object, owner: type[Any]) -> Measured: ...
    def __get__(self, session: object | None, owner: type[Any]) -> Self | Measured:
        return self if session is None else self._function(session)


class GPUSession(LastOfOurs):
    """An ``onnxruntime.InferenceSession`` that runs on the GPU it names for its whole life.

    CUDA always comes first; only a TensorRT provider named before it stays before it. The CPU comes last, for the nodes
    that ONNX Runtime runs there. Nodes that only handle shapes belong on the CPU, and ``cpu_nodes`` does not count
    them. A model in ONNX Runtime's own format (.ort) does not show its placement, so it counts as a model with nodes on
    the CPU. ``sess_options`` keeps every setting, and gets the entry that records the placement of nodes, unless the
    caller set it. Without ``device`` the session is on the GPU of the provider option ``device_id``, or on the first
    GPU; in a job with several ranks on one host, on PyTorch's current device if PyTorch uses CUDA in this process. A
    rank on the first GPU is warned if nothing named that GPU. ``run``, CUDA graphs and ``pinned_empty`` pin host memory
    up to ``pinned_memory_limit``; ``run`` also keeps at most as much ordinary memory for results.

    With ``memory`` the session's weights, activations, workspaces and results on the GPU stay within a budget. It sets
    the provider option gpu_mem_limit, unless the caller did. CUDA's context and the kernels that the process has loaded
    are not counted. The session makes one run at a time: threads run in the order of their calls. A run that reaches
    the budget is repeated once, after the session gave back the memory that no run needs, and then raises
    GPUOutOfMemoryError. Plans and graphs end for good once a run needs their part of the budget. With a TensorRT
    provider, an allocator of the caller's or a shared arena, ``memory`` raises ProviderRequestError.

    With ``allow_cpu`` each session on the CPU issues a CPUExecutionWarning and logs a warning to "ortgpu". The process
    remembers why it has no GPU, and does not notice a driver or library that is installed later.

    With ``tuned=True`` a session uses the record that :func:`ortgpu.tune` keeps for its model and GPU, if there is one.
    It applies only settings that leave inputs, outputs, errors and precision unchanged. With the path of a record it
    applies all settings, also CUDA graphs, fixed shapes and float16. Options of ``providers`` win over a record. A
    session with ``sess_options`` or the option use_tf32=0 uses no record. A record that does not fit is not used, and
    the log says why.

    A run that fails on the GPU raises an ExecutionError. After GPUOutOfMemoryError the session keeps working; it may
    have to open the model again, and raises ExecutionError if the model's file has changed. After PoisonedContextError,
    a sticky CUDA error, every GPUSession of the process refuses, and the process must be restarted.
    ProviderFailureError is a failure of the provider or its libraries. Wrong inputs raise ONNX Runtime's own
    exceptions.

    ``cuda_graph`` needs a model with all nodes on the GPU and without control flow, strings or sequences. The model
    must use all of its inputs and compute all of its outputs. The input shapes must determine the output shapes.
    Otherwise the constructor, or the first run, raises ProviderRequestError or PlacementError. The first run of a shape
    is slow, and no other thread may use CUDA during it. Shapes after the 64th run without a graph. Only ``run`` and
    ``map`` work, one run at a time. Runs from threads other than the main thread share one thread. Random numbers may
    repeat. A run with the run option gpu_graph_id=-1 uses no graph.

    An open session does not read its model file again, so you may change or remove the file. To replace a model while
    sessions open, write the new one to another file and rename it over the old one.

    Many threads may share a session. In a forked child every method raises ForkedSessionError. Pickling keeps the
    model, the arguments, and attributes that a subclass or user added, but not those in slots. Unpickling opens and
    verifies the session again. It does not call the constructor of a subclass, unless the subclass has its own
    ``__getstate__`` and ``__setstate__``. It registers the CUDA plugin that the pickling program had registered. A
    session that ``multiprocessing`` receives and that does not open raises the error at each use. Pickling a session
    with SessionOptions raises ProviderRequestError, but with a function of a module as ``sess_options`` a session
    pickles, and unpickling calls the function. Copying keeps SessionOptions.

    Not promised: bitwise equal results, either of two runs or with plain ONNX Runtime.
    """

    __module__ = __name__.rpartition(".")[0]  # The public name: pickles and users' programs contain it.

    if TYPE_CHECKING:  # These types are imported later, and typing.get_type_hints would not find them.
        _request: SessionRequest
        _verified: Verified  # A subclass may use the names of its fields for other values.
        _pinned: PinnedMemory | None
        _holdings: Holdings | None
        _model_stamp: tuple[int, ...] | None
    _sess: Any
    _guards: type[Any] | None = None  # the class that was requested, if the guard opened the session
    _stream: Any = None  # set while a session with cuda_graph opens
    _pinned = _holdings = None
    _gpu_runner = PlainRunner()
    _gpu_context: lifetime.ContextCheck | None = None
    _gpu_explained = failures.explained  # It explains failures before a run.
    _pinned_memory_limit = PINNED_MEMORY_LIMIT
    _own_names: frozenset[str] = frozenset()  # attributes set by this class and by ONNX Runtime

    # For dir(), help() and editors: the values of an open session are in its __dict__.
    @cached_property
    def device(self) -> Device:
        """The GPU that the session runs on; ``kind`` is "cpu" if ``allow_cpu`` let it run on the CPU."""
        lifetime.refuse_if_closed(self)  # It never opened, in a worker of multiprocessing.
        return self._verified.device

    @cached_property
    def placement(self) -> Placement:
        """The nodes by provider; ``known`` is False if ONNX Runtime did not record them."""
        lifetime.refuse_if_closed(self)  # It never opened, in a worker of multiprocessing.
        return self._verified.placement

    @cached_property
    def options_chosen(self) -> Mapping[str, tuple[str, str]]:
        """The options that the session set because the caller did not, each with its value and reason."""
        lifetime.refuse_if_closed(self)  # It never opened, in a worker of multiprocessing.
        return self._verified.options_chosen

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
        pinned_memory_limit: Size = PINNED_MEMORY_LIMIT,
        tuned: Tuned = True,
        memory: GPUSize | None = None,
        trim_idle: float | None = None,
        **kwargs: Unpack[InferenceSessionArguments],
    ) -> None:
        """Open a model on the GPU, and verify that it is there.

        Args:
            path_or_bytes: path of the model file, or the model itself as bytes.
            sess_options: an onnxruntime.SessionOptions, or a function that returns new ones.
            providers: names of providers, or pairs of a name and a dict of options; CUDA by default.
            provider_options: a dict of options for each of ``providers``, if those are names.
            device: index (0), "cuda:0", "gpu:0", UUID, ``session.device``, torch.device, or "auto" (most free memory).
            cpu_nodes: if nodes compute on the CPU, "warn", "forbid" (raise PlacementError) or "allow".
            allow_cpu: True runs on the CPU if no GPU can be used, False never; None: as ORTGPU_ALLOW_CPU says.
            cuda_graph: True captures a CUDA graph for each shape of the inputs, and replays it where that is faster.
            pinned_memory_limit: bytes of host memory that may be pinned, or "2GB"; 0: ``run`` stages no copies.
            tuned: True uses the record that ortgpu.tune keeps, False none, a path that record; "now" measures first.
            memory: the most GPU memory it takes: bytes, "2GiB" or 0.25, a part; None: as ORTGPU_MEMORY says, or all.
            trim_idle: the session trims itself after so many seconds without a run, as ``trim`` does; None: never.
            kwargs: other arguments of InferenceSession: ``disabled_optimizers``, ``read_config_from_model``.

        Raises:
            GPUError: a subclass names the cause and the fixes. No session or GPU memory is left behind.
            TypeError, ValueError: an argument is invalid, or its name looks misspelt.
            FileNotFoundError: there is no record at the path ``tuned``.
            Exception: ONNX Runtime's own, if the GPU is not the cause: a missing file, an invalid model.
        """
        try:
            request = checked(
                SessionRequest(
                    path_or_bytes,
                    sess_options,
                    parse(providers, provider_options),
                    plain_request(device),
                    cpu_nodes,
                    allow_cpu,
                    cuda_graph,
                    pinned_memory_limit,
                    tuned,
                    memory,
                    trim_idle,
                    is_guarded=self._guards is not None,
                    others=kwargs,
                )
            )
        except (TypeError, ValueError, OSError, GPUError) as error:
            raise failures.hide_own_frames(error) from error.__cause__
        self._open_request(request)

    def _open_request(self, request: SessionRequest) -> None:
        """Open the session as requested: the first time, or again without the constructor.

        A subclass may check the request and the session here. It may change the constructor.
        """
        others = vars(self).keys() - self._own_names
        construct, driver, outline = super().__init__, None, GraphOutline(request.model)
        refusal: GPUError | None = None
        try:
            try:
                self._refuse_if_lost()
                driver = initialising() if load_runtime().provider_library is not None else None
                opened = opening.open_on_gpu(self, construct, request, outline, driver)
                verified = verifying.verify(self, opened, outline)
            except GPUError as error:
                self._let_go(error)
                if not allowed_cpu.is_cpu_allowed(request, error):
                    allowed_cpu.refuse_broken_model(request, outline, error)
                    raise
                refusal = error
            if refusal is not None:  # Here, so that ONNX Runtime's error for a broken model has no context.
                verified = opening.open_on_cpu(self, construct, request, outline, refusal)
            self._keep(request, verified)
            self._gpu_runner = _runner_of(self, self._request, verified)
            if request.trim_idle is not None:
                trim_when_idle(self, self._gpu_runner, request.trim_idle)
        except BaseException as error:
            self._let_go(error)  # A failure must leave nothing behind.
            if isinstance(error, GPUError) or type(error).__module__.startswith("onnxruntime."):
                raise failures.hide_own_frames(error) from error.__cause__
            raise
        finally:
            refusal = None  # The traceback of its cause has this frame, and that has the caller's.
            outline.close()
            if driver is not None:
                driver.result()  # Wait, so that no thread is left behind.
        register(self)
        self._gpu_context = lifetime.context_check(self)
        self._own_names = frozenset((*vars(self), "_own_names", "_pinned", "_holdings")) - others

    def _gpu_reopen(self) -> None:
        """Open the C++ session again after a run left it in a bad state. See ``reopening.reopen``."""
        reopen(self)

    def _gpu_tune(self, model: ModelSource, ordinal: int | None) -> None:
        """Tune a model for ``tuned="now"``, as :func:`ortgpu.tune` does. The opening of a session calls this."""
        tuning.tune_unless_tuned(model, ordinal)

    @classmethod
    def for_rank(
        cls,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Unpack[SessionArguments],
    ) -> Self:
        """Open a session on the GPU of this process's rank, under torchrun, mpirun or srun; otherwise on the first GPU.

        The rank's GPU is the visible GPU with the local rank as its ordinal, or the only visible GPU. The rank claims
        it for as long as this process lives: no other rank of the job on this host may use it. The arguments are as in
        the constructor, without ``device``. ``allow_cpu`` does not let a rank without a GPU run on the CPU.

        Raises:
            LauncherConflictError: the variables of the launchers contradict each other or are incomplete.
            RankDeviceError: the rank has no GPU, or another rank has the same one.
            GPUError, Exception: as the constructor raises.

        Not promised: ranks in separate containers that share no folder for temporary files do not notice that they use
        the same GPU. ``ortgpu.distributed.preflight`` does.
        """
        if "device" in kwargs:
            raise TypeError("for_rank() takes no device: the rank decides")
        return cls(path_or_bytes, sess_options, providers, provider_options, device=claimed_ordinal(), **kwargs)

    # Options are Any: ONNX Runtime ships no types of its C++ classes, and pyright would call this partially unknown.
    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> Results:
        """Run the model, as InferenceSession.run does. The class lists the exceptions.

        The results are NumPy arrays, for type checkers always. An output that is no tensor is a list, a dict or a
        SparseTensor, as ONNX Runtime returns it.

        ``input_feed`` may also hold arrays of other libraries: anything with ``__dlpack__``. An array on this session's
        GPU is not copied, and the run waits for pending work on it, as :meth:`io_binding` says. An array on another
        GPU, or a non-contiguous one on this GPU, raises ProviderRequestError. The memory of a large result may be
        reused once the array and all its views are gone.
        """
        context, feed = self._gpu_context, input_feed
        try:
            if context is not None and (context.ask() or context.number.value != context.expected):
                lifetime.refuse_if_unusable(self)
                context = self._gpu_context
            results = self._gpu_runner.run(self, output_names, input_feed, run_options)
            if self._gpu_context is context:
                return results
            # A run beside this one may have left a wrong plan to it.
        except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
            values = wrap_arrays(self, input_feed)
            if values is None and isinstance(error, AttributeError) and self._gpu_context is not context:
                values = dict(input_feed)  # The C++ session was missing while another thread opened it again.
            if values is None:
                again: Results = failures.call_again(
                    self, error, lambda: self._gpu_runner.run(self, output_names, input_feed, run_options)
                )
                return again
            feed = values
        return GPUSession.run(self, output_names, feed, run_options)  # A subclass's run has seen this call.

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[Any, Any, str], object],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Start a run and return, as InferenceSession.run_async does.

        A run that fails later passes ONNX Runtime's message to ``callback``. After a sticky CUDA error every session of
        the process refuses, as after the other methods.

        The session's CPU threads call the callbacks, three if ``options_chosen`` has ``intra_op_num_threads``. With one
        stream for all runs, as with ``memory=``, and several visible GPUs, three threads of this library call them, and
        the callback gets the errors of the arguments, too. A callback that waits for a later run may wait forever. A
        session with a budget waits here until it may make a further run, and does not repeat a run that is out of
        memory; in a signal handler amid a run the callback comes before the return. The session, the arrays,
        ``callback`` and ``user_data`` are kept until the run has ended.
        """
        if not callable(callback):  # ONNX Runtime would notice it in its own thread and end the process.
            raise TypeError(f"callback must be callable, not {callback!r}")

        try:
            lifetime.refuse_after_reset(self, self._gpu_context)
            if isinstance(input_feed, Mapping):
                wait_for_values(self, input_feed)
            turns = self._holdings.turns if self._holdings is not None else None
            run, use_device = super().run_async, self._gpu_runner.use_device
            is_amid_run = turns is not None and turns.owner == threading.get_ident()
            if use_device is not None or is_amid_run:
                self._validate_input(list(input_feed))
                # A handler makes the run itself: the thread that it has interrupted will use the same stream.
                # ONNX Runtime's own threads have another device.
                way = run_here if is_amid_run else functools.partial(run_in_thread, self)
                run = functools.partial(way, super().run, use_device)
            run_async(
                self, run, output_names, input_feed, callback, user_data, run_options, None if is_amid_run else turns
            )
        except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
            raise failures.explained_run(self, error)  # noqa: B904 - explained_run sets the cause

    def run_on_device(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[onnxruntime.OrtValue]:
        """Run the model as ``run`` does, and return the results as OrtValues in this session's device memory.

        The results are complete when this returns. With ONNX Runtime 1.26 or newer they have ``__dlpack__``, and
        ``torch.from_dlpack(value)`` shares the memory; up to 1.31 booleans are uint8 there. The memory is reused once
        the value and all arrays over it are gone, so keep one until your stream is done with it. Inputs and outputs
        must be tensors and not of strings. ONNX Runtime raises RuntimeError for other types, and for wrong names,
        shapes and types.
        """
        return run_on_device(self, output_names, input_feed, run_options)

    def map(
        self,
        feeds: Iterable[Mapping[str, Any]],
        *,
        in_flight: int | None = None,
        output_names: Sequence[str] | None = None,
    ) -> Iterator[Results]:
        """Yield ``run(output_names, feed)`` for each of ``feeds``, in their order, with up to four runs at a time.

        Copies to the GPU, computation and copies back overlap. Four runs need the GPU memory of four; a smaller
        ``in_flight`` needs less. The iterating thread makes short runs itself where that is faster.

        Args:
            feeds: any iterable, also an endless generator. The iterating thread consumes it. A generator may fill the
                same arrays for each feed: each feed is copied before the next is requested. A feed that cannot be
                copied, for instance an array on the GPU with ONNX Runtime older than 1.30, runs before that. The feeds
                of a ``list`` or ``tuple`` are not copied, so their arrays must not change until their results are
                there.
            in_flight: the most feeds that are taken before their results are yielded; 8 by default. Use 1 for a
                generator that needs the result of a feed to make the next. Nothing is copied then.

        The first exception of ``run`` or ``feeds`` is raised in its place, after the results of earlier feeds, and ends
        the iteration. Ending the iteration early, by ``break``, ``close()`` or dropping it, waits for the running runs
        and leaves nothing running. If the garbage collector ends it during another run, it does not wait, and the runs
        end by themselves. Only one thread at a time may ask for the next result, as with any generator.

        Raises:
            ExecutionError: the session is closed.
            TypeError, ValueError: ``feeds`` is not iterable or is a single feed; ``in_flight`` is not a positive int.
        """
        return map_session(self, feeds, in_flight, output_names)

    def batched(self, max_batch: int = 64, max_wait: float = 0.002, **options: Unpack[BatchedOptions]) -> Batched:
        """Return a service that joins concurrent requests of few items into runs of up to ``max_batch`` items.

        It has ``run``, ``submit``, ``arun`` for an event loop, and ``close``, and is a context manager. Three threads
        serve it: two run, and one collects. :class:`ortgpu.session.pool.batching.Batched` lists the options and the
        exceptions.
        """
        warm = functools.partial(warm_sizes, self)
        return batching.batched_session(self, max_batch=max_batch, max_wait=max_wait, warm=warm, **options)

    def pinned_empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Return an empty array of ``shape`` and ``dtype`` in pinned memory. Copies from there to the GPU are fastest.

        The memory is reused once the array and all its views are gone, and freed after ``close()``. It is ordinary
        memory, and a debug message says so, if the session is on the CPU, if ``pinned_memory_limit`` is reached, or if
        pinning fails.

        Raises:
            ExecutionError: the session is closed.
            TypeError: ``dtype`` is the dtype of Python objects.
        """
        return memory_of(self).empty(shape, dtype)

    @measured
    def memory(self) -> SessionMemory:
        """The memory of the session now. Each access measures it, in a tenth of a millisecond and a query of NVML.

        Raises:
            ExecutionError: the session is closed, or lost the GPU.
        """
        return read_memory(self)

    def trim(self) -> None:
        """Give back the memory that no run needs: plans for further shapes, free regions of the arena, host memory.

        Afterwards the session holds about as much memory as after its first small run. Other threads may run meanwhile
        and keep the memory that they use. The next run of a large input or a further shape is slower. A session with
        cuda_graph keeps the shape that ran last, and its arena.

        Raises:
            ExecutionError: the session is closed, or lost the GPU.
        """
        trim(self)

    def warm(
        self,
        feeds: Iterable[Mapping[str, Any]],
        progress: Callable[[int, int], object] | None = None,
        *,
        runs: int = 1,
    ) -> SessionShapes:
        """Run feeds of several shapes before the first request, so that no later run has to plan for these shapes.

        Args:
            feeds: a feed for each shape. The shape of an array may stand in place of the array, ``{"x": (8, 3, 224,
                224)}``, and stands for zeros.
            progress: called with the number of finished shapes, and the number of all shapes.
            runs: the number of runs at a time, up to eight, that are to be as fast from the start: 4 for ``map``, or
                the number of threads. Each takes the memory of one more session.

        Raises:
            ExecutionError: the session is closed.
            TypeError, ValueError: a feed is no mapping, or the model declares no type for a shape.
            GPUError, Exception: as ``run`` raises.
        """
        return warm(self, feeds, progress, runs)

    @property
    def shapes(self) -> SessionShapes:
        """The shapes that the session runs without planning its convolutions again, and why there are none.

        The session makes plans for up to eight shapes once shapes come back and their runs are slow; ``memory.plans``
        gives their memory. A further shape replaces the least recently used shape. ``run``, ``map``, ``run_on_device``
        and services use the plans, with equal results. An IOBinding, ``run_async`` and runs with run options do not.
        """
        lifetime.refuse_if_closed(self)
        return self._gpu_runner.shapes()

    def run_with_iobinding(self, iobinding: onnxruntime.IOBinding, run_options: Any = None) -> None:
        """Run the model over the bound values, as InferenceSession.run_with_iobinding does; see :meth:`io_binding`."""
        context, runner = self._gpu_context, self._gpu_runner
        try:
            streams = runner.caller[0] if runner.caller else streams_of(self)
            is_idle = streams is not None and streams.is_idle()
            if not is_idle:
                lifetime.refuse_after_reset(self, self._gpu_context)
                context, runner = self._gpu_context, self._gpu_runner
                if streams is not None:
                    streams.wait()
            began = time.perf_counter() if runner.most_shapes else None
            if runner.binds_directly and iobinding._session is self._sess:
                self._sess.run_with_iobinding(iobinding._iobinding, run_options)
            else:
                failures.move_binding(iobinding, self)
                self._gpu_runner.around(super().run_with_iobinding)(iobinding, run_options)
            if began is not None:
                runner.note_bound(self, iobinding, began)
            if streams is not None and not is_idle:
                streams.order_results()
        except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
            again = self._gpu_runner.around(super().run_with_iobinding)
            failures.call_again(self, error, lambda: _run_in_order(self, again, iobinding, run_options), is_bound=True)
            return
        if self._gpu_context is not context:  # A run beside this one may have left a wrong plan to it.
            GPUSession.run_with_iobinding(self, iobinding, run_options)

    def io_binding(self) -> onnxruntime.IOBinding:
        """Return an IOBinding. Its methods raise the same errors as the session's methods.

        A run over memory of the GPU, bound or in OrtValues, waits for the work that is queued at the call: in CUDA's
        default stream, in the thread's default stream, and in the thread's current streams of PyTorch and CuPy, if the
        program uses them. Work queued there after the run waits for its results. A session with the option
        ``user_compute_stream`` waits on the GPU, others wait in the calling thread.

        Not promised: the order with any other stream; the caller is responsible for it. Nor the order of a run's
        results if its options switch off waiting for them, unless the session has ``user_compute_stream``.
        """
        lifetime.refuse_if_unusable(self)
        self._gpu_runner.check_binding()
        try:
            return failures.explaining_binding(super().io_binding(), self)
        except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
            raise failures.explained(self, error)  # noqa: B904 - explained sets the cause

    def __repr__(self) -> str:
        """Return the model, the device and the providers, and for an unusable session the reason."""
        attributes = vars(self)
        if "_verified" not in attributes:  # The constructor has not returned.
            return object.__repr__(self)
        model = attributes["_model_path"]
        error = lifetime.error_of(self)
        return (
            f"<{type(self).__name__} of {escape_controls(os.fsdecode(model)) if model else '<bytes>'} "
            f"on {lifetime.device_of(self)} "
            f"[{', '.join(attributes['_providers'])}]{f', {error.summary}' if isinstance(error, GPUError) else ''}>"
        )

    def explain_placement(self) -> PlacementDetails:
        """Explain why each node is where it is, and where ONNX Runtime copies between devices.

        Opens the model again in a child process, with default session and provider options. That takes the time and GPU
        memory of another session. The model is written to a temporary folder that no other user can read.

        Raises:
            GPUError: the child could not open the model on this session's device.
            TimeoutError: it took more than five minutes.
        """
        lifetime.refuse_if_closed(self)
        device = lifetime.device_of(self)
        return placement_details.explain_placement(
            self._request.model, device=device.ordinal if device.is_gpu else device.kind
        )

    def close(self) -> None:
        """Close the session and free its GPU memory. Any later use raises ExecutionError. Closing twice is fine.

        ONNX Runtime frees the memory once nothing refers to the session. An IOBinding, an OrtValue or an input's
        metadata that the caller keeps delays that. The CUDA context stays until the process ends.
        """
        if lifetime.error_of(self) is None:
            lifetime.abandon_if_context_is_gone(self)
            error = ExecutionError("this GPUSession is closed", fixes=[manual("open a new GPUSession")])
            closed = lifetime.UnusableSession(error)
            for name in _HELD:
                if hasattr(self, name):
                    setattr(self, name, closed)
            self._model_bytes = None
            self._gpu_runner.close(error)
            self._gpu_runner = PlainRunner()
            self._holdings = None
            if self._pinned is not None:
                self._pinned.close()

    def __enter__(self) -> Self:
        lifetime.refuse_if_unusable(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self, type(self))

    @property
    def _enable_fallback(self) -> bool:
        """Always False. ONNX Runtime before 1.23 ignores the argument enable_fallback and sets this to True."""
        return False

    @_enable_fallback.setter
    def _enable_fallback(self, value: bool) -> None:
        pass

    def enable_fallback(self) -> None:
        """Raise ProviderRequestError, because a GPUSession has no fallback."""
        lifetime.refuse_if_unusable(self)
        raise no_fallback("enable_fallback() was called")

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Open the model again with these providers and the other arguments of the constructor, and verify it.

        The GPU must have room for both sessions for a moment. After an error the session is as it was. A session on
        the GPU never moves to the CPU, and with ``device="auto"`` to no other GPU. A session on the allowed CPU stays
        there if the providers name the CPU alone, or if there is still no GPU.

        Raises:
            ProviderRequestError: the providers are malformed or do not include CUDA.
            GPUError, Exception: as the constructor raises.
        """
        lifetime.refuse_if_unusable(self)
        request, device = self._request, lifetime.device_of(self)
        requested, verdict = parse(providers, provider_options), judge(providers, provider_options)
        if verdict == "cpu" and not device.is_gpu:
            return
        if verdict != "guarded":
            check_names(requested, onnxruntime.get_all_providers(), onnxruntime.get_available_providers())
            raise ProviderRequestError(
                "a GPUSession stays on the GPU" if device.is_gpu else "a GPUSession is for CUDA, or for an allowed CPU",
                evidence=[f"set_providers({providers!r}) asks for providers without CUDA"],
                fixes=[manual("name CUDAExecutionProvider too, or open an onnxruntime.InferenceSession with these")],
                requested=providers,
            )
        changed = dataclasses.replace(request, providers=requested)
        if device.is_gpu:
            ordinal = device.ordinal if request.device == "auto" else request.device
            changed = dataclasses.replace(changed, device=ordinal, allow_cpu=False)
        with unchanged_on_error(self):
            self._open_request(changed)
        self._request = dataclasses.replace(self._request, allow_cpu=request.allow_cpu)

    def _keep(self, request: SessionRequest, verified: Verified) -> None:
        """Store the request and the verified facts.

        Writes to ``__dict__`` and keeps other attributes: a guarded class may define properties of these names.
        """
        attributes, before = self.__dict__, self.__dict__.get("_verified")
        for name in FACTS:
            if next(cls for cls in type(self).__mro__ if name in vars(cls)) is not GPUSession:
                continue  # A subclass defines this name, and an entry here would hide its value.
            if name not in attributes or (before is not None and attributes[name] is getattr(before, name)):
                attributes[name] = getattr(verified, name)
        attributes["_verified"] = verified
        # Drop the attributes that an earlier construction of this object left.
        if self._pinned is not None:
            self._pinned.close()  # A finalizer of the session would keep it alive.
        former = self._holdings
        for name in ("_pinned", "_holdings", "_gpu_runner"):
            attributes.pop(name, None)
        if not isinstance(request.model, bytes):  # The model may be opened again in another working directory.
            request = dataclasses.replace(request, model=os.path.abspath(os.fsdecode(request.model)))
        self._request = request
        self._model_stamp = stamp_of(request.model)
        if verified.budget is not None:
            self._holdings = holdings_within(
                verified.budget,
                verified.options_chosen,
                request.providers.options_of(CUDA),
                former,
                captures=request.cuda_graph or CAPTURE in verified.options_chosen,
            )
        self._pinned_memory_limit = parse_size("pinned_memory_limit", request.pinned_memory_limit)

    def _refuse_if_lost(self) -> None:
        """If this process lost the GPU, raise the error of that loss. A subclass may check more."""
        lifetime.refuse_if_lost()

    def _let_go(self, error: BaseException) -> None:
        """Drop all created attributes, so that the failed C++ session frees its GPU memory."""
        for name in (*_HELD, "_model_bytes", "_stream", "_gpu_runner", "_holdings"):
            self.__dict__.pop(name, None)
        lifetime.let_go_of_variables(error)


def _runner_of(session: GPUSession, request: SessionRequest, verified: Verified) -> PlainRunner:
    """Return the runner of an open session. Raises ProviderRequestError if a requested capture is impossible."""
    if not verified.device.is_gpu:
        return PlainRunner(session)
    if request.cuda_graph or CAPTURE in verified.options_chosen:
        return graph_requests.captured(session)
    staged = may_stage(session)
    runner = StagedRunner(session) if staged else PlainRunner(session)
    make = maker_of(session, request, verified, staged=staged)
    if make is not None:
        runner = shaped = ShapedRunner(session, runner, make)
        holdings_of(session).add("plans", shaped)
    set_device_in_runs(session, runner, verified.device)
    if session._holdings is not None and session._holdings.turns is not None:
        take_turns(runner, session._holdings.turns)
    return runner


def _run_in_order(session: GPUSession, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run after the work that the caller has queued on the GPU, and before later work."""
    wait_for_caller(session)
    results = method(*args, **kwargs)
    order_results(session)
    return results


def _explaining(name: str) -> Callable[..., Any]:
    """Return the method of InferenceSession that raises the typed errors of the class."""

    @functools.wraps(getattr(InferenceSession, name))
    def call(self: GPUSession, *args: Any, **kwargs: Any) -> Any:
        method = self._gpu_runner.around(getattr(super(GPUSession, self), name))
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
            return failures.call_again(self, error, functools.partial(method, *args, **kwargs))

    return call


def _ordered(name: str) -> Callable[..., Any]:
    """Return the method that also runs after the work its caller has queued on the GPU, and before later work."""

    @functools.wraps(getattr(InferenceSession, name))
    def call(self: GPUSession, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(
            _run_in_order, self, self._gpu_runner.around(getattr(super(GPUSession, self), name)), *args, **kwargs
        )
        try:
            lifetime.refuse_after_reset(self, self._gpu_context)
            context = self._gpu_context
            results = run()
        except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
            return failures.call_again(self, error, run)
        # A run beside this one may have left a wrong plan to it.
        return results if self._gpu_context is context else call(self, *args, **kwargs)

    return call


for _name in ("run_with_ort_values", "run_with_ortvaluevector"):
    if hasattr(InferenceSession, _name):
        setattr(GPUSession, _name, _ordered(_name))
if hasattr(InferenceSession, "create_ortvalue_from_shape_and_type"):
    GPUSession.create_ortvalue_from_shape_and_type = _explaining("create_ortvalue_from_shape_and_type")

# Since 1.18 these methods do not ask the C++ session: a session that is closed or lost the GPU would still claim CUDA.
_ANSWERS = (
    "get_inputs", "get_outputs", "get_overridable_initializers", "get_modelmeta", "get_session_options",
    "get_providers", "get_provider_options", "get_input_memory_infos", "get_output_memory_infos",
    "get_input_epdevices",
)  # fmt: skip


def _refusing(method: Callable[[GPUSession], Any]) -> Callable[[GPUSession], Any]:
    @functools.wraps(method)
    def ask(self: GPUSession) -> Any:
        lifetime.refuse_if_closed(self)
        return method(self)

    return ask


for _name in _ANSWERS:
    if hasattr(InferenceSession, _name):
        setattr(GPUSession, _name, _refusing(getattr(InferenceSession, _name)))

# pickle and typing.get_type_hints() look for the class and its annotations in the module that __module__ names.
# The modules of this folder stay as they are: a stand-in for a module that is imported late must not replace it.
vars(sys.modules[__package__]).update(
    {
        name: value
        for name, value in globals().items()
        if not name.startswith("__") and getattr(value, "__name__", None) != f"{__package__}.{name}"
    }
)
