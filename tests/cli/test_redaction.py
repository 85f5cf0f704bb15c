"""``--redact``: what names a person or a host is taken out, and everything else stays."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ortgpu.cli.redaction import Redactor, redact, redactor_for_this_process
from ortgpu.errors import NoDeviceError, PlacementError, catalogue, shell
from ortgpu.provider.placement import PlacedNode
from tests.lab.fixtures import Lab
from tests.support.doctor_runs import EVERYTHING, doctor

REDACTOR = Redactor(
    ["/home/alice", "/data/people/alice", "/"], ["alice", "al", "root", ""], ["box17.example.org", "box17"]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/alice/venv/bin/python", "~/venv/bin/python"),
        ("'/home/alice'", "'~'"),
        ("/home/alice2/x:/home/bob/y", "/home/<user>/x:/home/<user>/y"),
        ("/data/people/alice/x", "~/x"),
        ("/scratch/alice/x and pytest-of-alice", "/scratch/<user>/x and pytest-of-<user>"),
        ("/Users/Carol/x, /var/home/dave/x", "/Users/<user>/x, /var/home/<user>/x"),
        (r"C:\Users\Erin\AppData", r"C:\Users\<user>\AppData"),
        (r"C:\Users\Erin Mc Loughlin\AppData", r"C:\Users\<user>\AppData"),
        (r"'C:\Users\Erin Loughlin'", r"'C:\Users\<user>'"),
        (r"D:/Users/Erin Loughlin", "D:/Users/<user>"),
        (r"C:\Users\Erin, who is not there", r"C:\Users\<user>, who is not there"),
        ("/nfs/home/frank/x:/users/grace/y", "/nfs/home/<user>/x:/users/<user>/y"),
        ("/mnt/disk/home2/heidi and /gpfs/users/ivan", "/mnt/disk/home2/<user> and /gpfs/users/<user>"),
        ("/x:https://judy:s3cret@index.corp/simple:/y", "/x:https://<credentials>@index.corp/simple:/y"),
        ("https://t0ken@index.corp/simple", "https://<credentials>@index.corp/simple"),
        ("s3cret@index.corp/simple", "<credentials>@index.corp/simple"),
        ("nccl4py>=0.6 @ file:///x", "nccl4py>=0.6 @ file:///x"),
        ("hostname=box17.example.org ;", "hostname=<host> ;"),
        ("on BOX17", "on <host>"),
        ("also, malice, /opt/al/x", "also, malice, /opt/<user>/x"),
        ("as root in /usr/lib/wsl, / and ~", "as root in /usr/lib/wsl, / and ~"),
        ("/opt/app/home/lib/x", "/opt/app/home/lib/x"),
    ],
)
def test_redaction_of_a_text(text: str, expected: str) -> None:
    assert REDACTOR(text) == expected


def test_redaction_keeps_what_things_are() -> None:
    node = PlacedNode("/home/alice/n", "Conv", "", "CPUExecutionProvider", "compute")
    error = PlacementError(
        "in /home/alice",
        evidence=["alice"],
        fixes=[shell("/home/alice/bin/pip install x", needs="root")],
        others=[NoDeviceError("alice")],
        consequence_of="no-device",
        severity="warning",
        nodes=(node,),
    )
    changed = redact(error, REDACTOR)
    assert type(changed) is PlacementError
    assert changed.summary == "in ~"
    assert changed.evidence == ("<user>",)
    assert (str(changed.fixes[0]), changed.fixes[0].kind, changed.fixes[0].needs) == (
        "~/bin/pip install x", "shell", "root"
    )  # fmt: skip
    assert changed.others[0].summary == "<user>"
    assert (changed.consequence_of, changed.severity) == ("no-device", "warning")
    assert changed.nodes == (dataclasses.replace(node, name="~/n"),)
    assert redact({"alice": ["alice", 1, None, frozenset({2})]}, REDACTOR) == {"alice": ["<user>", 1, None, {2}]}


def test_every_error_survives_redaction() -> None:
    for cls in catalogue().values():
        error = cls("alice", evidence=["alice"])
        assert redact(error, REDACTOR).as_dict() == cls("<user>", evidence=["<user>"]).as_dict()


@pytest.mark.parametrize("options", [("--json",), ("--verbose",)], ids=" ".join)
def test_redaction_of_a_whole_report(lab: Lab, options: tuple[str, ...]) -> None:
    home = lab.folder / "people" / "zaphodb"
    home.mkdir(parents=True)
    machine = lab.machine(
        **EVERYTHING,
        env={
            "HOME": str(home), "USER": "zaphodb", "LOGNAME": "zaphodb", "HOSTNAME": "heart-of-gold",
            "CUDA_HOME": f"{home}/cuda", "LD_PRELOAD": None,
            "PYTHONPATH": f"{home}/lib:/home/trillian/lib:/scratch/zaphodb/lib",
        },
    )  # fmt: skip
    plain = doctor(machine, "--no-probe", *options).stdout
    assert "zaphodb" in plain
    assert "trillian" in plain
    shown = doctor(machine, "--no-probe", "--redact", *options).stdout
    for name in ("zaphodb", "trillian", str(home)):
        assert name not in shown
    assert "~/cuda" in shown
    if options == ("--json",):
        assert set(json.loads(shown)) == set(json.loads(plain))


def test_this_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/elsewhere/of/fordp")
    monkeypatch.setenv("USER", "fordp")
    monkeypatch.setattr("socket.gethostname", lambda: "betelgeuse.example.org")
    replace = redactor_for_this_process()
    assert replace("/elsewhere/of/fordp/x on betelgeuse by fordp") == "~/x on <host> by <user>"
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("USER")
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid 12345")))
    assert redactor_for_this_process()("betelgeuse") == "<host>"


def test_redaction_of_what_training_adds(lab: Lab) -> None:
    home = lab.folder / "people" / "zaphodb"
    home.mkdir(parents=True)
    machine = lab.machine(**EVERYTHING, env={"HOME": str(home), "USER": "zaphodb", "OMPI_MCA_tmpdir": str(home)})
    options = ("--no-probe", "--json", "--profile", "training", "--shared-folder", str(home))
    assert "zaphodb" in doctor(machine, *options).stdout
    shown = doctor(machine, *options, "--redact").stdout
    assert "zaphodb" not in shown
    assert json.loads(shown)["training"]["environment"]["mpi"]["settings"] == {"OMPI_MCA_tmpdir": "<value>"}


def test_variables_of_launchers_lose_their_values() -> None:
    """They hold addresses, commands and tokens of the site."""
    given = {"OMPI_MCA_orte_hnp_uri": "10.0.0.1", "PMIX_SERVER_URI": "x", "PRTE_LAUNCHED": "1", "RANK": "1"}
    assert redact(given, str.upper) == {**dict.fromkeys(given, "<value>"), "RANK": "1"}
    assert redact({"OMPI_NUMBER": 1}, str.upper) == {"OMPI_NUMBER": 1}
