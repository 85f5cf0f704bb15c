"""Programs with sessions that keep plans for several shapes, with the CPU in the GPU's place: ``shaped.py NAME ...``.

On the CPU a shape that comes back is not slow, so the policies here take each for slow. What a plan costs and gains is
measured on a GPU, by benchmarks/shapes.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ortgpu import CPUExecutionWarning, GPUSession, GPUSessionPool, PerformanceWarning
from ortgpu.process.threads import Turns
from ortgpu.provider.options import Carried
from ortgpu.running.memory import holdings_of
from ortgpu.running.plain_runs import PlainRunner
from ortgpu.running.shape_returns import Policy
from ortgpu.running.shaped_runs import ShapedRunner
from ortgpu.running.turns import take_turns
from ortgpu.session.shapes import PlanSource
from tests.programs import no_search  # noqa: F401
from tests.support import children

EAGER = Policy(most=4, returns=3, slow=0, worth=1e9)
HEAD = '<ir_version: 8, opset_import: ["": 17, "local": 1]> '
# Two convolutions, a shape and a small constant: what networks that are exported have.
NETWORK = (
    HEAD + "g (float[n, 1, h, w] x) => (float[n, c] y, int64[4] s) <float[2, 1, 3, 3] k = {%s}, int64[2] to = {0, -1}>"
    " { c = Conv <pads = [1, 1, 1, 1]> (x, k) r = Relu(c) p = GlobalMaxPool(r) y = Reshape(p, to) s = Shape(x) }"
) % ", ".join(str(number / 8) for number in range(18))


def parsed(text: str) -> bytes:
    content: bytes = onnx.parser.parse_model(text).SerializeToString()
    return content


def feed(*shape: int, name: str = "x", seed: int = 0) -> dict[str, Any]:
    return {name: np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)}


SIZES = [feed(1, 1, 8 + size, 6) for size in range(4)]


def shaped(
    model: Any, policy: Policy = EAGER, options: Any = None, change: Callable[[Any, int], Any] | None = None
) -> tuple[GPUSession, ShapedRunner]:
    """Return a session with plans. ``change`` may replace the plans that were made."""
    session = GPUSession(model, options)
    source = source_of(session, model, options)

    def make(branches: int) -> Any:
        plans = source.make(branches)
        return plans if change is None else change(plans, branches)

    runner = ShapedRunner(session, PlainRunner(session), make, policy)
    session._gpu_runner = runner
    holdings_of(session).add("plans", runner)
    return session, runner


def source_of(session: GPUSession, model: Any, options: Any = None) -> PlanSource:
    return PlanSource(
        model=model,
        stamp=None if isinstance(model, bytes) else _stamp(model),
        options=Carried(options),
        cuda_options={},
        others={},
        sizes={},
        device=session.device,
        placement=session.placement,
        overridable=tuple(each.name for each in session.get_overridable_initializers()),
        pinned_memory_limit=1 << 20,
        staged=False,
    )


def _stamp(path: Any) -> Any:
    from ortgpu.model.files import stamp_of

    return stamp_of(path)


def settle(session: GPUSession, runner: ShapedRunner, feeds: Iterable[Any]) -> None:
    """Run feeds in turn until plans serve them, or none will."""
    feeds = list(feeds)
    for _ in range(40):
        for each in feeds:
            session.run(None, each)
        built = runner._built
        if built is not None:
            built.wait()
            for each in feeds * 2:
                session.run(None, each)
            return


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, np.ndarray) and expected.dtype.kind == "f":
        return bool(np.array_equal(found, expected, equal_nan=True)) and found.dtype == expected.dtype
    return bool(np.array_equal(found, expected))


def state(runner: ShapedRunner) -> list[Any]:
    return [runner._plans is not None, runner.why_none, len(runner.kept())]


def threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("ortgpu"))


def run_in_threads(action: Callable[[int], object]) -> None:
    """Call ``action`` with the numbers 0 to 7, each in a thread, and wait for all."""
    workers = [threading.Thread(target=action, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def lasting_threads() -> list[str]:
    """Return the threads that do not end within twenty seconds. A thread ends a moment after its work."""
    end = time.monotonic() + 20
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    return threads()


# Models of many forms


def forms() -> dict[str, tuple[bytes, list[dict[str, Any]]]]:
    """Return models with the feeds of several shapes, by what is peculiar about them."""
    xs = [np.arange(1, size, dtype=np.float32) for size in (3, 4, 6, 9)]
    plain = [{"x": x} for x in xs]
    branch = "then_branch = t () => (float[m] a) { a = Mul(d, two) }, else_branch = e () => (float[m] b) { b = Neg(d) }"
    loop = "body = b (int64 i, bool go, float[m] v) => (bool on, float[m] w) { on = Identity(go) w = Add(v, d) }"
    texts = {
        "subgraphs that read values from outside": (
            f"g (float[n] x, bool z) => (float[n] y) <float two = {{2}}>"
            f" {{ d = Exp(x) i = If <{branch}> (z) y = Add(i, x) }}"
        ),
        "a loop": (
            "g (float[n] x) => (float[n] y) <int64 count = {3}, bool yes = {1}>"
            f" {{ d = Exp(x) y = Loop <{loop}> (count, yes, x) }}"
        ),
        "a local function": (
            "g (float[n] x) => (float[n] y) { d = local.twice(x) y = Neg(d) }"
            ' <opset_import: ["": 17], domain: "local"> twice (a) => (b) { b = Add(a, a) }'
        ),
        "several outputs, one of them an input": (
            "g (float[n] x) => (float[n] x, float[n] y, int64[1] s) { y = Neg(x) s = Shape(x) }"
        ),
        "an output that is an initializer": (
            "g (float[n] x) => (float[n] y, float[2] w) <float[2] w = {1, 2}> { y = Neg(x) }"
        ),
        "an optional input that is left out": (
            "g (float[n] x) => (float[n] y) <float most = {2}> { y = Clip(x, , most) }"
        ),
        "an output whose shape the values decide": "g (float[n] x) => (float[k] y) { y = Unique (x) }",
        "a sequence": ("g (float[n] x) => (seq(float[m]) y) <int64 one = {1}> { y = SplitToSequence(x, one) }"),
    }
    models = {name: (parsed(HEAD + text), plain) for name, text in texts.items()}
    first = "subgraphs that read values from outside"
    models[first] = (models[first][0], [{**each, "z": np.array(bool(i % 2))} for i, each in enumerate(plain)])
    words = [{"x": np.array(list("abcdef")[:size], dtype=object)} for size in (1, 2, 4)]
    models["strings"] = (parsed(HEAD + "g (string[n] x) => (string[n] y) { y = Identity(x) }"), words)
    overridden = parsed(HEAD + "g (float[n] x, float[1] w) => (float[n] y) <float[1] w = {3}> { y = Mul(x, w) }")
    models["an initializer that is an input"] = (
        overridden,
        [*plain, *({**each, "w": np.array([5], np.float32)} for each in plain)],
    )
    old = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["": 9]> g (float[n] x, float[1] w) => (float[n] y) { y = Mul(x, w) }'
    )
    old.graph.initializer.append(numpy_helper.from_array(np.array([3], np.float32), "w"))
    models["initializers that have to be inputs"] = (old.SerializeToString(), plain)
    models["names like those of branches"] = (
        _with_taken_names(),
        [{"branch0/x": x, "ortgpu_branch_bit_0": x} for x in xs],
    )
    return models


def _with_taken_names() -> bytes:
    nodes = [
        helper.make_node("Add", ["branch0/x", "ortgpu_branch_bit_0"], ["branch0"], "branch0/Add"),
        helper.make_node("Mul", ["branch0", "w"], ["y"], ""),
    ]
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in names]
        for names in (["branch0/x", "ortgpu_branch_bit_0"], ["y"])
    ]
    weights = [numpy_helper.from_array(np.array([2], np.float32), "w")]
    graph = helper.make_graph(nodes, "g", ends[0], ends[1], weights)
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return content


def run_forms() -> None:
    """Report for each form whether plans were made, and whether all results are those of a plain session."""
    for name, (model, feeds) in forms().items():
        plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        expected = [plain.run(None, each) for each in feeds]
        session, runner = shaped(model, dataclasses.replace(EAGER, most=8))
        for _ in range(3):
            session.run(None, feeds[0])
        settle(session, runner, feeds)
        same = all(equal(session.run(None, each), wanted) for each, wanted in zip(feeds, expected, strict=True))
        children.report(name, [same, *state(runner)])
        session.close()


def run_kinds(*kinds: str) -> None:
    """Report the same for kinds of benchmarks.zoo_models, with batches as shapes."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            make = (
                f"from benchmarks.zoo_models import made; print(made({kind!r}, __import__('pathlib').Path({folder!r})))"
            )
            path = subprocess.run(
                [sys.executable, "-c", make], check=True, capture_output=True, text=True
            ).stdout.strip()
            plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            shape = [size if isinstance(size, int) else 0 for size in plain.get_inputs()[0].shape]
            feeds = [feed(batch, *shape[1:]) for batch in (1, 2)]
            expected = [plain.run(None, each) for each in feeds]
            session, runner = shaped(path, Policy(most=2, returns=1, slow=0, worth=1e9))
            settle(session, runner, feeds)
            same = all(equal(session.run(None, each), wanted) for each, wanted in zip(feeds, expected, strict=True))
            children.report(kind, [same, *state(runner)])


