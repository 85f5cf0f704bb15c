"""The meaning of words and codes of ONNX Runtime, CUDA and the loader."""
