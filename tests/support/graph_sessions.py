"""Sessions that replay CUDA graphs, as far as that goes without a GPU: for :func:`tests.support.cpu_session.child`.

The session is a real one on the CPU, "device" memory is a stub runtime's, and IOBinding is ONNX Runtime's own. The run
options do nothing on the CPU; what is bound where, what is copied, kept and given back is the same. Copies come as late
as CUDA may make them, and a run is made when its stream has come so far.
"""

from __future__ import annotations

from typing import Any

from tests.lab.stubs import Stubs
from tests.support.cpu_session import child


def with_graphs(stubs: Stubs, program: str, *arguments: str, behind: str = "") -> Any:
    """What a program reported. It, or code, finds what tests/programs/with_graphs.py defines, and in sys.argv what is
    behind the path of the stub."""
    return child(program, str(stubs.cudart), *arguments, behind=f"with_graphs {behind}")