def external_data() -> None:
    """Report the same for a model whose weights are in another file, which is removed once the session is open."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        model = onnx.load_from_string(parsed(NETWORK))
        for tensor in model.graph.initializer:
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name)
            )  # raw, as others save it
        onnx.save_model(model, str(path), save_as_external_data=True, location="data", size_threshold=90)
        plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        session, runner = shaped(str(path))
        settle(session, runner, SIZES)
        same = all(equal(session.run(None, each), plain.run(None, each)) for each in SIZES)
        children.report("kept", [same, *state(runner)])
        session, runner = shaped(str(path))
        for data in Path(folder).iterdir():
            if data != path:
                data.unlink()
        settle(session, runner, SIZES)
        same = all(equal(session.run(None, each), plain.run(None, each)) for each in SIZES)
        children.report("removed", [same, runner._plans is not None, runner.why_none is not None])


def changed_file() -> None:
    """Report what becomes of a session whose file another model replaced: in time to notice, and not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        for name in ("noticed", "unnoticed"):
            path.write_bytes(parsed(NETWORK))
            plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            session, runner = shaped(str(path))
            path.write_bytes(parsed(NETWORK.replace("0.125", "7.0")))
            if name == "unnoticed":
                stamp = _stamp(path)
                session, runner = _with_stamp(session, stamp)
            settle(session, runner, SIZES)
            same = all(equal(session.run(None, each), plain.run(None, each)) for each in SIZES)
            children.report(name, [same, *state(runner)[:2]])


