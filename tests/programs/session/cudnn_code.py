"""Programs of ``tests/session/test_cudnn_code.py``."""

from __future__ import annotations

from tests.programs.on_cpu import NEG, model, report

OLD, KNOWN = (3, 5), (9, 0)


def a_session_is_refused_where_its_operators_need_what_is_not_there() -> None:
    from ortgpu.environment.gpu.cuda import CudaDevice
    from ortgpu.model.outline import GraphOutline
    from ortgpu.provider.placement import PlacedNode, Placement
    from ortgpu.provider.requests import parse
    from ortgpu.provider.runtime import open_provider
    from ortgpu.session import verifying
    from ortgpu.session.plan import Plan
    from ortgpu.session.request import SessionRequest
    from ortgpu.session.undiagnosed import UndiagnosedError

    def judged(capability, *operators, known=True, holds=NEG):
        nodes = [PlacedNode(name, name, "", "CUDAExecutionProvider", "compute") for name in operators]
        plan = Plan(SessionRequest(holds), parse(None, None), gpu=CudaDevice(0, None, None, capability, None, None))
        try:
            verifying.check_libraries_of_nodes(
                plan, Placement(tuple(nodes), known), open_provider(), None, GraphOutline(holds)
            )
        except UndiagnosedError as failure:
            return sorted(name for name, _ in failure.operators)

    conv = model("c (float[1,1,3,3] x, float[1,1,1,1] w) => (float[1,1,3,3] y) { y = Conv(x, w) }")
    report(
        [
            judged(OLD, "Conv", "Relu"),
            judged(OLD, "Relu"),
            judged(KNOWN, "Conv"),
            judged(None, "Conv"),
            judged(OLD, known=False, holds=conv),
            judged(OLD, known=False),
        ]
    )


def what_cudnn_fails_with_there_is_told_as_that() -> None:
    import ctypes

    from ortgpu import inspect_environment
    from ortgpu.diagnosis.checks.classifier import explain_run
    from ortgpu.provider.devices import Device

    text = "CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0 ; expr=cudnnReduceTensor(...);"

    def told(capability):
        error = explain_run(text, "Fail", Device("cuda", 0, None, "Tesla", capability, None, None))
        return [type(error).__name__, str(error)]

    before = told(OLD)
    libraries = {one.spec.stem: one.chosen.path for one in inspect_environment().libraries if one.chosen}
    ctypes.CDLL(libraries["libcudnn_ops"])
    half = told(OLD)
    ctypes.CDLL(libraries["libcudnn_cnn"])
    report([before, told(OLD), told(KNOWN), told(None), half])
