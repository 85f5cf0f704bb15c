"""Models whose weights ONNX Runtime takes from memory: the same numbers, and nothing that refers to the file after."""

from __future__ import annotations

import mmap
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
from ortgpu.weights import weights_in_memory
from tests.networks import random_network

SIDE = 1536  # of a matrix of 9 MiB
FEED = np.linspace(-1, 1, SIDE, dtype=np.float32)[None]

pytestmark = pytest.mark.skipif(load_runtime().release < (1, 31), reason="weights are given so from 1.31 on")


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


def on_the_cpu(model: Any, options: Any = None) -> Any:
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def opened(model: Any) -> Any:
    with weights_in_memory(model) as found:
        assert found is not None
        return on_the_cpu(*found)


@pytest.mark.parametrize("given_as", ["path", "bytes"])
def test_results_are_the_same_bit_for_bit(tmp_path: Path, given_as: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    model = path.read_bytes() if given_as == "bytes" else path
    with weights_in_memory(model) as found:
        assert found is not None
        assert len(found[0]) < 2048
    [right], [result] = on_the_cpu(str(path)).run(None, {"x": FEED}), opened(model).run(None, {"x": FEED})
    assert np.array_equal(result, right)


def test_nothing_refers_to_the_file_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(large_model(), path)
    session = opened(path)
    [right] = session.run(None, {"x": FEED})
    assert path.name not in Path("/proc/self/maps").read_text()
    path.write_bytes(bytes(path.stat().st_size))  # in place, where a mapping would see it
    assert np.array_equal(session.run(None, {"x": FEED})[0], right)


def test_options_of_the_session_are_fit_for_a_model_with_external_data(tmp_path: Path) -> None:
    """ONNX Runtime refuses external data that options with files in memory do not have."""
    onnx.save(large_model(), tmp_path / "model.onnx")
    onnx.save(large_model(), tmp_path / "external.onnx", save_as_external_data=True, location="weights")
    options = opened(tmp_path / "model.onnx").get_session_options()
    assert on_the_cpu(str(tmp_path / "external.onnx"), options).run(None, {"x": FEED})[0].any()


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


UNFIT: dict[str, Callable[[Path], object]] = {
    "external data": _external,
    "some external data": _partly_external,
    "typed values": _typed,
    "ONNX Runtime's own format": _own_format,
    "small": lambda path: path.write_bytes(random_network(0)),
    "no model": lambda path: path.write_bytes(b"\xff" * (9 << 20)),
    "zeros": lambda path: path.write_bytes(bytes(9 << 20)),
    "a model that ends early": lambda path: path.write_bytes(large_model().SerializeToString()[:-4]),
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
        with weights_in_memory(model) as found:
            assert found is None


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


def test_a_shape_that_its_values_do_not_fill_is_refused_as_before(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(too_short_for_its_shape())
    for attempt, given_as in ((opened, path), (on_the_cpu, str(path))):
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
            attempt(given_as)


@pytest.mark.parametrize("number", range(8))
def test_networks_of_all_kinds_compute_the_same(number: int) -> None:
    data = random_network(number)
    structure = with_values_elsewhere(data, "here", 512)
    assert structure is not None
    options = onnxruntime.SessionOptions()
    options.add_external_initializers_from_files_in_memory(["here"], [data], [len(data)])
    session, plain = on_the_cpu(structure, options), on_the_cpu(data)
    random = np.random.default_rng(number)
    shapes = {each.name: [n if isinstance(n, int) else 2 for n in each.shape] for each in plain.get_inputs()}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    assert all(map(np.array_equal, session.run(None, feeds), plain.run(None, feeds)))


@given(st.binary(max_size=300), st.data())
def test_what_is_no_model_is_refused_and_never_half_read(noise: bytes, data: Any) -> None:
    """Also of a model with a piece exchanged: what is made of it is a model that onnx reads as it read the other."""
    whole = random_network(1)
    at = data.draw(st.integers(0, len(whole)))
    changed = whole[:at] + noise + whole[at + len(noise) :]
    for content in (noise, changed):
        try:
            structure = with_values_elsewhere(content, "here", 512)
        except (ValueError, IndexError):
            continue
        if structure is not None:
            try:
                before = onnx.load_from_string(content)
            except Exception:  # noqa: BLE001 - as the whole is none, ONNX Runtime refuses both
                continue
            after = onnx.load_from_string(structure)
            assert after.graph.node == before.graph.node
            for there, here in zip(after.graph.initializer, before.graph.initializer, strict=True):
                assert (there.name, there.dims, there.data_type) == (here.name, here.dims, here.data_type)
                if there.data_location == TensorProto.EXTERNAL and here.data_location != TensorProto.EXTERNAL:
                    entries = {entry.key: entry.value for entry in there.external_data}
                    start, size = int(entries["offset"]), int(entries["length"])
                    assert content[start : start + size] == here.raw_data


def test_it_reads_what_is_mapped_as_well_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(random_network(2))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert with_values_elsewhere(content, "here", 512) == with_values_elsewhere(path.read_bytes(), "here", 512)
