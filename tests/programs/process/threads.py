"""Programs of ``tests/process/test_threads.py``."""

from __future__ import annotations


def signals_do_not_keep_a_thread_waiting_for_a_notice() -> None:
    import signal
    import threading
    import time

    from ortgpu.process.threads import Notice
    from tests.support.children import report

    notice, rounds = Notice(), 0

    def wait():
        nonlocal rounds
        while True:
            notice.take(0.0005)
            rounds += 1

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    signal.signal(signal.SIGALRM, lambda *_: None)
    for _ in range(2000):
        signal.pthread_kill(thread.ident, signal.SIGALRM)
        time.sleep(0.0004)
    before = rounds
    time.sleep(1)
    report("goes on", rounds > before)
