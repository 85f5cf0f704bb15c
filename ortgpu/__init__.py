"""ONNX Runtime sessions that run on the GPU, or raise an exception that names the cause and a fix."""
