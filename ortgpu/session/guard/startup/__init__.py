"""The folder that `ortgpu exec` puts on PYTHONPATH. It leaves ``sys.path`` before ONNX Runtime is imported."""
