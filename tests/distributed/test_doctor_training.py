"""``ortgpu doctor --profile training``: a table, checks and tries of its own."""

from __future__ import annotations

import json
import re

from tests.lab.fixtures import Lab
from tests.support.doctor_runs import EVERYTHING, doctor, document


def test_training_has_a_table_and_checks_of_its_own(lab: Lab) -> None:
    found = document(lab.machine(**EVERYTHING), "--no-probe", "--profile", "training")
    assert {"NCCL", "MPI", "onnxruntime-training"} <= {row["name"] for row in found["requirements"]}
    assert found["problems"][0]["code"] == "training-unavailable", "what is installed is for inference"
    assert found["problems"][0]["details"]["reason"] == "not installed"
    assert set(found["training"]) == {"environment", "ssh", "shared_folder"}
    shown = doctor(lab.machine(**EVERYTHING), "--profile", "training", "--verbose")
    assert shown.returncode == 1
    for row in ("NCCL", "MPI", "network"):
        assert re.search(rf"^  {row} ", shown.stdout, re.MULTILINE)
    assert "training: FAILED, ModuleNotFoundError: No module named 'onnxruntime.training'" in shown.stdout


def test_training_tries_a_folder_and_hosts_where_asked(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    options = ("--no-probe", "--profile", "training", "--shared-folder", str(lab.folder), "--ssh", "-x")
    found = document(machine, *options, env={"PATH": str(lab.folder)})
    assert found["training"]["shared_folder"]["world_size"] == 1
    assert found["training"]["ssh"][0]["host"] == "-x"
    assert "distributed-error" in {problem["code"] for problem in found["problems"]}
    shown = doctor(machine, *options, env={"PATH": str(lab.folder)}).stdout
    assert "written and read by this process alone" in shown
    assert "ssh to -x cannot be tried: there is no ssh program on PATH" in shown


def test_a_rank_that_is_not_known_is_an_error_in_the_document(lab: Lab) -> None:
    options = ("--no-probe", "--profile", "training", "--shared-folder", str(lab.folder))
    result = doctor(lab.machine(**EVERYTHING), "--json", *options, env={"RANK": "1"})
    assert result.returncode == 1, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["ok"], found["error"]["type"]) == (1, False, "LauncherConflictError")
    shown = doctor(lab.machine(**EVERYTHING), *options, env={"RANK": "1"})
    assert shown.returncode == 1
    assert shown.stderr.startswith("LauncherConflictError: ")
