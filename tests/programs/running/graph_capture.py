"""Programs of ``tests/running/test_graph_capture.py``."""

from __future__ import annotations

import logging

from ortgpu.running.cuda_graph import MAX_CAPTURES
from tests.programs.on_cpu import NEG, feeds, report
from tests.programs.with_graphs import bound, capturing


def no_more_than_so_many_shapes_are_ever_captured() -> None:
    session = capturing(NEG)
    warned = []
    logging.getLogger("ortgpu").addFilter(lambda record: warned.append(record.getMessage()))
    right = [session.run(None, feeds(2, size)[1])[0].tolist() == [-1] * size for size in range(1, 2 * MAX_CAPTURES)]
    right += [session.run(None, feeds(3, size)[2])[0].tolist() == [-2] * size for size in (1, MAX_CAPTURES)]
    report([all(right), sorted(set(bound)) == list(range(1, MAX_CAPTURES + 1)), len(bound) - MAX_CAPTURES, warned])
