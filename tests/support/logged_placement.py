"""What ONNX Runtime's log says of where nodes are, beside what is made of its placement."""

from __future__ import annotations

import os
import re
import zipfile
from typing import Any

_NO_KERNEL = re.compile(r"CUDA kernel not .*? for Op type: (\S*) node name: ([^\x1b\n]*?)\s*(?:\x1b|$)", re.MULTILINE)
_PREFERRED = re.compile(r"Force fallback to CPU execution for node: (.*?) because")


def logged(models: str, log_file: str) -> dict[str, Any]:
    """Of each model in an archive that opens: operators and names of nodes for which CUDA has no kernel; names of those
    that ONNX Runtime prefers on the CPU; operators and names of those that compute there; whether it is refused."""
    import onnxruntime

    from ortgpu import preload
    from ortgpu.provider.options import recording_options
    from ortgpu.provider.placement import read_placement, refusal

    preload()
    found = {}
    log, kept = os.open(log_file, os.O_RDWR | os.O_CREAT), os.dup(2)
    os.dup2(log, 2)
    onnxruntime.set_default_logger_severity(1)
    try:
        with zipfile.ZipFile(models) as archive:
            for name in archive.namelist():
                os.ftruncate(log, 0)
                os.lseek(log, 0, os.SEEK_SET)
                options = recording_options()
                options.log_severity_level = 1
                providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
                try:
                    session = onnxruntime.InferenceSession(archive.read(name), options, providers=providers)
                except Exception:  # noqa: BLE001 - a type that the operator or both providers do not take
                    continue
                assert session.get_providers() == providers
                placement = read_placement(session)
                text = os.pread(log, 1 << 24, 0).decode(errors="replace")
                found[name] = [
                    re.findall(
                        r"CUDA kernel not .*? for Op type: (\S*) node name: ([^\x1b\n]*?)\s*(?:\x1b|$)", text, re.M
                    ),
                    re.findall(r"Force fallback to CPU execution for node: (.*?) because", text),
                    [[node.op_type, node.name] for node in placement.cpu_compute_nodes],
                    refusal(placement) is not None,
                ]
    finally:
        os.dup2(kept, 2)
        onnxruntime.set_default_logger_severity(2)
    return found
