"""GPUSessions of this process that stand for sessions on a GPU: ONNX Runtime runs them on the CPU.

No driver is asked and no child is started, so a test takes milliseconds. A child is needed where the test ends the
process's use of CUDA, forks or counts threads: see ``cpu_session``.
"""

from __future__ import annotations

from typing import Any

import onnx.parser
import onnxruntime

from ortgpu.provider.devices import Device
from ortgpu.provider.living import register
from ortgpu.provider.placement import Placement
from ortgpu.running.onnxruntimes import InferenceSession
from ortgpu.session.gpu_session import GPUSession
from ortgpu.session.request import SessionRequest, Verified

NEG: bytes = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) { y = Neg(x) }'
).SerializeToString()

H200 = Device("cuda", 0, "GPU-0aaa", "NVIDIA H200", (9, 0), 141 << 30, "580.65.06")
L4 = Device("cuda", 1, "GPU-1bbb", "NVIDIA L4", (8, 9), 24 << 30, "580.65.06")


def made_session(
    model: bytes = NEG,
    *,
    device: Device = L4,
    budget: int | None = None,
    cls: type[GPUSession] = GPUSession,
    **request: Any,
) -> Any:
    """Return an open session that counts as verified on ``device``."""
    session: Any = cls.__new__(cls)
    InferenceSession.__init__(session, model, onnxruntime.SessionOptions(), providers=["CPUExecutionProvider"])
    session._keep(SessionRequest(model, **request), Verified(device, Placement(()), {}, budget))
    register(session)
    session._own_names = frozenset(vars(session))
    return session