def _with_stamp(session: GPUSession, stamp: Any) -> tuple[GPUSession, ShapedRunner]:
    runner = session._gpu_runner
    assert isinstance(runner, ShapedRunner)
    source = next(
        cell.cell_contents for cell in runner._make.__closure__ or () if isinstance(cell.cell_contents, PlanSource)
    )
    runner._make = dataclasses.replace(source, stamp=stamp).make
    return session, runner


def one_shape() -> None:
    """Report what a session with one shape, and with shapes that never come back, has made: nothing."""
    session, runner = shaped(parsed(NETWORK))
    for _ in range(50):
        session.run(None, SIZES[0])
    children.report("one", [state(runner), runner._built is None, threads()])
    for size in range(40):
        session.run(None, feed(1, 1, 8 + size, 6))
    children.report("new ones", [state(runner), runner._built is None])


def many_shapes() -> None:
    """Report the shapes that are kept of more than there is room for, and the warning."""
    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, window=12))
    plain = onnxruntime.InferenceSession(parsed(NETWORK), providers=["CPUExecutionProvider"])
    settle(session, runner, SIZES)
    kept = [list(shape) for shape in runner.kept()]
    session.run(None, SIZES[0])
    other = feed(2, 1, 8, 6)
    session.run(None, other)
    children.report("kept", [kept, [list(shape) for shape in runner.kept()]])
    more = [feed(1, 1, 20 + size, 6) for size in range(6)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            same = all(equal(session.run(None, each), plain.run(None, each)) for each in more)
    said = [each for each in caught if each.category is PerformanceWarning]
    children.report("warned", [same, len(said), str(said[0].message), Path(said[0].filename).name])


def no_gain() -> None:
    """Report why there are no plans where they gain nothing, and where shapes that come back are not slow."""
    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, worth=0, judged=3))
    settle(session, runner, SIZES)
    for each in SIZES * 3:
        session.run(None, each)
    children.report("gain", state(runner))
    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, slow=1e9))
    for each in SIZES * 20:
        session.run(None, each)
    children.report("quick", [state(runner), runner._built is None])


