"""Arrays of other libraries in a session on the CPU: taken without a copy, refused where they are elsewhere."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import pytest

from ortgpu.errors import ProviderRequestError
from ortgpu.running.device_arrays import _DLTensor, refuse_on_gpu
from tests.lab.installed import older_than
from tests.lab.stubs import Stubs
from tests.support.cpu_session import child


def with_arrays(program: str, *arguments: str, behind: str = "") -> Any:
    return child(program, *arguments, behind=f"running.device_arrays {behind}")


def test_run_and_map_take_them_beside_numpy_arrays() -> None:
    found = with_arrays("running.device_arrays.run_and_map_take_them_beside_numpy_arrays")
    assert found == [[10, 11, 12, 13], [{}], [[10, 10, 10, 10], [10, 11, 12, 13], [10, 12, 14, 16]]]


def test_no_element_of_such_an_array_is_looked_at() -> None:
    """ONNX Runtime reads whatever it does not know element by element: a quarter of a second for 1 MiB on the GPU."""
    found = with_arrays("running.device_arrays.no_element_of_such_an_array_is_looked_at")
    assert found == [[-1] * 4, 0]


def test_a_run_of_a_derived_class_is_called_once() -> None:
    found = with_arrays("running.device_arrays.a_run_of_a_derived_class_is_called_once")
    assert found == [[-1, -1], 1]


def test_map_converts_them_in_the_thread_that_iterates() -> None:
    """A library may know by thread which stream it works in."""
    found = with_arrays("running.device_arrays.map_converts_them_in_the_thread_that_iterates")
    assert found == [True, True, "ProviderRequestError"]


def test_nothing_is_copied_on_the_way_in() -> None:
    found = with_arrays("running.device_arrays.nothing_is_copied_on_the_way_in")
    assert found == [True, [-5] * 4, None]


def test_pinned_memory_and_booleans_of_another_library() -> None:
    """DLPack has a device type for pinned memory and, since 0.8, a type for booleans; ONNX Runtime has neither."""
    found = with_arrays("running.device_arrays.pinned_memory_and_booleans_of_another_library")
    assert found == [[False, True]] * 2


def test_an_array_that_begins_later_in_its_memory() -> None:
    """DLPack's byte_offset, which libraries use whose memory cannot be pointed into. ONNX Runtime does not look at it,
    and read what lies before."""
    found = with_arrays("running.device_arrays.an_array_that_begins_later_in_its_memory")
    assert found == [[-2, -3], [2, 3], True]


def test_an_array_that_is_refused_is_given_back_as_it_was() -> None:
    """ONNX Runtime has no complex numbers. Who made the tensor would free other memory than its own."""
    found = with_arrays("running.device_arrays.an_array_that_is_refused_is_given_back_as_it_was")
    assert isinstance(found[0], str)
    assert found[1] is True


@pytest.mark.parametrize(
    ("shape", "strides", "is_contiguous"),
    [
        ((2, 3, 4), None, True),
        ((2, 3, 4), (12, 4, 1), True),
        ((2, 3, 4), (12, 1, 3), False),
        ((2, 3, 4), (4, 8, 1), False),
        ((2, 3, 4), (24, 4, 1), False),
        ((2, 3, 4), (12, 4, 2), False),
        ((1, 3, 4), (7, 4, 1), True),
        ((2, 1, 4), (4, 9, 1), True),
        ((2, 0, 4), (1, 1, 1), True),
        ((), (), True),
    ],
)
def test_which_strides_are_those_of_a_contiguous_array(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, is_contiguous: bool
) -> None:
    """As numpy.ndarray.flags.c_contiguous: the stride of an axis of length 1 says nothing."""
    tensor = _DLTensor(ndim=len(shape), shape=(ctypes.c_int64 * len(shape))(*shape))
    if strides is not None:
        tensor.strides = (ctypes.c_int64 * len(strides))(*strides)
    assert tensor.is_contiguous() is is_contiguous


def test_an_array_that_is_not_contiguous() -> None:
    found = with_arrays("running.device_arrays.an_array_that_is_not_contiguous")
    assert found[:3] == [[True] * 6, True, True]
    assert found[3]["type"] == "ProviderRequestError"
    assert "input 'x' is a Foreign that is not contiguous" in found[3]["text"]
    assert "x.contiguous()" in found[3]["text"]


def test_an_array_elsewhere_is_refused() -> None:
    found = with_arrays("running.device_arrays.an_array_elsewhere_is_refused")
    assert [each["type"] for each in found] == ["ProviderRequestError"] * 3
    assert "input 'x' is on cuda:1, and the session on cpu" in found[0]["text"]
    assert "a device of DLPack's type 10" in found[2]["text"]


@pytest.mark.parametrize("use", ["run(None, feed)", "run_on_device(None, feed)", "map([feed]).__next__()"])
def test_work_on_an_array_that_failed_is_told_as_a_run_tells_it(stubs: Stubs, use: str) -> None:
    """The wait for a kernel of another library is where its illegal memory access comes out."""
    found = with_arrays(
        f"""
        feed = {{"x": array}}
        os.environ["STUB_CUDART_FAIL"] = "cudaStreamQuery=700"
        failed = outcome(lambda: session.{use})
        del os.environ["STUB_CUDART_FAIL"]
        report([failed, outcome(lambda: session.run(None, feeds(1)[0]))["type"]])
        """,
        str(stubs.cudart),
        behind="running.arrays_on_a_gpu",
    )
    assert [found[0]["type"], found[1]] == ["PoisonedContextError"] * 2
    assert "CUDA failure 700" in found[0]["text"]


def test_waiting_for_an_array_leaves_the_threads_device_as_it_was(stubs: Stubs) -> None:
    """As the thread that iterates over ``map``: what it allocates next belongs where it was."""
    found = with_arrays(
        "running.arrays_on_a_gpu.waiting_for_an_array_leaves_the_threads_device_as_it_was",
        str(stubs.cudart),
    )
    assert found == [1, 0]


def test_an_array_on_another_gpu_is_refused(stubs: Stubs) -> None:
    """Its address would be read on the session's GPU."""
    found = with_arrays(
        """
        other = Foreign(array.array, (2, 1))
        feeds = ({"x": other}, {"x": array})
        report([outcome(lambda: list(device_arrays.wrap_arrays(session, each))) for each in feeds])
        """,
        str(stubs.cudart),
        behind="running.arrays_on_a_gpu",
    )
    assert found[0]["type"] == "ProviderRequestError"
    assert "input 'x' is on cuda:1, and the session on cuda:0" in found[0]["text"]
    assert found[1] == {"returned": ["x"]}


