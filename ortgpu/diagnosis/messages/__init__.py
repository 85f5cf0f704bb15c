"""What the words and codes of ONNX Runtime, CUDA and the loader mean."""
