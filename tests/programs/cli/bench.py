"""Programs of ``tests/cli/test_bench.py``."""

from __future__ import annotations


def partly_failing() -> None:
    import contextlib
    import sys
    import warnings

    from onnxruntime.capi import onnxruntime_pybind11_state as native

    from ortgpu.cli.figures import measuring
    from ortgpu.errors import DeviceBusyError
    from ortgpu.provider.devices import Device
    from ortgpu.running.made_inputs import make_inputs
    from tests.support.children import report

    warnings.simplefilter("ignore")

    def busy(*_, **__):
        raise DeviceBusyError("cuda:1 is busy")

    class Full:
        def is_webgpu_graph_capture_enabled(self):
            return False

        def run(self, *_):
            raise native.Fail("BFCArena: Failed to allocate memory for requested buffer of size 9")

    measuring.GPUSessionPool = busy  # type: ignore[attr-defined]  # its name in there
    with contextlib.ExitStack() as stack:
        bench = measuring.Bench(sys.argv[1], stack, allow_cpu=True)
        declared = bench.session.get_inputs()
        inner, bench.session._sess = bench.session._sess, Full()
        cpu, bench.session.device = bench.session.device, Device("cuda", 0, *[None] * 5)  # whose memory is full
        figures = bench.measure(64, make_inputs(declared, 64), 3)
        bench.session._sess, bench.session.device = inner, cpu
        later = bench.measure(1, make_inputs(declared), 3)
    report("left out", [(each.way, each.batch, each.why.partition(":")[0]) for each in bench.left_out])
    report("ways", [[each.way for each in some] for some in (figures, later)])


def out_of_memory() -> None:
    import sys

    from onnxruntime.capi import onnxruntime_pybind11_state as native

    from ortgpu.__main__ import main
    from ortgpu.cli import bench
    from ortgpu.cli.figures import measuring
    from ortgpu.provider.devices import Device

    model, largest, calls, calls_of_plain = sys.argv[1], *map(int, sys.argv[2:5])

    class Memory:
        # Of a GPU: batches beyond the largest fit for some calls, until there is too little in one piece
        def __init__(self, inner, left):
            self.inner, self.left = inner, left

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def run(self, names, feed, options):
            if max(map(len, feed.values())) > largest:
                self.left -= 1
                if self.left < 0:
                    raise native.Fail("BFCArena: Failed to allocate memory for requested buffer of size 9")
            return self.inner.run(names, feed, options)

    class OnSmallGPU(measuring.Bench):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self._ways = [way for way in self._ways if way.name != "pool"]
            [plain] = [way.run.__self__ for way in self._ways if way.name == "plain"]  # type: ignore[attr-defined]  # set here, or of the type that it is
            for session, left in ((self.session, calls), (plain, calls_of_plain)):
                session._sess = Memory(session._sess, left)
            self.session.device = Device("cuda", 0, *[None] * 5)
            del self.session._gpu_runner

    bench.Bench = OnSmallGPU  # type: ignore[attr-defined]  # its name in there
    sys.exit(main(["bench", model, "--allow-cpu", "--rounds", "5", "--batch", "1,8", *sys.argv[5:]]))