@pytest.mark.parametrize(("device_type", "is_on_gpu"), [(1, False), (2, True), (3, False), (10, True), (13, True)])
def test_a_pool_refuses_arrays_on_a_gpu_and_takes_pinned_memory(device_type: int, is_on_gpu: bool) -> None:
    """The numbers are DLPack's: the CPU, CUDA, pinned memory, ROCm, managed memory."""

    class Array:
        def __dlpack_device__(self) -> tuple[int, int]:
            return device_type, 0

        def __dlpack__(self) -> object:
            raise AssertionError("the array is only asked where it is")

    feed = {"plain": [1.0], "x": Array()}
    if not is_on_gpu:
        return refuse_on_gpu(feed)
    with pytest.raises(ProviderRequestError, match="input 'x' is on a GPU, and a pool chooses the GPU itself"):
        refuse_on_gpu(feed)
    return None


def test_what_is_wrong_with_a_feed_stays_onnx_runtimes_own() -> None:
    found = with_arrays("running.device_arrays.what_is_wrong_with_a_feed_stays_onnx_runtimes_own")
    assert [each["type"] for each in found] == ["InvalidArgument", "InvalidArgument", "ValueError", "RuntimeError"]


def test_a_closed_session_says_so() -> None:
    found = with_arrays("running.device_arrays.a_closed_session_says_so")
    assert [found[0]["type"], found[2]["type"]] == ["ExecutionError"] * 2
    assert found[1] == []


def test_results_stay_on_the_device_of_the_session() -> None:
    found = with_arrays("running.device_arrays.results_stay_on_the_device_of_the_session")
    shared = older_than((1, 26)) is None  # since then its values have __dlpack__
    assert found == [[[-1, 2], [1, 2], [2, 1], -1], "cpu", shared, "RuntimeError"]


def test_an_output_that_is_named_twice_is_there_twice() -> None:
    found = child("running.device_arrays.an_output_that_is_named_twice_is_there_twice")
    assert found == [[[3], [-3], [3]]] * 2


def test_numbers_in_no_array_are_of_the_type_that_the_model_declares() -> None:
    found = with_arrays("running.device_arrays.numbers_in_no_array_are_of_the_type_that_the_model_declares")
    assert found[0] == found[1] == [[-1, -2], [-3, -4], []]
    assert found[2] == "RuntimeError"


def test_inputs_that_are_missing_are_named_as_run_names_them() -> None:
    """None is one of them, and no number: as an array of numbers it is NaN."""
    found = with_arrays("running.device_arrays.inputs_that_are_missing_are_named_as_run_names_them")
    *given, none = found
    assert all(by_run == kept and by_run["type"] == "ValueError" for by_run, kept in given)
    assert none["type"] == "ValueError"
    assert "Required inputs (['w']) are missing" in none["text"]


def test_an_optional_input_may_be_none() -> None:
    found = child("running.device_arrays.an_optional_input_may_be_none")
    assert found == [[False, False]] * 2


def test_an_input_with_a_value_of_its_own_may_be_given_another() -> None:
    """An initialiser that is an input too, as models have them that were exported with them as inputs."""
    found = with_arrays("running.device_arrays.an_input_with_a_value_of_its_own_may_be_given_another")
    kept, by_run, wrong = found
    assert kept == [[5, 5]] + [[7, 7]] * 4
    assert by_run == kept[:4]
    assert wrong == ["RuntimeError"] * 2


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is in no extra, and not installed here")
def test_tensors_of_pytorch() -> None:
    found = child(
        "running.device_arrays.tensors_of_pytorch",
        deadline=110,
    )
    assert found[:4] == [[-1, 2], [-1, 2], [False, True], [1, -2]]
    assert "type" in found[4]
