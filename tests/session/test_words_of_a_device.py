"""What ONNX Runtime logs for a session on another GPU than the first: with plain sessions it is the same."""

from __future__ import annotations

from tests.lab.fixtures import Lab, with_gpus

PLAIN = 'onnxruntime.InferenceSession(model, providers=[("CUDAExecutionProvider", {"device_id": 1})])'
OPEN = """
import sys
import onnxruntime, ortgpu
ortgpu.preload()
model = sys.argv[1]
report({}.get_providers()[0])
"""


def test_a_session_logs_what_a_plain_one_logs(lab: Lab, provider_library: str) -> None:
    """With an ordinal ONNX Runtime 1.31 looks for a plugin first, and warns that there is none. Nothing else names the
    GPU, so that a session on the first one leaves the ordinal out."""
    machine = with_gpus(lab.machine_that_places(provider_library), 2)

    def warnings(code: str) -> list[str]:
        child = machine.run(OPEN.format(code), argv=[str(lab.models.relu)]).ok()
        assert child.json == "CUDAExecutionProvider"
        return [line.partition("[W:")[2] for line in child.stderr.splitlines() if "[W:" in line]

    assert warnings('ortgpu.GPUSession(model, device="cuda:1")') == warnings(PLAIN)
    assert warnings("ortgpu.GPUSession(model)") == []
