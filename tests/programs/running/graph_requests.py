"""Programs of ``tests/running/test_graph_requests.py``."""

from __future__ import annotations

import os
import sys

from ortgpu import GPUSession
from ortgpu.running.cudart import Stream
from tests.programs.on_cpu import NEG, model, outcome, report
from tests.programs.with_graphs import Recorded, runtime, stub


def what_cannot_be_captured_is_refused_when_the_session_is_made() -> None:
    from ortgpu.running import graph_requests

    texts = GPUSession(model("t (string[n] x) => (string[n] y) { y = Identity(x) }"))
    sequence = GPUSession(model("t (float[n] x) => (seq(float[n]) y) { y = SequenceConstruct(x) }"))
    counting = GPUSession(model("t (float[n] x) => (int64[r, m] y) { y = NonZero(x) }"))
    handed_on = GPUSession(model("t (float[n] x) => (float[n] y, float[n] x) { y = Neg(x) }"))
    usual = GPUSession(NEG)
    no_runtime = outcome(lambda: graph_requests.captured(usual))
    graph_requests.runtime_of = lambda device: runtime  # type: ignore[attr-defined]  # its name in there
    no_stream = outcome(lambda: graph_requests.captured(usual))
    usual._stream = Stream(runtime)

    class Memory:
        name = "Cuda"

    class Elsewhere(Recorded):
        input_meminfos = [Memory]  # not where the rest of a session on the CPU is

    made = graph_requests.captured(usual)
    usual._sess = Elsewhere(usual._sess, None)

    class Constant(Recorded):
        output_meminfos = [Memory]

    constant = GPUSession(NEG)
    constant._sess = Constant(constant._sess, None)
    refused = (texts, sequence, usual, counting, handed_on, constant)
    others = [outcome(lambda: graph_requests.captured(each)) for each in refused]
    report([no_runtime, no_stream, *others, type(made).__name__])


def a_model_of_unknown_operators_is_refused() -> None:
    import onnxruntime

    from ortgpu.running import graph_requests

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = os.path.join(sys.argv[2], "model.ort")
    counting = model("t (float[n] x) => (int64[r, m] y) { y = NonZero(x) }")
    onnxruntime.InferenceSession(counting, options, providers=["CPUExecutionProvider"])
    graph_requests.runtime_of = lambda device: runtime  # type: ignore[attr-defined]  # its name in there
    session = GPUSession(options.optimized_model_filepath)
    report(outcome(lambda: graph_requests.captured(session)))


def a_session_is_given_a_stream_if_one_can_be_made() -> None:
    from ortgpu.running import graph_requests

    ordinals = []
    graph_requests.runtime_on = lambda ordinal: ordinals.append(ordinal) or runtime  # type: ignore[attr-defined]  # its name in there
    stream = graph_requests.own_stream(1)
    made = stream.handle != 0
    streams = stub.stub_streams()
    del stream
    os.environ["STUB_CUDART_FAIL"] = "cudaStreamCreateWithFlags=2"
    report([made, ordinals, streams, stub.stub_streams(), graph_requests.own_stream(1)])
