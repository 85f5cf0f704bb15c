"""A program that calls ortgpu.install() and starts others: ``guarded_children.py MODEL WAY...``.

It reports for each way what a session that asks for CUDA raised in the child, or on which providers it is.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys

ALONE = "import sys; from guarded_children import open_session; print(open_session(sys.argv[1]))"


def open_session(model: str) -> str:
    import onnxruntime

    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    try:
        return ",".join(onnxruntime.InferenceSession(model, providers=providers).get_providers())
    except Exception as error:
        return type(error).__name__


def open_in_child(way: str, model: str) -> str:
    if way == "subprocess":
        command = [sys.executable, "-c", ALONE, model]
        folder = os.path.dirname(os.path.abspath(__file__))
        return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    context = multiprocessing.get_context(way)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(open_session, model).result()


if __name__ == "__main__":
    import ortgpu
    from tests.support.children import report

    model, *ways = sys.argv[1:]
    before = dict(os.environ)
    ortgpu.install(except_=os.environ.get("TESTS_EXCEPT", "").split())
    found = {way: open_in_child(way, model) for way in ways}
    changed = sorted(name for name in os.environ if os.environ[name] != before.get(name))
    ortgpu.uninstall()
    found["uninstalled"] = open_in_child("spawn", model)
    report("json", {**found, "changed": changed, "restored": dict(os.environ) == before})
