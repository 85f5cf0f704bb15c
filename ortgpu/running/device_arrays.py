"""Arrays of other libraries as inputs, without a copy, and results that stay on the GPU.

An input may be anything with ``__dlpack__``. The protocol and its numbers:
https://dmlc.github.io/dlpack/latest/ (dlpack.h, python_spec.html).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..errors import ProviderRequestError, manual
from ..model.tensor_types import DTYPES
from ..provider import lifetime
from .cudart import LEGACY_STREAM, PER_THREAD_STREAM
from .streams import is_foreign, is_value_on_gpu, streams_of, wait_for_caller

if TYPE_CHECKING:
    from ..provider.devices import Device
    from ..provider.interfaces import VerifiedSession

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_UNSIGNED, _BOOL = 1, 6  # DLDataTypeCode
_UNUSED = b"dltensor"  # the name of a capsule that is not consumed yet

# ONNX Runtime's import of DLPack tensors. Up to 1.31 it has a flag for boolean tensors, and expects booleans as bytes,
# as in DLPack before 0.8. Since 1.32 it takes DLPack's own booleans, and only the tensor.
_from_dlpack: Any = getattr(native.OrtValue, "from_dlpack", None)  # ONNX Runtime 1.22 added it.
_BOOLEANS_ARE_BYTES = "is_bool_tensor" in (getattr(_from_dlpack, "__doc__", None) or "")


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # unit: elements; NULL if contiguous
        ("byte_offset", ctypes.c_uint64),
    )

    def is_contiguous(self) -> bool:
        """Return True if its elements are contiguous in C order."""
        expected = 1
        for axis in reversed(range(self.ndim if self.strides else 0)):
            size = self.shape[axis]
            if size == 0:
                return True
            if size != 1 and self.strides[axis] != expected:
                return False
            expected *= size
        return True


def wrap_arrays(session: VerifiedSession, feed: Any) -> dict[str, Any] | None:
    """Return ``feed`` with arrays of other libraries as OrtValues that share their memory. None if it has none.

    If a value is on the GPU, the session's next work waits for the work that the caller has queued there (see
    :mod:`ortgpu.running.streams`). A non-contiguous array on the CPU becomes a NumPy array.

    Raises:
        ProviderRequestError: an array is on another device than the session, or on the GPU and not contiguous.
        ExecutionError: the session is closed, or lost the GPU. Work on an array may have failed, too.
    """
    if not isinstance(feed, Mapping):
        return None
    foreign = {name for name, value in feed.items() if is_foreign(value)}
    if foreign:
        lifetime.refuse_if_unusable(session)
    on_gpu = {name for name in foreign if _device_of(feed[name])[0] in (_CUDA, _CUDA_MANAGED)}
    streams = streams_of(session) if on_gpu else None
    session_stream = streams.own if streams is not None else None
    values = {
        name: _value(session, name, feed[name], session_stream) if name in foreign else feed[name] for name in feed
    }
    if on_gpu and streams is None:
        raise ProviderRequestError(
            "arrays on the GPU cannot be waited for: the CUDA runtime is not among the libraries of this process",
            fixes=[manual("pass arrays on the CPU")],
        )
    if on_gpu or any(map(is_value_on_gpu, feed.values())):
        wait_for_caller(session)
    return values if foreign else None


def refuse_on_gpu(feed: Any) -> None:
    """Refuse arrays on a GPU, because a pool has not chosen the GPU yet.

    Raises:
        ProviderRequestError: an array is on a GPU.
    """
    for name, value in feed.items() if isinstance(feed, Mapping) else ():
        if is_value_on_gpu(value) or (is_foreign(value) and _device_of(value)[0] not in (_CPU, _CUDA_HOST)):
            raise ProviderRequestError(
                f"input {name!r} is on a GPU, and a pool chooses the GPU itself",
                fixes=[manual("pass arrays on the CPU, or run a GPUSession on that GPU")],
            )


def run_on_device(session: VerifiedSession, output_names: Any, feed: Mapping[str, Any], run_options: Any) -> list[Any]:
    """Run the model and keep the results on the device; see GPUSession.run_on_device."""
    lifetime.refuse_if_unusable(session)
    session._gpu_runner.check_binding()
    # Check names first: a binding reports a missing input only through some node, and takes None for NaN.
    values: Mapping[str, Any] = {name: value for name, value in feed.items() if value is not None}
    session._validate_input(list(values))
    values = wrap_arrays(session, values) or values
    device = lifetime.device_of(session)

    def run(target: VerifiedSession, _runner: object, feed: Mapping[str, Any]) -> list[Any]:
        return _run_bound(target, device, output_names, feed, run_options)

    if run_options is not None:
        return run(session, None, values)
    results: list[Any] = session._gpu_runner.through(session, values, run)
    return results


def _run_bound(
    session: VerifiedSession, device: Device, output_names: Any, feed: Mapping[str, Any], run_options: Any
) -> list[Any]:
    binding = session.io_binding()
    overridable = {initializer.name for initializer in session._overridable_initializers}
    ort_values = []  # a binding on the CPU keeps only the address of an array
    for name, value in feed.items():
        if isinstance(value, onnxruntime.OrtValue):
            binding.bind_ortvalue_input(name, value)
            continue
        array = np.asarray(value, _dtype_of(session, name, value), order="C")
        if name in overridable:  # bind_cpu_input does not know these
            ort_values.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
            binding.bind_ortvalue_input(name, ort_values[-1])
        else:
            binding.bind_cpu_input(name, array)
    names = list(output_names or [output.name for output in session._outputs_meta])
    for name in names:
        binding.bind_output(name, device.kind, device.ordinal or 0)
    binding.shape = None  # The runner chose the session, and counts the shapes.
    session.run_with_iobinding(binding, run_options)
    # A binding has one entry for an output, however often it is named.
    outputs = dict(zip(dict.fromkeys(names), binding.get_outputs(), strict=True))
    return [outputs[name] for name in names]


def _dtype_of(session: VerifiedSession, name: str, value: Any) -> Any:
    """Return the type that the model declares for a value that is no array, as ``run`` does. None for arrays."""
    if isinstance(value, np.ndarray):
        return None
    declared = (*session._inputs_meta, *session._overridable_initializers)
    return next((DTYPES.get(declaration.type) for declaration in declared if declaration.name == name), None)


def _device_of(array: Any) -> tuple[int, int]:
    kind, ordinal = array.__dlpack_device__()
    return int(kind), int(ordinal)


def _value(session: VerifiedSession, name: str, array: Any, stream: int | None) -> Any:
    """Return an OrtValue that shares the memory of an array. ``stream`` is the session's, if it is known."""
    if _from_dlpack is None:
        raise ProviderRequestError(
            f"input {name!r} is a {type(array).__name__}, and the installed ONNX Runtime takes NumPy arrays only",
            fixes=[manual("use ONNX Runtime 1.22 or newer, or pass NumPy arrays")],
        )
    kind, ordinal = _device_of(array)
    on_gpu = kind in (_CUDA, _CUDA_MANAGED)
    device = lifetime.device_of(session)
    if kind not in (_CPU, _CUDA_HOST) and not (on_gpu and device.is_gpu and ordinal == device.ordinal):
        where = f"cuda:{ordinal}" if on_gpu else f"a device of DLPack's type {kind}"
        raise ProviderRequestError(
            f"input {name!r} is on {where}, and the session on {device}",
            fixes=[manual(f"move it to {device.kind}:{device.ordinal}" if device.is_gpu else "move it to the CPU")],
            requested=where,
        )
    # The producer makes this stream wait for the array, and the run comes after that. Every producer knows the legacy
    # stream, and some refuse the per-thread stream.
    ready = stream if stream is not None and stream > PER_THREAD_STREAM else LEGACY_STREAM
    capsule = array.__dlpack__(stream=ready) if on_gpu else array.__dlpack__()
    tensor = _tensor_in(capsule)
    if not tensor.is_contiguous():
        return _order_array(name, array, on_gpu)
    original = bytes(tensor)
    tensor.data = (tensor.data or 0) + tensor.byte_offset or None  # ONNX Runtime ignores byte_offset
    tensor.byte_offset = 0
    if kind != _CUDA:
        tensor.device_type = _CUDA if kind == _CUDA_MANAGED else _CPU  # ONNX Runtime knows only these
    is_bool = tensor.code == _BOOL
    if is_bool and _BOOLEANS_ARE_BYTES:
        tensor.code = _UNSIGNED
    value = None
    try:
        value = onnxruntime.OrtValue(_from_dlpack(capsule, *([is_bool] if _BOOLEANS_ARE_BYTES else [])))
        return value
    finally:
        # Restore the tensor for its producer, unless the capsule was consumed and so given back already.
        if value is not None or ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(capsule), _UNUSED):
            ctypes.memmove(ctypes.byref(tensor), original, len(original))


def _order_array(name: str, array: Any, on_gpu: bool) -> Any:
    kind = type(array).__name__
    if not on_gpu:
        try:
            return np.from_dlpack(array)  # ONNX Runtime makes it contiguous
        except (BufferError, RuntimeError, TypeError, ValueError):  # element types that NumPy does not know
            pass
    raise ProviderRequestError(
        f"input {name!r} is a {kind} that is not contiguous, as a transposed one or a slice of columns is",
        fixes=[manual("pass a contiguous copy: x.contiguous() in PyTorch, cupy.ascontiguousarray(x) in CuPy")],
        requested=kind,
    )


def _tensor_in(capsule: Any) -> _DLTensor:
    """Return the description of the tensor. It belongs to this capsule alone."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return _DLTensor.from_address(address(capsule, _UNUSED))
