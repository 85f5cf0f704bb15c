"""The child process in which a search tries its candidates."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ortgpu.environment.child_process import ChildFailedError
from ortgpu.session.tuning.children import Child
from tests.programs.child_functions import prepare_in_child, prepared_in_child, raise_key_error
from tests.support.children import child_environment, run_child

pytestmark = pytest.mark.timeout(300)  # a search is many children


def test_a_child_goes_on_after_what_it_raised_and_is_another_one_after_its_end() -> None:
    with Child() as child:
        child.prepare(prepare_in_child, "for all")
        processes: list[int] = []
        for _ in range(3):
            if len(processes) == 2:
                os.kill(processes[1], signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
            # A request may be on its way to a process that was killed, or may be the first of the next process.
            with pytest.raises((KeyError, ChildFailedError) if len(processes) == 2 else KeyError):
                child.ask(raise_key_error, timeout=60)
            processes.append(child.ask(os.getpid, timeout=60))
            assert child.ask(prepared_in_child, timeout=60) == "for all"
        assert processes[0] == processes[1]
        assert processes[1] != processes[2]
        with pytest.raises(ChildFailedError, match="did not end") as failure:
            child.ask(time.sleep, 60, timeout=0.01)
        assert failure.value.timed_out


def test_a_tuner_that_is_ended_leaves_nothing_behind(network: Path, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    environ = child_environment({"TMPDIR": str(tmp_path / "temporary"), "XDG_RUNTIME_DIR": str(tmp_path)})
    command = [sys.executable, "-m", "tests.programs.tuner", str(network), str(tmp_path / "record.json")]
    ended = run_child(command, env=environ, deadline=120)
    assert ended.returncode == -signal.SIGTERM, ended.output
    assert list((tmp_path / "temporary").glob("ortgpu*")) == []
