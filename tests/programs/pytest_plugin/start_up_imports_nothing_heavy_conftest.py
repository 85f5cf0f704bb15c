import sys


def pytest_sessionfinish(session):
    heavy = {"onnxruntime", "numpy", "onnx", "pynvml", "rich", "click", "torch"} & set(sys.modules)
    ours = sorted(name for name in sys.modules if name.startswith("ortgpu"))
    print(f"heavy: {sorted(heavy)}, ours: {ours}")
