"""Programs of ``tests/support/test_fork_server.py``."""

import os
import signal
import sys
import threading
import time

import onnxruntime  # noqa: F401 - it has descriptors of its own

from tests.support.children import child_environment, report
from tests.support.fork_server import find_server, start_forked

CHANGES = ("CHILD_REPORT", "PYTEST_CURRENT_TEST")  # variables that differ from child to child


def what_a_program_sees() -> None:
    main = sys.modules["__main__"]
    streams = [[stream.encoding, stream.errors, stream.line_buffering] for stream in (sys.stdout, sys.stderr)]
    report("main", [main.__name__, getattr(main, "__file__", None), str(main.__spec__ and main.__spec__.name)])
    report("arguments", [sys.argv, sys.orig_argv, sys.path, os.getcwd()])
    report("variables", {name: value for name, value in os.environ.items() if name not in CHANGES})
    report("streams", [streams, os.isatty(0), os.isatty(1), sorted(os.listdir("/proc/self/fd"))])
    report("process", [threading.active_count(), os.getsid(0) == os.getpid(), str(signal.getsignal(signal.SIGINT))])
    print("out")
    print("error", file=sys.stderr)
    if sys.argv[-1] == "3":
        sys.exit(3)


def a_child_of_its_own() -> None:
    child = os.fork()
    if child:
        report("child", child)
    time.sleep(60)


def ended_by_a_signal() -> None:
    env = child_environment()
    find_server(env)
    server, child = find_server(env), start_forked(["-c", "import time; time.sleep(60)"], env, [0, 1, 2])
    report("processes", [server.process.pid, child.pid])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a program started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), int(sys.argv[-1]))
    time.sleep(60)
