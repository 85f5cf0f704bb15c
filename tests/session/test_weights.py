"""Models whose weights ONNX Runtime takes from memory: the same numbers, whatever becomes of the file meanwhile."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortgpu.model.outline import GraphOutline, with_values_elsewhere
from ortgpu.provider.runtime import load_runtime
from ortgpu.session.weights import _FIRST, Weights, weights_in_place
from tests.lab.fixtures import Lab
from tests.support.cpu_session import child
from tests.support.networks import random_network

SIDE = 2944  # of a matrix of 33 MiB, of which a model has two
FEED = np.linspace(-1, 1, SIDE, dtype=np.float32)[None]

pytestmark = pytest.mark.skipif(load_runtime().release < _FIRST, reason="of ONNX Runtime 1.31 and newer")


def matrix(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32)


def large_model(*initializers: Any) -> Any:
    """Two products, by matrices m and n, which are initializers unless others are given."""
    initializers = initializers or (numpy_helper.from_array(matrix(0), "m"), numpy_helper.from_array(matrix(1), "n"))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "m"], ["h"]), helper.make_node("MatMul", ["h", "n"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", SIDE])],
        list(initializers),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def too_short_for_its_shape() -> bytes:
    wrong, right = (numpy_helper.from_array(matrix(), name) for name in "mn")
    wrong.dims[0] += 1
    data: bytes = large_model(wrong, right).SerializeToString()
    return data


def with_output(name: str) -> bytes:
    model = large_model()
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIDE, SIDE]))
    data: bytes = model.SerializeToString()
    return data


def on_the_cpu(model: Any, options: Any = None) -> Any:
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def found_in(model: Any) -> Weights:
    weights = weights_in_place(GraphOutline(model))
    assert weights is not None
    return weights


def opened(model: Any) -> Any:
    weights = found_in(model)
    return on_the_cpu(weights.structure, weights.options())


@pytest.mark.parametrize("given_as", ["path", "bytes"])
def test_results_are_the_same_bit_for_bit(tmp_path: Path, given_as: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    model = path.read_bytes() if given_as == "bytes" else path
    assert len(found_in(model).structure) < 2048
    [right], [result] = on_the_cpu(str(path)).run(None, {"x": FEED}), opened(model).run(None, {"x": FEED})
    assert np.array_equal(result, right)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_memory_is_given_back_and_ends_with_what_holds_the_session(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    files = len(os.listdir("/proc/self/fd"))
    weights = found_in(path)
    session = on_the_cpu(weights.structure, weights.options())
    before = resident_bytes()
    weights.give_back()
    assert before - resident_bytes() > 0.9 * path.stat().st_size
    memory = weakref.ref(weights._memory)
    binding = session.io_binding()
    del session, weights
    gc.collect()
    assert memory() is not None
    del binding
    gc.collect()
    assert memory() is None
    assert len(os.listdir("/proc/self/fd")) == files


def test_bytes_live_as_long_as_the_session() -> None:
    session = opened(large_model().SerializeToString())
    gc.collect()
    [right] = session.run(None, {"x": FEED})
    noise = [bytes([n]) * (36 << 20) for n in range(4)]  # in the memory that would be free
    assert np.array_equal(session.run(None, {"x": FEED})[0], right)
    del noise


def test_one_that_does_not_open_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = large_model()
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, path)
    weights = found_in(path)
    memory = weakref.ref(weights._memory)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph):
        on_the_cpu(weights.structure, weights.options())
    del weights
    gc.collect()
    assert memory() is None


def gathering(values: Any) -> bytes:
    """Elements 7 and -1 of a large weight."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "i"], ["y"])],
        "gathered",
        [helper.make_tensor_value_info("i", TensorProto.INT64, [2])],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(values.dtype), [2])],
        [numpy_helper.from_array(values, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


SETTINGS = ["enable_mem_pattern=False", "enable_cpu_mem_arena=False", "execution_mode=onnxruntime.ExecutionMode(1)",
            "enable_mem_reuse=False", "graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL",
            "session.disable_prepacking"]  # fmt: skip


@pytest.mark.lab
@pytest.mark.parametrize("way", ["overwritten", "given back"])
def test_nothing_is_read_of_the_memory_when_the_session_is_made(tmp_path: Path, way: str) -> None:
    """With settings that nobody can have made, since these would go the other way: so that it is not by chance."""
    code = f"""
import onnxruntime
from ortgpu.model.outline import GraphOutline
from ortgpu.session.weights import weights_in_place
FEEDS = (({str(tmp_path / "products")!r}, {{"x": np.linspace(-1, 1, {SIDE}, dtype=np.float32)[None]}}),
         ({str(tmp_path / "gathered")!r}, {{"i": np.array([7, -1])}}))
found = {{}}
for setting, path, feed in ((setting, *each) for setting in {["", *SETTINGS]!r} for each in FEEDS):
    weights = weights_in_place(GraphOutline(path))
    options = weights.options()
    name, _, value = setting.partition("=")
    if value:
        setattr(options, name, eval(value))
    elif name:
        options.add_session_config_entry(name, "1")
    session = onnxruntime.InferenceSession(weights.structure, options, providers=["CPUExecutionProvider"])
    [right] = session.run(None, feed)
    size = os.path.getsize(path)
    if {way!r} == "overwritten":
        weights._memory[:] = b"\\xff" * size
    else:
        weights.give_back()
        assert weights._memory[size // 2 :].count(0) == size - size // 2
    found.setdefault(setting, []).append(bool(right.any() and np.array_equal(session.run(None, feed)[0], right)))
report(found)
"""
    onnx.save(large_model(), tmp_path / "products")
    (tmp_path / "gathered").write_bytes(gathering(np.arange(1, 17 << 20, dtype=np.float32)))
    assert child(code) == {setting: [True, True] for setting in ("", *SETTINGS)}


def test_options_of_the_session_are_fit_for_other_models(tmp_path: Path) -> None:
    """ONNX Runtime refuses options with initializers that a model does not have."""
    onnx.save(large_model(), tmp_path / "model.onnx")
    onnx.save(large_model(), tmp_path / "external.onnx", save_as_external_data=True, location="weights")
    options = opened(tmp_path / "model.onnx").get_session_options()
    assert on_the_cpu(str(tmp_path / "external.onnx"), options).run(None, {"x": FEED})[0].any()
    assert on_the_cpu(random_network(0), options).get_inputs()


def _external(path: Path) -> None:
    onnx.save(large_model(), path, save_as_external_data=True, location="weights", size_threshold=0)


def _partly_external(path: Path) -> None:
    _external(path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(matrix(), "m"))
    path.write_bytes(model.SerializeToString())


def _typed(path: Path) -> None:
    """Not in one piece: numbers of protobuf."""
    values = [TensorProto(name=name, data_type=1, dims=[SIDE, SIDE], float_data=matrix().ravel()) for name in "mn"]
    onnx.save(large_model(*values), path)


def _own_format(path: Path) -> None:
    onnx.save(large_model(), path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    on_the_cpu(path.read_bytes(), options)


def _mostly_typed(path: Path) -> None:
    values = TensorProto(name="m", data_type=1, dims=[SIDE, SIDE], float_data=matrix().ravel())
    small = numpy_helper.from_array(matrix()[:, :100], "n")
    model = large_model(values, small)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 100
    onnx.save(model, path)


def _twice(path: Path) -> None:
    onnx.save(large_model(*(numpy_helper.from_array(matrix(), name) for name in "mnm")), path)


UNFIT: dict[str, Callable[[Path], object]] = {
    "external data": _external,
    "some external data": _partly_external,
    "typed values": _typed,
    "typed values for the most part": _mostly_typed,
    "two weights of the same name": _twice,
    "ONNX Runtime's own format": _own_format,
    "small": lambda path: path.write_bytes(random_network(0)),
    "no model": lambda path: path.write_bytes(b"\xff" * (66 << 20)),
    "zeros": lambda path: path.write_bytes(bytes(66 << 20)),
    "a model that ends early": lambda path: path.write_bytes(large_model().SerializeToString()[:-4]),
    "values that do not fill their shape": lambda path: path.write_bytes(too_short_for_its_shape()),
    "a weight that is an output": lambda path: path.write_bytes(with_output("n")),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
}


@pytest.mark.lab
@pytest.mark.parametrize("kind", UNFIT)
def test_others_are_left_to_onnxruntime(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.onnx"
    UNFIT[kind](path)
    models: list[Any] = [path, str(path)]
    if path.is_file() and path.stat().st_size > 8 << 20:
        models.append(path.read_bytes())
    for model in models:
        assert weights_in_place(GraphOutline(model)) is None


CHANGES = {
    "cut short before it is read": "before: os.truncate(path, 100)",
    "cut short when it was read": "after: os.truncate(path, 100)",
    "written over before it is read": "before: open(path, 'r+b').write(bytes(100))",
    "written over when it was read": "after: open(path, 'r+b').write(bytes(100))",
    "longer": "after: open(path, 'ab').write(bytes(1))",
}


@pytest.mark.lab
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, change: str) -> None:
    """As ONNX Runtime refuses what it finds of such a file, with its own exception."""
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    when, action = CHANGES[change].split(": ")
    found = child(f"""
from ortgpu.model.outline import GraphOutline
from ortgpu.session import weights
path, plain = {str(path)!r}, weights._read_all
def changing(*given):
    if {when!r} == "before":
        {action}
    found = plain(*given)
    if {when!r} == "after":
        {action}
    return found
weights._read_all = changing
report([outcome(lambda: weights.weights_in_place(GraphOutline(path))), threads()])
""")
    assert found[0]["type"] == "InvalidProtobuf"
    assert found[0]["text"].startswith(f"Load model from {path} failed: the file changed while it was read.")
    assert found[1] == []


def test_a_file_that_is_replaced_meanwhile_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    (tmp_path / "new").write_bytes(b"another")
    found = child(f"""
from ortgpu.model.outline import GraphOutline
from ortgpu.session import weights
plain = weights._read_all
def replacing(*given):
    os.replace({str(tmp_path / "new")!r}, {str(path)!r})
    return plain(*given)
weights._read_all = replacing
report(weights.weights_in_place(GraphOutline({str(path)!r})) is not None)
""")
    assert found


OPEN_AND_REWRITE = """
import os, shutil, sys, time, warnings
import onnxruntime
from ortgpu import GPUSession
warnings.simplefilter("ignore")
onnxruntime.set_default_logger_severity(4)
path, openings = sys.argv[1], int(sys.argv[2])
GPUSession(path)
raised = {}
writer = os.fork()
if not writer:
    while os.getppid() != 1:
        shutil.copyfile(path + ".new", path)
        time.sleep(0.01)
    os._exit(0)
try:
    opened = 0
    for number in range(openings):
        options = onnxruntime.SessionOptions() if number % 4 == 3 else None
        try:
            GPUSession(path, options)
            opened += 1
        except Exception as error:
            raised[type(error).__name__] = raised.get(type(error).__name__, 0) + 1
finally:
    os.kill(writer, 9)
    os.waitpid(writer, 0)
report([opened, raised])
"""


@pytest.mark.lab
def test_no_weights_are_read_out_of_the_middle_of_a_write(tmp_path: Path) -> None:
    """The time of a file is set when a write begins, which may go on until after the file was read.

    Nothing tells of a writer that stands still in the middle, as on a machine with too much to do. What was read
    during a write that took longer than is assumed does not count.
    """
    path = tmp_path / "m.onnx"
    path.write_bytes(bytes(66 << 20))
    found = child(
        """
        from onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf
        from ortgpu.session.weights import _content
        path, contents = sys.argv[1], [bytes([number]) * (66 << 20) for number in (1, 2)]
        end, start = os.pipe()
        if not (writer := os.fork()):
            file, ended = os.open(path, os.O_WRONLY), time.monotonic() + 7
            for number in itertools.count():
                begun = time.monotonic()
                if begun > ended:
                    os._exit(0)
                os.pwrite(file, contents[number % 2], 0)
                if time.monotonic() - begun > 0.019:
                    os.write(start, f"{begun} {time.monotonic()}\\n".encode())
                time.sleep(0.004 * (number % 16) if number % 16 != 15 else 0.6)  # a slow machine reads in no other gap
        os.close(start)
        seen, mixed, ended = {"whole": 0, "refused": 0}, [], time.monotonic() + 6
        while time.monotonic() < ended:
            begun = time.monotonic()
            try:
                content = np.frombuffer(_content(path), np.uint8)
                if content.min() == content.max():
                    seen["whole"] += 1
                else:
                    mixed.append((begun, time.monotonic()))
            except InvalidProtobuf:
                seen["refused"] += 1
        with open(end) as slow_writes:
            slow = [tuple(map(float, line.split())) for line in slow_writes]
        os.wait()
        mixed = [read for read in mixed if not any(read[0] < last and first < read[1] for first, last in slow)]
        report([seen["whole"] > 0, len(mixed), seen["refused"] > 0])
        """,
        str(path),
    )
    assert found == [True, 0, True]


@pytest.mark.parametrize("openings", [30, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_sessions_open_while_the_file_is_written(
    lab: Lab, provider_library: str, tmp_path: Path, openings: int
) -> None:
    """What a session raises is ONNX Runtime's, and nothing ends the process."""
    for name in ("model.onnx", "model.onnx.new"):
        onnx.save(large_model(), tmp_path / name)
    machine = lab.machine_that_places(provider_library)
    arguments = [str(tmp_path / "model.onnx"), str(openings)]
    opened, raised = machine.run(OPEN_AND_REWRITE, argv=arguments, timeout=1700).ok().json
    assert opened + sum(raised.values()) == openings
    assert raised.keys() <= {"InvalidProtobuf", "InvalidGraph", "Fail", "InvalidArgument"}, raised


MAPPINGS = """
import pickle, sys
mapped = []
def watch(event, given):
    if event == "mmap.__new__" and given[0] != -1:
        mapped.append([os.readlink(f"/proc/self/fd/{given[0]}"), *given])
import os
sys.addaudithook(watch)
import onnxruntime
import ortgpu
from ortgpu import GPUSession
path = sys.argv[1]
GPUSession(path)
pickle.dumps(GPUSession(path, onnxruntime.SessionOptions(), [("CUDAExecutionProvider", {"use_tf32": "0"})]))
ortgpu.diagnose(path)
report(mapped)
"""


def test_no_file_is_mapped(lab: Lab, provider_library: str, tmp_path: Path) -> None:
    """Nor are libraries, to be looked at: a writer that cuts one short would end the process as well."""
    onnx.save(large_model(), tmp_path / "model.onnx")
    machine = lab.machine_that_places(provider_library)
    assert machine.run(MAPPINGS, argv=[str(tmp_path / "model.onnx")]).ok().json == []


@pytest.mark.lab
def test_other_threads_go_on_while_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 29)
    os.utime(path, (0, 0))  # nobody may be writing it: that would be waited for
    ticks = child(f"""
from ortgpu.session.weights import _content
ticks = []
def tick():
    while not ticks or ticks[-1]:
        time.sleep(0.001)
        ticks.append(time.perf_counter())
threading.Thread(target=tick, daemon=True).start()
begin = time.perf_counter()
_content({str(path)!r})
end = time.perf_counter()
report(sum(begin < moment < end for moment in ticks))
""")
    assert ticks > 10


@pytest.mark.parametrize("branch", ["then_branch", "else_branch"])
def test_weights_that_only_a_branch_takes(branch: str) -> None:
    def taking(weight: str) -> Any:
        node = helper.make_node("MatMul", ["y", weight], ["z"])
        return helper.make_graph([node], weight, [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)])

    branches = {"then_branch": taking("n"), "else_branch": taking("n"), branch: taking("inside")}
    names = ("m", "n", "inside")
    model = large_model(*(numpy_helper.from_array(matrix(seed), name) for seed, name in enumerate(names)))
    model.graph.node.append(helper.make_node("If", ["c"], ["both"], **branches))
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    model.graph.output.append(helper.make_tensor_value_info("both", TensorProto.FLOAT, None))
    data = model.SerializeToString()
    assert len(found_in(data).structure) < 4096
    for condition in (False, True):
        feeds = {"x": FEED, "c": np.array(condition)}
        assert all(map(np.array_equal, opened(data).run(None, feeds), on_the_cpu(data).run(None, feeds)))


def test_weights_that_a_caller_may_override_stay_so(tmp_path: Path) -> None:
    """Those that are inputs as well."""
    model = large_model()
    for name in "mn":
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIDE, SIDE]))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    session, plain = opened(path), on_the_cpu(str(path))
    assert [each.name for each in session.get_overridable_initializers()] == ["m", "n"]
    feeds = {"x": FEED, "m": matrix(7)}
    assert np.array_equal(session.run(None, feeds)[0], plain.run(None, feeds)[0])


