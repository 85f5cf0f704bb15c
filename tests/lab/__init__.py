"""Broken environments out of real parts, on a machine that needs no GPU.

An :class:`Overlay` is a virtual environment made of links to the one that runs the tests, in which a file can be
removed, replaced, cut short or written over. :class:`Stubs` are a CUDA driver and an NVML that answer what a test
tells them to. A :class:`Machine` is the two together: it runs code in a child process, with a deadline, where the
real ONNX Runtime meets them and nothing else that this machine may have. Its README records what it meets there.

    def test_a_library_is_missing(lab):
        machine = lab.machine(cuda=Cuda(init=100))
        machine.overlay.remove("nvidia/*/lib/libcurand.so.10")
        outcome = machine.open_session(lab.models.relu)
        assert outcome.error.type == "LibraryNotFoundError"
"""

from tests.lab.child import WITHOUT_ITS_FOLDER, Machine, Outcome, Problem
from tests.lab.overlay import LabError, Overlay
from tests.lab.stubs import GPU, NVML, Cuda, Stubs

__all__ = [
    "GPU",
    "NVML",
    "WITHOUT_ITS_FOLDER",
    "Cuda",
    "LabError",
    "Machine",
    "Outcome",
    "Overlay",
    "Problem",
    "Stubs",
]