def failures() -> None:
    """Report what becomes of plans that cannot be made, that fail, and of feeds that are wrong."""
    logging.getLogger("ortgpu").addHandler(logging.NullHandler())

    def refuse(plans: Any, branches: int) -> Any:
        plans.close()
        raise MemoryError("no room")

    plain = onnxruntime.InferenceSession(parsed(NETWORK), providers=["CPUExecutionProvider"])

    def outcome(change: Any) -> list[Any]:
        session, runner = shaped(parsed(NETWORK), change=change)
        settle(session, runner, SIZES)
        same = all(equal(session.run(None, each), plain.run(None, each)) for each in SIZES)
        return [same, *state(runner), lasting_threads()]

    def broken(plans: Any, branches: int) -> Any:
        class Broken:
            _sess = types.SimpleNamespace(queue=[])
            device = None

        plans.lanes[0].session = Broken()
        return plans

    children.report("not made", outcome(refuse))
    children.report("broken", outcome(broken))
    session, runner = shaped(parsed(NETWORK))
    settle(session, runner, SIZES)
    before = runner.kept()
    errors = []
    for wrong in ({"x": np.zeros((1, 2, 8, 6), np.float32)}, {"x": np.zeros((1, 1), np.float32)}, {"z": SIZES[0]["x"]}):
        try:
            session.run(None, wrong)
        except Exception as error:
            errors.append(type(error).__name__)
    children.report("wrong feeds", [errors, set(runner.kept()) == set(before), *state(runner)])


def ways() -> None:
    """Report whether every way to run gives the results of a plain session, once plans are kept."""
    model = parsed(NETWORK)
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    session, runner = shaped(model)
    expected = [plain.run(None, each) for each in SIZES]
    settle(session, runner, SIZES)
    children.report(
        "run", [equal(session.run(None, each), wanted) for each, wanted in zip(SIZES, expected, strict=True)]
    )
    children.report(
        "names", [equal(session.run(["s"], each), wanted[1:]) for each, wanted in zip(SIZES, expected, strict=True)]
    )
    children.report("map", equal(list(session.map(iter(SIZES * 4))), expected * 4))
    on_device = [[value.numpy() for value in session.run_on_device(None, each)] for each in SIZES]
    children.report("run_on_device", equal(on_device, expected))
    values = [{"x": onnxruntime.OrtValue.ortvalue_from_numpy(each["x"])} for each in SIZES]
    children.report("and so", list(runner.kept()[-1]) == [1, 1, 11, 6])
    children.report(
        "values", [equal(session.run(None, each), wanted) for each, wanted in zip(values, expected, strict=True)]
    )
    options = onnxruntime.RunOptions()
    children.report("options", equal(session.run(None, SIZES[0], options), expected[0]))
    mapping = [type("Feed", (dict,), {})(each) for each in SIZES]
    children.report(
        "mapping", [equal(session.run(None, each), wanted) for each, wanted in zip(mapping, expected, strict=True)]
    )
    children.report("kept", state(runner))
    outcomes: list[bool] = []

    def in_thread(number: int) -> None:
        outcomes.extend(equal(session.run(None, SIZES[number]), expected[number]) for _ in range(50))

    run_in_threads(lambda number: in_thread(number % 4))
    children.report("threads", [len(outcomes), all(outcomes), *state(runner)])


def turns() -> None:
    """Report whether plans serve a session whose runs take turns, as those within a budget do."""
    session, runner = shaped(parsed(NETWORK))
    take_turns(runner, Turns())
    settle(session, runner, SIZES)
    children.report("kept", state(runner))
    children.report("map", len(list(session.map(iter(SIZES * 4)))))


