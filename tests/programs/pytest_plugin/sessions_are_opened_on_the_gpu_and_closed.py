import pytest


@pytest.mark.ortgpu(compute_capability=(8, 0))
def test_it(gpu_session):
    first = gpu_session("first", cpu_nodes="allow")
    assert first.options == {"cpu_nodes": "allow", "device": 1}
    gpu_session("second", device="cuda:0")
    gpu_session("third", None, ["CUDAExecutionProvider"], [{"device_id": 0}])
    gpu_session("fourth", providers=[("CUDAExecutionProvider", {"device_id": "0"})])
    gpu_session("fifth", providers=["CUDAExecutionProvider"])
    raise RuntimeError("closed all the same")
