"""Programs of ``tests/running/test_device_arrays.py``."""

from __future__ import annotations

import threading

import numpy as np

from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, model, outcome, report


class Foreign:
    # An array of a library that ONNX Runtime does not know
    def __init__(self, array, device=(1, 0)):
        self.array, self.device, self.asked = array, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        return self.array.__dlpack__()


def run_and_map_take_them_beside_numpy_arrays() -> None:
    add = GPUSession(model("add (float[n] x, float[n] w) => (float[n] y) { y = Add(x, w) }"))
    one, two = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)
    array = Foreign(one)
    report(
        [
            add.run(None, {"x": array, "w": two})[0].tolist(),
            array.asked,
            [result[0].tolist() for result in add.map([{"x": two, "w": Foreign(one * n)} for n in range(3)])],
        ]
    )


def no_element_of_such_an_array_is_looked_at() -> None:
    class Counted(Foreign):
        touched = 0

        def __len__(self):
            Counted.touched += 1
            return len(self.array)

        def __getitem__(self, key):
            Counted.touched += 1
            return self.array[key]

        def __array__(self, *_, **__):
            Counted.touched += 1
            return self.array

    session = GPUSession(NEG)
    report([session.run(None, {"x": Counted(np.ones(4, np.float32))})[0].tolist(), Counted.touched])


def a_run_of_a_derived_class_is_called_once() -> None:
    class Counting(GPUSession):
        runs = 0

        def run(self, feed):
            self.runs += 1
            return super().run(None, feed)

    session = Counting(NEG)
    report([session.run({"x": Foreign(np.ones(2, np.float32))})[0].tolist(), session.runs])


def map_converts_them_in_the_thread_that_iterates() -> None:
    seen = set()

    class Noting(Foreign):
        def __dlpack__(self, **arguments):
            seen.add(threading.current_thread())
            return super().__dlpack__(**arguments)

    session = GPUSession(NEG)
    elsewhere = Foreign(np.zeros(4, np.float32), (2, 1))
    given = [{"x": Noting(np.full(4, n, np.float32))} for n in range(20)] + [{"x": elsewhere}, {"x": elsewhere}]
    results, handed_out = session.map(given), []
    failed = outcome(lambda: [handed_out.append(int(result[0][0])) for result in results])
    report([handed_out == [-n for n in range(20)], seen == {threading.current_thread()}, failed["type"]])


def nothing_is_copied_on_the_way_in() -> None:
    from ortgpu.running.device_arrays import wrap_arrays

    session = GPUSession(NEG)
    array = np.zeros(4, dtype=np.float32)
    value = wrap_arrays(session, {"x": Foreign(array)})["x"]
    same = value.data_ptr() == array.ctypes.data
    array[:] = 5
    report([same, session.run(None, {"x": value})[0].tolist(), wrap_arrays(session, {"x": array})])


def pinned_memory_and_booleans_of_another_library() -> None:
    session = GPUSession(model("t (bool[n] x) => (bool[n] y) { y = Not(x) }"))
    array = np.array([True, False])
    report([session.run(None, {"x": Foreign(array, (kind, 0))})[0].tolist() for kind in (1, 3)])


def an_array_that_begins_later_in_its_memory() -> None:
    from ortgpu.running.device_arrays import _tensor_in, wrap_arrays

    class Later(Foreign):
        def __dlpack__(self, **arguments):
            capsule = super().__dlpack__(**arguments)
            tensor = _tensor_in(capsule)
            self.tensor, self.original = tensor, bytes(tensor)
            tensor.shape[0], tensor.byte_offset = 2, 8
            self.handed_out = bytes(tensor)
            return capsule

    session = GPUSession(NEG)
    array = Later(np.arange(4, dtype=np.float32))
    read = session.run(None, {"x": array})[0].tolist()
    value = wrap_arrays(session, {"x": array})["x"]
    report([read, value.numpy().tolist(), bytes(array.tensor) == array.handed_out])


def an_array_that_is_refused_is_given_back_as_it_was() -> None:
    from ortgpu.running.device_arrays import _tensor_in

    class Later(Foreign):
        def __dlpack__(self, **arguments):
            self.capsule = super().__dlpack__(**arguments)
            tensor = _tensor_in(self.capsule)
            tensor.device_type, tensor.byte_offset, tensor.data = 3, 16, tensor.data - 16
            self.handed_out = bytes(tensor)
            return self.capsule

    session = GPUSession(NEG)
    array = Later(np.zeros(10, np.complex128)[2:], (3, 0))
    refused = outcome(lambda: session.run(None, {"x": array}))["type"]
    report([refused, bytes(_tensor_in(array.capsule)) == array.handed_out])


def an_array_that_is_not_contiguous() -> None:
    from ortgpu.running import device_arrays

    session = GPUSession(model("t (float[n,m] x) => (float[n,m] y) { y = Neg(x) }"))
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = [array.T, array[:, 1:], array[::-1, ::-1], array[:1].T, array[:0].T, np.broadcast_to(array[:1], (2, 3))]
    given[-1].flags.writeable = True
    ran = [session.run(None, {"x": Foreign(each)})[0].tolist() == (-each).tolist() for each in given]
    mapped = [result[0].tolist() for result in session.map([{"x": Foreign(array.T)}])]
    kept = session.run_on_device(None, {"x": Foreign(array.T)})[0].numpy().tolist()
    report(
        [
            ran,
            mapped == [(-array.T).tolist()],
            kept == (-array.T).tolist(),
            outcome(lambda: device_arrays._order_array("x", Foreign(array.T), on_gpu=True)),
        ]
    )


