import json
import os
import sys

outcomes, reasons = {}, {}


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        name = report.nodeid.partition("::")[2]
        outcomes[name] = report.outcome
        reasons[name] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_sessionfinish():
    maps = open("/proc/self/maps").read()
    loaded = [name for name in ("libcuda.so", "libnvidia-ml.so", "libonnxruntime", "libcudart.so") if name in maps]
    seen = {"outcomes": outcomes, "reasons": reasons, "loaded": loaded, "nvml": "pynvml" in sys.modules}
    with open(os.environ["CHILD_REPORT"], "w") as file:
        json.dump(["json", seen], file)
