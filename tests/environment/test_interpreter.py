"""Which program runs Python in this environment, where sys.executable does not say it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.lab.fixtures import Lab

BASE = os.path.realpath(sys.executable)
FOUND = """
import sys
sys.executable = {said!r}
from ortgpu.environment import child
from ortgpu.environment.packages.installer import read_installer
ended = child.run_python("print([sys.prefix])", timeout=60)
report([read_installer().install.split(" -m ")[0], ended.output.strip(), repr([sys.prefix])])
"""


@pytest.mark.parametrize("said", [BASE, "/usr/local/bin/uwsgi", "/no/such/program"])
def test_a_server_that_says_another(lab: Lab, said: str) -> None:
    """That the environment was made from, as uWSGI with ``--home``; and itself, as uWSGI where it was compiled."""
    machine = lab.machine()
    installs_with, ran_in, prefix = machine.run(FOUND.format(said=said)).ok().json
    assert Path(installs_with).parent == machine.overlay.python.parent
    assert ran_in == prefix


def test_one_by_a_name_of_its_own_is_taken_at_its_word(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine()
    mine = machine.overlay.python.with_name("mypython")
    mine.symlink_to(machine.overlay.python)
    assert machine.run(FOUND.format(said=str(mine))).ok().json[0] == str(mine)


def test_none_is_none(lab: Lab) -> None:
    installs_with, ran_in, _ = lab.machine().run(FOUND.format(said=None)).ok().json
    assert (installs_with, ran_in) == ("python3", "")
