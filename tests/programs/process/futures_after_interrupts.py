"""Programs of ``tests/process/test_interrupts.py``."""

from __future__ import annotations

import threading

from tests.programs.pools import Gate, Watched, feed, open_pool, pool_threads, value_of
from tests.support.children import report


def a_future_whose_lock_an_interrupt_left_held_stops_nobody_else() -> None:
    made = open_pool(1)
    gate = Gate()
    Watched(made.sessions[0], gate)
    held = [made.submit(None, feed(n)) for n in range(5)]  # the last two wait when they are lost
    gate.wait_for(3)
    for future in held:
        future._condition.acquire()
    gate.opened.set()
    elsewhere = []

    def others():
        elsewhere.append(value_of(made.run(None, feed(7))))
        elsewhere.extend(value_of(each) for each in made.map([feed(n) for n in range(10)]))
        elsewhere.append(value_of(made.submit(None, feed(8)).result()))

    thread = threading.Thread(target=others)
    thread.start()
    thread.join(30)
    report("others", elsewhere)
    report("again", [value_of(future.result(30)) for future in held])
    made.close()
    report("left", pool_threads())