def bindings() -> None:
    """Report the warnings of runs with an IOBinding: in turn, with one shape, and of run_on_device."""

    def warned(run: Callable[[GPUSession], None], slow: float = 0) -> list[str]:
        session, _ = shaped(parsed(NETWORK), dataclasses.replace(EAGER, window=12, slow=slow))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(session)
        said = [each for each in caught if each.category is PerformanceWarning]
        return [Path(each.filename).name + ": " + str(each.message) for each in said]

    def bound(sizes: Iterable[int], way: str) -> Callable[[GPUSession], None]:
        def run(session: GPUSession) -> None:
            binding = session.io_binding()
            binding.bind_output("y", "cpu")
            for size in sizes:
                x = SIZES[size]["x"]
                if way == "array":
                    binding.bind_cpu_input("x", x)
                elif way == "value":
                    binding.bind_ortvalue_input(ortvalue=onnxruntime.OrtValue.ortvalue_from_numpy(x), name="x")
                else:
                    binding.bind_input("x", "cpu", 0, np.float32, list(x.shape), x.ctypes.data)
                session.run_with_iobinding(binding)

        return run

    for way in ("array", "value", "address"):
        children.report(way, warned(bound([0, 1, 2, 3] * 10, way)))
    children.report("one shape", warned(bound([0] * 40, "array")))
    children.report("quick", warned(bound([0, 1, 2, 3] * 10, "array"), slow=1e9))

    def on_device(session: GPUSession) -> None:
        for each in SIZES * 10:
            session.run_on_device(None, each)

    children.report("run_on_device", warned(on_device, slow=1e9))


def busy() -> None:
    """Report the lanes that serve shapes which several threads run at a time, and the results."""
    model = parsed(NETWORK)
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    large = [feed(8, 1, 200 + size, 100) for size in range(4)]  # runs of milliseconds, so that others wait
    expected = [plain.run(None, each) for each in large]
    session, runner = shaped(model, dataclasses.replace(EAGER, waits=1, waited=60, lanes=3, judged=1))
    settle(session, runner, large)
    plans = runner._plans
    assert plans is not None
    outcomes: list[bool] = []
    end = time.monotonic() + 60

    def places() -> list[int]:
        return [len(kept.places) for kept in map(plans.find, plans.kept()) if kept is not None]

    children.report("one thread", [len(plans.lanes), places()])

    def in_thread(number: int) -> None:
        while (len(plans.lanes) < 3 or sum(places()) < 12) and time.monotonic() < end:
            outcomes.append(equal(session.run(None, large[number % 4]), expected[number % 4]))

    run_in_threads(in_thread)
    same = all(equal(session.run(None, each), wanted) for each, wanted in zip(large, expected, strict=True))
    children.report("threads", [all(outcomes), same, len(plans.lanes), places(), *state(runner)])
    preferred = {id(kept.places[0][0]) for kept in map(plans.find, plans.kept()) if kept is not None}
    children.report("preferred", len(preferred))
    try:
        session.run(None, {"x": large[0]["x"].astype(np.int64)})
    except Exception as error:
        children.report("wrong feed", [type(error).__name__, len(runner.kept())])
    others = [feed(1, 1, 30 + size, 20) for size in range(6)]
    same = all(equal(session.run(None, each), plain.run(None, each)) for each in others * 2)
    children.report("other shapes", [same, [list(shape[2:]) for shape in runner.kept()], places()])
    session.close()
    children.report("closed", [[lane.session is None for lane in plans.lanes], threads()])


