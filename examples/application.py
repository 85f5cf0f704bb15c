"""A service that decides at its start whether it can work, and logs why not and what to do.

    python examples/application.py [MODEL]

Exit code 0: the service is ready on the GPU. 69 (EX_UNAVAILABLE in sysexits.h): no GPU can be used; the log has the
cause, the facts and the fixes. A supervisor need not restart it: nothing changes until a fix is applied.
"""

from __future__ import annotations

import logging
import sys

import numpy as np
import onnx.parser

import ortgpu  # loads neither ONNX Runtime nor CUDA: that happens when the first session is made

log = logging.getLogger("service")

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def open_model(path: str | None) -> ortgpu.GPUSession:
    model = path or onnx.parser.parse_model(RELU).SerializeToString()
    # "forbid": this service must be fast, so it does not start if some of its nodes compute on the CPU
    return ortgpu.GPUSession(model, cpu_nodes="forbid")


def main(path: str | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        session = open_model(path)
    except ortgpu.LibraryNotFoundError as error:  # one cause that this service treats in its own way
        log.critical("the installation is incomplete, without %s", ", ".join(error.missing))
        log.critical("%s", error)
        return 69
    except ortgpu.GPUError as error:  # every other cause
        log.critical("cannot start [%s]: %s", error.code, error.summary)
        for fact in error.evidence:
            log.critical("  %s", fact)
        for fix in error.fixes:
            log.critical("  to fix it: %s", fix)
        return 69
    with session:
        log.info("ready on %s", session.device)
        if path is None:
            log.info("result: %s", session.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
