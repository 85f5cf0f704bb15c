"""The folder that `ortgpu exec` puts on PYTHONPATH: it leaves ``sys.path`` before ONNX Runtime is imported."""