def lanes_that_fail() -> None:
    """Report what becomes of shapes that threads wait for where no lane opens, or one with other results."""
    model, other = parsed(NETWORK), parsed(NETWORK.replace("0.125", "7.0"))
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    large = [feed(8, 1, 200 + size, 100) for size in range(4)]
    expected = [plain.run(None, each) for each in large]
    others = source_of(GPUSession(other), other)

    def refused(count: int) -> Any:
        raise MemoryError("no room")

    def outcome(opening: Callable[[int], Any]) -> list[Any]:
        opened: list[int] = []

        def change(plans: Any, branches: int) -> Any:
            def noted(count: int) -> Any:
                opened.append(count)
                return opening(count)

            plans.opening = noted
            return plans

        session, runner = shaped(
            model, dataclasses.replace(EAGER, waits=1, waited=60, lanes=3, judged=1), change=change
        )
        settle(session, runner, large)
        outcomes: list[bool] = []
        end = time.monotonic() + 60

        def in_thread(number: int) -> None:
            left = 5  # runs once it has failed
            while left and time.monotonic() < end:
                left -= not runner._most_lanes
                outcomes.append(equal(session.run(None, large[number % 4]), expected[number % 4]))

        run_in_threads(in_thread)
        plans = runner._plans
        found = [all(outcomes), len(opened), len(plans.lanes) if plans is not None else 0, lasting_threads()]
        new = feed(1, 1, 9, 9)
        return [*found, equal(session.run(None, new), plain.run(None, new)), *state(runner)[:2]]

    children.report("not opened", outcome(refused))
    children.report("other results", outcome(lambda count: others._opening(EAGER.most, count)))


def lanes_without_room() -> None:
    """Report what becomes of a run that fails in a further lane, as its memory ends, and of one with a wrong feed."""
    plain = onnxruntime.InferenceSession(parsed(NETWORK), providers=["CPUExecutionProvider"])
    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, judged=1))
    settle(session, runner, SIZES)
    plans = runner._plans
    assert plans is not None
    kept = plans.find(plans.kept()[-1])
    assert kept is not None
    kept.feed, kept.wanted = SIZES[-1], 2
    with plans.opening(1) as (_, open_lane):
        plans.add_lane(open_lane)
    further = plans.lanes[1]
    children.report("planned", [lane is further for lane, _ in kept.places])
    plans.lanes[0].is_planning = True  # so that runs take the other lane
    errors = []
    try:
        session.run(None, {"x": np.zeros((1, 2, 8, 6), np.float32)})
    except Exception as error:
        errors.append(type(error).__name__)
    children.report("wrong feed", [errors, len(plans.lanes), state(runner)])

    class Full:
        queue: Any = ()

        def run(self, *_: Any) -> Any:
            raise RuntimeError("no room")

    further.session._sess = Full()
    plans.lanes[0].is_planning = True
    same = [equal(session.run(None, each), plain.run(None, each)) for each in [SIZES[-1], feed(1, 1, 9, 9)]]
    children.report("no room", [same, len(plans.lanes), runner._most_lanes, state(runner)[:2]])


def lanes_with_little_room() -> None:
    """Report the lanes that are opened where the GPU has room for one further lane, and more are asked for twice."""
    asked: list[int] = []

    def change(plans: Any, branches: int) -> Any:
        opening = plans.opening

        def one(count: int) -> Any:
            asked.append(count)
            return opening(1)

        plans.opening = one
        return plans

    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, judged=1), change=change)
    session.warm(SIZES, runs=4)
    plans = runner._plans
    assert plans is not None
    session.warm(SIZES, runs=4)
    places = [len(kept.places) for kept in map(plans.find, plans.kept()) if kept is not None]
    children.report("lanes", [asked, len(plans.lanes), places, lasting_threads()])


def dropped_while_a_lane_opens() -> None:
    """Drop a session while a thread opens a lane: ONNX Runtime must not return to a thread that Python has ended."""
    begun = threading.Event()

    def change(plans: Any, branches: int) -> Any:
        opening = plans.opening

        @contextlib.contextmanager
        def slow(count: int) -> Any:
            begun.set()
            time.sleep(0.5)  # the program goes to its end meanwhile
            with opening(count) as opened:
                children.report("opened", True)
                yield opened

        plans.opening = slow
        return plans

    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, judged=1, waits=1), change=change)
    settle(session, runner, SIZES)
    plans = runner._plans
    assert plans is not None
    shape = plans.kept()[0]
    kept = plans.find(shape)
    assert kept is not None
    plans.lanes[0].session._sess.queue.append(None)  # as if another run were at work
    runner._note_wait(session, plans, kept, SIZES[0])
    children.report("begun", begun.wait(30))