def an_array_elsewhere_is_refused() -> None:
    session = GPUSession(NEG)
    array = np.zeros(4, dtype=np.float32)
    elsewhere = [(2, 1), (13, 0), (10, 0)]
    report([outcome(lambda: session.run(None, {"x": Foreign(array, device)})) for device in elsewhere])


def what_is_wrong_with_a_feed_stays_onnx_runtimes_own() -> None:
    session = GPUSession(NEG)
    right, wrong = np.zeros(4, np.float32), np.zeros(4)
    given = {"x": Foreign(wrong)}, {"x": wrong}, {"z": Foreign(right)}, {"x": object()}
    report([outcome(lambda: session.run(None, feed)) for feed in given])


def a_closed_session_says_so() -> None:
    session = GPUSession(NEG)
    session.close()
    array = Foreign(np.zeros(4, np.float32))
    report(
        [
            outcome(lambda: session.run(None, {"x": array})),
            array.asked,
            outcome(lambda: session.run_on_device(None, {"x": array})),
        ]
    )


def results_stay_on_the_device_of_the_session() -> None:
    session = GPUSession(model("t (float[n] x) => (float[n] y, float[n] z) { y = Neg(x) z = Abs(x) }"))
    array = np.array([1, -2], np.float32)
    both = session.run_on_device(None, {"x": Foreign(array)})
    one = session.run_on_device(["z"], {"x": array[::-1]})
    shares = hasattr(both[0], "__dlpack__")
    shared = shares and np.from_dlpack(both[0]).ctypes.data == both[0].data_ptr()
    unknown = outcome(lambda: session.run_on_device(["no"], {"x": array}))["type"]
    scalar = GPUSession(model("t (float x) => (float y) { y = Neg(x) }"))
    single = scalar.run_on_device(None, {"x": np.ones((), np.float32)})
    values = [value.numpy().tolist() for value in (*both, *one, *single)]
    report([values, both[0].device_name(), shared, unknown])


def an_output_that_is_named_twice_is_there_twice() -> None:
    session = GPUSession(model("t (float[n] x) => (float[n] y, float[n] z) { y = Neg(x) z = Abs(x) }"))
    names, feed = ["z", "y", "z"], {"x": np.array([3], np.float32)}
    values = session.run_on_device(names, feed)
    report([[value.tolist() for value in session.run(names, feed)], [value.numpy().tolist() for value in values]])


def numbers_in_no_array_are_of_the_type_that_the_model_declares() -> None:
    session = GPUSession(model("t (float[n] x) => (float[n] y) { y = Neg(x) }"))
    feeds = {"x": [1.0, 2.0]}, {"x": [3, 4]}, {"x": []}
    kept = [session.run_on_device(None, feed)[0].numpy().tolist() for feed in feeds]
    wrong = outcome(lambda: session.run_on_device(None, {"x": np.zeros(2)}))
    report([kept, [session.run(None, feed)[0].tolist() for feed in feeds], wrong["type"]])


def inputs_that_are_missing_are_named_as_run_names_them() -> None:
    add = GPUSession(model("t (float x, float w) => (float y) { y = Add(x, w) }"))
    one, array = np.ones((), np.float32), Foreign(np.ones((), np.float32))
    given = {}, {"x": one}, {"x": one, "W": one}, {"x": array}
    report(
        [[outcome(lambda: run(None, feed)) for run in (add.run, add.run_on_device)] for feed in given]
        + [outcome(lambda: add.run_on_device(None, {"x": one, "w": None}))]
    )


def an_optional_input_may_be_none() -> None:
    optional = GPUSession(model("t (optional(float[n]) x) => (bool y) { y = OptionalHasElement(x) }"))
    report(
        [
            [bool(optional.run(None, feed)[0]), bool(optional.run_on_device(None, feed)[0].numpy())]
            for feed in ({}, {"x": None})
        ]
    )


def an_input_with_a_value_of_its_own_may_be_given_another() -> None:
    session = GPUSession(model("t (float[n] x, float[1] w) => (float[n] y) <float[1] w = {5}> { y = Add(x, w) }"))
    x, w = np.zeros(2, np.float32), np.full(1, 7, np.float32)
    feeds = {"x": x}, {"x": x, "w": w}, {"w": np.repeat(w, 2)[::2], "x": x}, {"x": x, "w": Foreign(w)}
    kept = [session.run_on_device(None, feed)[0].numpy().tolist() for feed in (*feeds, {"x": x, "w": [7]})]
    wrong = [
        outcome(lambda: session.run_on_device(None, {"x": x, **given}))["type"]
        for given in ({"w": np.zeros(1)}, {"v": w})
    ]
    report([kept, [session.run(None, feed)[0].tolist() for feed in feeds], wrong])


def tensors_of_pytorch() -> None:
    import torch

    session = GPUSession(NEG)
    tensor = torch.tensor([1.0, -2.0])
    back = torch.from_dlpack(session.run_on_device(None, {"x": tensor})[0])
    logic = GPUSession(model("t (bool[n] x) => (bool[n] y) { y = Not(x) }"))
    half = GPUSession(model("t (bfloat16[n] x) => (float[n] y) { y = Cast<to: int = 1>(x) }"))
    report(
        [
            session.run(None, {"x": tensor})[0].tolist(),
            back.tolist(),
            logic.run(None, {"x": torch.tensor([True, False])})[0].tolist(),
            half.run(None, {"x": tensor.bfloat16()})[0].tolist(),
            outcome(lambda: session.run(None, {"x": torch.ones(2, requires_grad=True)})),
        ]
    )
