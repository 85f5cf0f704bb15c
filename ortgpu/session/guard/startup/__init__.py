"""The folder that `ortgpu exec` puts on PYTHONPATH. It is taken off ``sys.path`` before ONNX Runtime is imported."""
