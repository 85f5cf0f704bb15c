"""Programs of ``tests/model/test_data_flow.py``."""

from __future__ import annotations

from tests.programs.machines import report


def opened() -> None:
    import sys
    import warnings
    from pathlib import Path

    import onnxruntime

    from ortgpu import GPUSession, PlacementError

    found = {}
    for path in sorted(Path(sys.argv[1]).iterdir()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with GPUSession(path) as session:
                nodes = session.placement.nodes
                placed = [[node.name, node.provider, node.kind, node.reason] for node in nodes]
                operators = sorted({node.op_type for node in session.placement.cpu_compute_nodes})
        try:
            GPUSession(path, cpu_nodes="forbid").close()
            refused = None
        except PlacementError as error:
            refused = [node.name for node in error.nodes]
            assert "another type" in error.fixes[0], error.fixes
        found[path.stem] = [placed, [str(each.message).splitlines()[0] for each in caught], refused, operators]

    def divided(key, value, **arguments):
        options = onnxruntime.SessionOptions()
        if key is not None:
            options.add_session_config_entry(key, value)
        try:
            with GPUSession(Path(sys.argv[1]) / "divided.onnx", options, **arguments) as session:
                return [[node.name, node.kind, node.reason] for node in session.placement.nodes if node.reason]
        except PlacementError as error:
            return [error.fixes[0], error.evidence[0]]

    entries = {"session.layer_assignment_settings": "cpu(slow)", "session.name_based_layer_assignment": "cpu(asked)"}
    found["divided"] = {}
    for key, value in entries.items():
        found["divided"][key] = [divided(key, value, cpu_nodes=policy) for policy in ("allow", "forbid")]
    found["undivided"] = divided(None, None, cpu_nodes="forbid")
    path = Path(sys.argv[1]) / f"{sys.argv[2]}.onnx"
    with GPUSession(path, cpu_nodes="allow") as session:
        details = session.explain_placement()
        found["explained"] = {node.name: [node.kind, reason] for node, reason in details.off_gpu}
        found["table"] = str(details)
    report(found)