@pytest.mark.parametrize("number", range(8))
def test_networks_of_all_kinds_compute_the_same(number: int) -> None:
    data = random_network(number)
    found = with_values_elsewhere(data, GraphOutline(data), 512, [TensorProto.FLOAT])
    assert found is not None
    weights = Weights(*found, data)
    session, plain = on_the_cpu(weights.structure, weights.options()), on_the_cpu(data)
    random = np.random.default_rng(number)
    shapes = {each.name: [n if isinstance(n, int) else 2 for n in each.shape] for each in plain.get_inputs()}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    assert all(map(np.array_equal, session.run(None, feeds), plain.run(None, feeds)))


KINDS = [
    np.float32, np.float64, np.float16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_all_types(kind: type) -> None:
    values: Any = np.arange(66 << 20, dtype=np.uint8).view(kind)
    [result] = opened(gathering(values)).run(None, {"i": np.array([7, -1])})
    assert result.tobytes() == values[[7, -1]].tobytes()


@given(st.binary(max_size=300), st.data())
def test_what_is_no_model_is_refused_and_never_half_read(noise: bytes, data: Any) -> None:
    """Also of a model with a piece exchanged: what is made of it is a model that onnx reads as it read the other."""
    whole = random_network(1)
    at = data.draw(st.integers(0, len(whole)))
    changed = whole[:at] + noise + whole[at + len(noise) :]
    for content in (noise, changed):
        try:
            found = with_values_elsewhere(content, GraphOutline(content), 512, [TensorProto.FLOAT])
        except (ValueError, IndexError):
            continue
        if found is not None:
            try:
                before = onnx.load_from_string(content)
            except Exception:  # noqa: BLE001 - as the whole is none, ONNX Runtime refuses both
                continue
            structure, moved = found
            after = onnx.load_from_string(structure)
            assert after.graph.node == before.graph.node
            values_of: Any = {tensor.name.decode(): tensor.values for tensor in moved}
            for there, here in zip(after.graph.initializer, before.graph.initializer, strict=True):
                assert (there.name, there.dims, there.data_type) == (here.name, here.dims, here.data_type)
                if there.data_location == TensorProto.EXTERNAL:
                    start, end = values_of[there.name]
                    assert content[start:end] == here.raw_data


def test_it_reads_memory_as_well_as_bytes() -> None:
    data = random_network(2)
    content = mmap.mmap(-1, len(data))
    content[:] = data
    outline = GraphOutline("memory")
    outline.read(content)
    of_memory = with_values_elsewhere(content, outline, 512, [1])
    of_bytes = with_values_elsewhere(data, GraphOutline(data), 512, [1])
    assert of_memory == of_bytes is not None
