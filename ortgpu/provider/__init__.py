"""What a session is opened with: ONNX Runtime, libraries, requests, options, devices, placement, living sessions."""
