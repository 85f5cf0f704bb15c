"""Everything to open a session: ONNX Runtime, libraries, requests, options, devices, placement, living sessions."""
