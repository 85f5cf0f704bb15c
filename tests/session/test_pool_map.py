"""GPUSessionPool.map: in order, with so many feeds ahead and no more, and without leftovers."""

from __future__ import annotations

from tests.support.pool_child import child


def test_map_takes_no_more_feeds_than_allowed() -> None:
    found = child("""
        with open_pool() as made:
            taken = []
            def feeds():
                for n in range(50):
                    taken.append(n)
                    yield feed(n)
            ahead = [len(taken) - n - 1 for n, _ in enumerate(made.map(feeds(), in_flight=4))]
            report("ahead", ahead)
            taken.clear()
            ahead = [len(taken) - n - 1 for n, _ in enumerate(made.map(feeds()))]
            report("ahead by itself", max(ahead))
            taken.clear()
            made.map(feeds())
            report("not asked", taken)
            report("empty", list(made.map([])))
            report("named", [outputs[0].shape for outputs in made.map([feed(1)], output_names=["y"])])
            report("bad", [outcome(lambda: made.map([], in_flight=0)), outcome(lambda: made.map([], in_flight="many"))])
    """)
    assert found["ahead"] == [3] * 47 + [2, 1, 0]
    assert found["ahead by itself"] == 11
    assert found["not asked"] == []
    assert found["empty"] == []
    assert found["named"] == [[4]]
    assert [each["type"] for each in found["bad"]] == ["ValueError", "TypeError"]


def test_map_raises_at_the_place() -> None:
    found = child("""
        with open_pool() as made:
            def feeds(wrong):
                for n in range(30):
                    if n == 5:
                        yield wrong()
                    yield feed(n)
            def collect(wrong):
                seen = []
                done = outcome(lambda: seen.extend(value_of(outputs) for outputs in made.map(feeds(wrong))))
                return [seen, done["type"], made.queued, [each.in_flight for each in made.health()]]
            report("request", collect(lambda: {"x": np.ones(5, np.float32)}))
            report("feeds", collect(lambda: 1 // 0))
            report("after", value_of(made.run(None, feed(1))))
    """)
    assert found["request"] == [[0, 1, 2, 3, 4], "InvalidArgument", 0, [0, 0]]
    assert found["feeds"] == [[0, 1, 2, 3, 4], "ZeroDivisionError", 0, [0, 0]]
    assert found["after"] == 1


def test_map_that_is_left_early_leaves_nothing_running() -> None:
    found = child("""
        with open_pool(1) as made:
            watched = Watched(made.sessions[0])
            results = made.map((feed(n) for n in itertools.count()), in_flight=5)
            report("first", value_of(next(results)))
            results.close()
            report("left", [len(made._service.waiting), made.health()[0].in_flight, watched.calls <= 5])
            report("after", value_of(made.run(None, feed(1))))
    """)
    assert found["first"] == 0
    assert found["left"] == [0, 0, True]
    assert found["after"] == 1


def test_an_interrupt_while_it_waits_for_a_result_leaves_nothing_running() -> None:
    """The run whose result is waited for reads the caller's arrays, as those after it do."""
    found = child("""
        with open_pool(1) as made:
            watched = Watched(made.sessions[0], gate := Gate())
            results = made.map([feed(1)] * 3, in_flight=1)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background
            def interrupt():
                gate.wait_for(1)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)
                gate.opened.set()
            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            raised = outcome(lambda: next(results))["type"]
            report("left", [raised, watched.at_once, made.health()[0].in_flight, watched.calls, next(results, "ended")])
            interrupting.join()
            report("after", value_of(made.run(None, feed(1))))
    """)
    assert found["left"] == ["KeyboardInterrupt", 0, 0, 1, "ended"]
    assert found["after"] == 1
