"""The meaning of the words and codes of ONNX Runtime and CUDA."""
