"""Models whose weights ONNX Runtime takes from where they are: the same numbers, whatever becomes of the file."""

from __future__ import annotations

import gc
import mmap
import os
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

from ortgpu.model_structure import with_values_elsewhere
from ortgpu.runtime import load_runtime
from ortgpu.weights import _RELEASES, Weights, _with_values, weights_in_place
from tests.cpu_session import child
from tests.networks import random_network

SIDE = 1536  # of a matrix of 9 MiB
FEED = np.linspace(-1, 1, SIDE, dtype=np.float32)[None]

pytestmark = pytest.mark.skipif(load_runtime().release not in _RELEASES, reason="only 1.31 is given weights so")


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
    weights = weights_in_place(model)
    assert weights is not None
    return weights


def opened(model: Any) -> Any:
    weights = found_in(model)
    return on_the_cpu(weights.structure, weights.options)


def is_mapped(path: Path) -> bool:
    gc.collect()
    return path.name in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("given_as", ["path", "bytes"])
def test_results_are_the_same_bit_for_bit(tmp_path: Path, given_as: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    model = path.read_bytes() if given_as == "bytes" else path
    assert len(found_in(model).structure) < 2048
    [right], [result] = on_the_cpu(str(path)).run(None, {"x": FEED}), opened(model).run(None, {"x": FEED})
    assert np.array_equal(result, right)


def test_the_mapping_ends_with_what_holds_the_session(tmp_path: Path) -> None:
    path = tmp_path / "a-model-of-this-test.onnx"
    onnx.save(large_model(), path)
    files = len(os.listdir("/proc/self/fd"))
    session = opened(path)
    binding = session.io_binding()
    assert is_mapped(path)
    del session
    assert is_mapped(path)
    del binding
    assert not is_mapped(path)
    assert len(os.listdir("/proc/self/fd")) == files


def test_bytes_live_as_long_as_the_session() -> None:
    session = opened(large_model().SerializeToString())
    gc.collect()
    [right] = session.run(None, {"x": FEED})
    noise = [bytes([n]) * (10 << 20) for n in range(8)]  # in the memory that would be free
    assert np.array_equal(session.run(None, {"x": FEED})[0], right)
    del noise


def test_one_that_does_not_open_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "another-model-of-this-test.onnx"
    model = large_model()
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, path)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph):
        opened(path)
    assert not is_mapped(path)


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


@pytest.mark.parametrize("setting", ["", *SETTINGS])
@pytest.mark.parametrize("way", ["changed", "cut short"])
def test_nothing_is_read_of_the_file_when_the_session_is_made(tmp_path: Path, way: str, setting: str) -> None:
    """In a child: where something is read that was cut off, the system ends the process. With settings that nobody
    can have made, since these would go the other way: so that it is not by chance."""
    code = f"""
import onnxruntime
from ortgpu.weights import weights_in_place
found = []
for path, feed in (({str(tmp_path / "products")!r}, {{"x": np.linspace(-1, 1, {SIDE}, dtype=np.float32)[None]}}),
                   ({str(tmp_path / "gathered")!r}, {{"i": np.array([7, -1])}})):
    weights = weights_in_place(path)
    name, _, value = {setting!r}.partition("=")
    if value:
        setattr(weights.options, name, eval(value))
    elif name:
        weights.options.add_session_config_entry(name, "1")
    session = onnxruntime.InferenceSession(weights.structure, weights.options, providers=["CPUExecutionProvider"])
    [right] = session.run(None, feed)
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.write(bytes(size)) if {way!r} == "changed" else file.truncate(100)
    found.append(bool(right.any() and np.array_equal(session.run(None, feed)[0], right)))
report(found)
"""
    onnx.save(large_model(), tmp_path / "products")
    (tmp_path / "gathered").write_bytes(gathering(np.arange(1, 3 << 20, dtype=np.float32)))
    assert child(code) == [True, True]


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
    "no model": lambda path: path.write_bytes(b"\xff" * (9 << 20)),
    "zeros": lambda path: path.write_bytes(bytes(9 << 20)),
    "a model that ends early": lambda path: path.write_bytes(large_model().SerializeToString()[:-4]),
    "values that do not fill their shape": lambda path: path.write_bytes(too_short_for_its_shape()),
    "a weight that is an output": lambda path: path.write_bytes(with_output("n")),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("kind", UNFIT)
def test_others_are_left_to_onnxruntime(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.onnx"
    UNFIT[kind](path)
    models: list[Any] = [path, str(path)]
    if path.is_file() and path.stat().st_size > 8 << 20:
        models.append(path.read_bytes())
    for model in models:
        assert weights_in_place(model) is None


def test_a_file_that_is_cut_short_meanwhile_ends_no_process(tmp_path: Path) -> None:
    """Nor does a disk that fails: the system tells of both as soon as the pages are asked for."""
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    found = child(f"""
from ortgpu import weights
class CutShort(weights.mmap.mmap):
    def __new__(cls, *given, **named):
        content = super().__new__(cls, *given, **named)
        os.truncate({str(path)!r}, 100)
        return content
weights.mmap.mmap = CutShort
report(weights.weights_in_place({str(path)!r}))
""")
    assert found is None


def test_other_threads_go_on_while_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 29)
    ticks = child(f"""
from ortgpu.weights import _content
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
    found = with_values_elsewhere(data, 512, [TensorProto.FLOAT])
    assert found is not None
    weights = _with_values(data, *found)
    session, plain = on_the_cpu(weights.structure, weights.options), on_the_cpu(data)
    random = np.random.default_rng(number)
    shapes = {each.name: [n if isinstance(n, int) else 2 for n in each.shape] for each in plain.get_inputs()}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    assert all(map(np.array_equal, session.run(None, feeds), plain.run(None, feeds)))


KINDS = [
    np.float32, np.float64, np.float16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_all_types(kind: type) -> None:
    values: Any = np.arange(9 << 20, dtype=np.uint8).view(kind)
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
            found = with_values_elsewhere(content, 512, [TensorProto.FLOAT])
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


def test_it_reads_what_is_mapped_as_well_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(random_network(2))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        of_mapping, of_bytes = (with_values_elsewhere(each, 512, [1]) for each in (content, path.read_bytes()))
        assert of_mapping == of_bytes is not None
