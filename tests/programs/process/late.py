"""Programs of ``tests/process/test_late.py``."""

from __future__ import annotations


def a_module_is_imported_when_it_is_used() -> None:
    import sys

    from ortgpu.process.late import late

    onnx = late("onnx")
    assert "onnx" not in sys.modules
    assert onnx.ModelProto is sys.modules["onnx"].ModelProto


def a_module_that_is_absent_raises_when_it_is_used() -> None:
    import sys

    from ortgpu.process.late import late

    sys.modules["onnx"] = None
    onnx = late("onnx")
    try:
        onnx.ModelProto
    except ImportError:
        print("raised")
