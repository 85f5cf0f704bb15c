"""A cuDNN that has no code for the GPU at hand, while ONNX Runtime has: 9.11 and newer, and GPUs before 7.5.

The advice is executed in tests/faults, cudnn-without-code-for-the-gpu.
"""

from __future__ import annotations

from ortgpu.environment.inspection import inspect_environment
from ortgpu.environment.libraries.catalogue import CUDNN_CODE
from ortgpu.environment.libraries.wheel import coverage_by
from tests.support.cpu_session import child

OLD, KNOWN = (3, 5), (9, 0)  # no cuDNN 9 has code for the one, and each for the other


def test_the_installed_cudnn_says_which_gpus_it_has_code_for() -> None:
    environment = inspect_environment()
    assert {library.spec.stem for library in environment.libraries} >= set(CUDNN_CODE)
    held = environment.cudnn_architectures
    assert [coverage_by(held, capability) for capability in (KNOWN, (8, 6), OLD)] == ["native", "native", "none"]


def test_a_session_is_refused_where_its_operators_need_what_is_not_there() -> None:
    found = child(
        f"""
        from ortgpu.session import verifying
        from ortgpu.provider.placement import PlacedNode, Placement
        from ortgpu.environment.gpu.cuda import CudaDevice
        from ortgpu.model.outline import GraphOutline
        from ortgpu.provider.requests import parse
        from ortgpu.provider.runtime import open_provider
        from ortgpu.session.plan import Plan
        from ortgpu.session.request import SessionRequest
        from ortgpu.session.undiagnosed import UndiagnosedError

        def judged(capability, *operators, known=True, holds=NEG):
            nodes = [PlacedNode(name, name, "", "CUDAExecutionProvider", "compute") for name in operators]
            plan = Plan(SessionRequest(holds), parse(None, None), gpu=CudaDevice(0, None, None, capability, None, None))
            try:
                verifying.check_libraries_of_nodes(
                    plan, Placement(tuple(nodes), known), open_provider(), None, GraphOutline(holds))
            except UndiagnosedError as failure:
                return sorted(name for name, _ in failure.operators)

        conv = model("c (float[1,1,3,3] x, float[1,1,1,1] w) => (float[1,1,3,3] y) {{ y = Conv(x, w) }}")
        report([judged({OLD}, "Conv", "Relu"), judged({OLD}, "Relu"), judged({KNOWN}, "Conv"), judged(None, "Conv"),
                judged({OLD}, known=False, holds=conv), judged({OLD}, known=False)])
        """
    )
    assert found == [["Conv", "Relu"], None, None, None, ["Conv"], None]


def test_what_cudnn_fails_with_there_is_told_as_that() -> None:
    """Operators of older releases that are not known to need cuDNN: issue 25676 is of ReduceSum in 1.22."""
    found = child(
        f"""
        import ctypes
        from ortgpu import inspect_environment
        from ortgpu.provider.devices import Device
        from ortgpu.diagnosis.checks.classifier import explain_run
        text = "CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0 ; expr=cudnnReduceTensor(...);"
        def told(capability):
            error = explain_run(text, "Fail", Device("cuda", 0, None, "Tesla", capability, None, None))
            return [type(error).__name__, str(error)]
        before = told({OLD})
        libraries = {{one.spec.stem: one.chosen.path for one in inspect_environment().libraries if one.chosen}}
        ctypes.CDLL(libraries["libcudnn_ops"])
        half = told({OLD})
        ctypes.CDLL(libraries["libcudnn_cnn"])
        report([before, told({OLD}), told({KNOWN}), told(None), half])
        """
    )
    other = "ProviderFailureError"
    assert [kind for kind, _ in found] == [other, "UnsupportedDeviceError", other, other, other]
    assert "holds no code for cuda:0 (Tesla) (compute capability 3.5)" in found[1][1]
    assert "install cuDNN 9.10" in found[1][1]