def from_the_start_in_threads() -> None:
    """Report the results of eight threads, during which plans are made."""
    model = parsed(NETWORK)
    plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    expected = [plain.run(None, each) for each in SIZES]
    session, runner = shaped(model)
    outcomes: list[bool] = []
    end = time.monotonic() + 60

    def in_thread(number: int) -> None:
        turn = number
        while runner._gains is not None and runner.why_none is None and time.monotonic() < end:
            outcomes.append(equal(session.run(None, SIZES[turn % 4]), expected[turn % 4]))
            turn += 1

    run_in_threads(in_thread)
    children.report("threads", [all(outcomes), *state(runner)])


def warming() -> None:
    """Report what is kept after warm(), with arrays and with shapes, and of a session that needs no plans."""
    steps: list[tuple[int, int]] = []
    session, runner = shaped(parsed(NETWORK))
    shapes = session.warm(
        [{"x": each["x"].shape} for each in SIZES], progress=lambda done, of: steps.append((done, of))
    )
    children.report("shapes", [[list(each["x"]) for each in shapes.kept], shapes.most, shapes.why_none, steps])
    children.report("text", str(session.shapes))
    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, judged=7))
    session.warm(SIZES, runs=3)
    plans = runner._plans
    assert plans is not None
    places = [len(kept.places) for kept in map(plans.find, plans.kept()) if kept is not None]
    children.report("at a time", [runner._gains is None, len(plans.lanes), places])
    session, runner = shaped(parsed(NETWORK), dataclasses.replace(EAGER, slow=1e9))
    children.report("quick", [list(session.warm(SIZES).kept), runner._built is None])
    session = GPUSession(parsed(NETWORK))
    children.report("plain", [list(session.warm(SIZES).kept), str(session.shapes)])
    session, runner = shaped(parsed(NETWORK))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.warm([*SIZES, feed(3, 1, 8, 6)])
    children.report("too many", [str(each.message) for each in caught if each.category is PerformanceWarning])
    errors = []
    wrong: tuple[Any, ...] = (SIZES[0], [3], [{"z": (1,)}], [{"x": ("n",)}])
    for each in wrong:
        try:
            session.warm(each)
        except Exception as error:
            errors.append(type(error).__name__)
    children.report("errors", errors)
    session.trim()
    children.report(
        "trimmed",
        [str(session.shapes), session.memory.plans, equal(session.run(None, SIZES[0]), session.run(None, SIZES[0]))],
    )


def pools() -> None:
    """Report warm() of a pool: of sessions, and of processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(parsed(NETWORK))
        plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for name, isolate in (("sessions", False), ("processes", True)):
            steps: list[tuple[int, int]] = []
            errors = []
            with GPUSessionPool(str(path), isolate=isolate, allow_cpu=True) as pool:
                feeds = [{"x": each["x"].shape} for each in SIZES]
                pool.warm([*feeds, SIZES[0]], progress=lambda *done, to=steps: to.append(done))
                wrong: tuple[Any, ...] = (SIZES[0], [{"z": (1,)}], [{"x": np.zeros((1, 1), np.float32)}])
                for each in wrong:
                    try:
                        pool.warm(each)
                    except Exception as error:
                        errors.append(type(error).__name__)
                same = all(equal(pool.run(None, each), plain.run(None, each)) for each in SIZES)
            children.report(name, [steps, errors, same])


def closing() -> None:
    """Report what is left of plans after close(), also while they are made."""
    session, runner = shaped(parsed(NETWORK))
    settle(session, runner, SIZES)
    session.close()
    children.report("kept", [state(runner), threads()])
    begun, go_on = threading.Event(), threading.Event()

    def wait(plans: Any, branches: int) -> Any:
        begun.set()
        go_on.wait(30)
        return plans

    session, runner = shaped(parsed(NETWORK), change=wait)
    for each in SIZES * 3:
        session.run(None, each)
    begun.wait(30)
    threading.Timer(0.2, go_on.set).start()
    session.close()
    children.report("being made", [state(runner), threads()])
    begun.clear()
    session, runner = shaped(parsed(NETWORK), change=wait)
    for each in SIZES * 3:
        session.run(None, each)
    begun.wait(30)
    del session, runner  # dropped without close(): the program ends as ever


if __name__ == "__main__":
    warnings.simplefilter("ignore", CPUExecutionWarning)
    globals()[sys.argv[1]](*sys.argv[2:])
