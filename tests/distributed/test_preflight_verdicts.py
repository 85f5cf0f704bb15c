"""What is made of what the ranks said: the same, in whatever order it came."""

from __future__ import annotations

import itertools

from ortgpu.distributed.verdicts import RUN, Known, Position, out_of_step


def test_ranks_out_of_step_are_told_alike_whoever_was_heard_of_first() -> None:
    positions = {
        0: Position(RUN, "all_reduce of 8 float32"),
        1: Position(RUN, "all_gather of 8 float32"),
        2: Position(RUN + 1, "reduce_scatter of 8 float32"),
        3: Position(RUN + 1, "all_gather of 8 float32"),
    }
    told = set()
    for order in itertools.permutations(positions):
        error = out_of_step(Known(4, "here", positions={rank: positions[rank] for rank in order}))
        assert error is not None
        told.add((str(error), error.phase, tuple(error.ranks)))
    ((_, phase, ranks),) = told
    assert phase == "all_reduce of 8 float32"
    assert ranks == (0, 1)
