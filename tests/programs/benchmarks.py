"""Programs of ``tests/test_benchmarks.py``."""

from __future__ import annotations


def thresholds_are_where_all_larger_sizes_gain() -> None:
    import itertools

    from benchmarks.thresholds import CASES, PIECES, THREADS, Sweep
    from tests.support.children import report

    sweep = Sweep(quick=True, device="cpu", no_gpu=None)
    for mib, both in ((2, 0.5), (4, 1.2), (8, 0.9), (64, 0.6)):
        for way, gained in ((way, way == (8, 8)) for way in itertools.product(THREADS, PIECES)):
            of_size = sweep.ratios.setdefault(mib, {case: {} for case in CASES})
            of_size["both"][way] = both if gained else both + 0.3
            of_size["in"][way] = of_size["kept"][way] = 0.96 if mib == 64 else 0.98
    report("all gain", sweep.conclusion())
    sweep.ratios[64]["kept"][8, 8] = 1.0
    report("one does not", sweep.conclusion())


def soak_notices_what_is_wrong_and_what_grows() -> None:
    import time

    import numpy as np

    from benchmarks.soak import soak
    from tests.support.children import report

    feeds = [{"x": np.full(3, value, np.float32)} for value in (1, 2)]
    expected = [[feed["x"]] for feed in feeds]
    held = bytearray()
    started = time.monotonic()

    def leaking(feeds):
        for number, feed in enumerate(feeds):
            due = int((time.monotonic() - started) * (128 << 20))  # bytes by now: whatever the machine's speed
            held.extend(b"x" * (due - len(held)))
            yield [feed["x"] if number != 5 else feed["x"] + np.nan]

    report("outcome", soak(leaking, feeds, expected, 0.3, ()))


def the_worst_of_the_zoo_is_named_first() -> None:
    from benchmarks.zoo import summary
    from tests.support.children import report

    ratios = {"one": 0.5, "two": 2.0, "three": 1.0}
    parts = {kind: {"figures": {"map b1": {"ratio": ratio}}} for kind, ratio in ratios.items()}
    report("found", summary(parts)["map b1"])


def the_zoo_names_who_misses_a_bar_and_the_mean_without_the_odd_one() -> None:
    from benchmarks.zoo import summary
    from tests.support.children import report

    kinds = {"recurrent": 0.1, "dense": 0.9, "unet": 1.4}
    seconds = {"recurrent": 0.01, "dense": 0.01, "unet": 0.002}  # of plain: 1.4 of 2 ms are 0.8 ms more
    parts = {}
    for kind, ratio in kinds.items():
        ours, plain = [ratio * seconds[kind]], [seconds[kind]]
        figures = {"constructor": {"ratio": ratio, "ours": ours, "plain": plain}, "map b1, tuned": {"ratio": ratio}}
        parts[f"{kind}, tuned"] = {"figures": figures}
    report("found", summary(parts))


def networks_of_pytorch_compute_what_those_of_the_zoo_do() -> None:
    import sys
    from pathlib import Path

    import numpy as np
    import onnxruntime

    from benchmarks import zoo_models, zoo_torch
    from tests.support.children import report

    for kind in ("squeeze-excite", "vision-transformer", "windowed-transformer", "shuffle", "unet", "enlarging"):
        path = zoo_models.made(kind, Path(sys.argv[1]))
        session = onnxruntime.InferenceSession(str(path))
        shape = [each if isinstance(each, int) else 2 for each in session.get_inputs()[0].shape]
        feed = {"x": np.random.default_rng(0).standard_normal(shape, np.float32)}
        (right,) = session.run(None, feed)
        (found,) = zoo_torch.Pipeline(path, "cpu", compiled=False).map([feed])
        report(kind, float(abs(found - right).max() / abs(right).max()))


def every_kind_of_the_zoo_runs_with_any_batch() -> None:
    import sys
    from pathlib import Path

    import numpy as np
    import onnxruntime

    from benchmarks import zoo_models
    from tests.support.children import report

    for kind in zoo_models.KINDS:
        session = onnxruntime.InferenceSession(str(zoo_models.made(kind, Path(sys.argv[1]))))
        (taken,), (given,) = session.get_inputs(), session.get_outputs()
        for batch in (1, 2):
            shape = [each if isinstance(each, int) else batch for each in taken.shape]
            (y,) = session.run(None, {"x": np.random.default_rng(0).standard_normal(shape, np.float32)})
            right = list(y.shape) == [batch, *given.shape[1:]] and np.isfinite(y).all() and y.std() > 1e-4
            report(f"{kind} {batch}", bool(right))


def a_planted_fault_that_was_accepted_or_not_tried_is_named() -> None:
    from benchmarks.tuning import faults
    from ortgpu.session.tuning.children import Trial
    from tests.support.children import report

    settings = {"search": "heuristic", "layout": "channels-last"}
    wrong = Trial({"workspace": "small"}, None, (), 1.0, "rejected: output 'y' is wrong")
    report("faults", faults([Trial(settings, 0.5, (1.0,), 0.0, "not the fastest"), wrong]))


def batched_kinds() -> None:
    import sys
    from pathlib import Path

    from benchmarks.zoo_models import KINDS, made
    from ortgpu import GPUSession

    for kind in KINDS:
        with GPUSession(made(kind, Path(sys.argv[1])), allow_cpu=True) as session, session.batched(4):
            print(kind)
    print("all", len(KINDS))
