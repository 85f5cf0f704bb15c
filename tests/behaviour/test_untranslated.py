"""Faults in a program that has chosen a language of its own, as Qt does: the loader's words are in that language."""

from __future__ import annotations

import dataclasses
import struct
import sys
from pathlib import Path

import pytest

from tests.faults import CASES
from tests.lab.fixtures import Lab
from tests.support.children import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have another loader")

WORDS = {
    "": "Content-Type: text/plain; charset=UTF-8\n",
    "cannot open shared object file": "geht nicht auf",
    "No such file or directory": "gibt es nicht",
}
TRANSLATED = "libabsent.so: geht nicht auf: gibt es nicht"
ENGLISH = "libabsent.so: cannot open shared object file: No such file or directory"


@pytest.fixture
def prelude(tmp_path: Path) -> str:
    """Has the C library of a process speak the language of WORDS, with a catalogue as msgfmt writes it."""
    texts = sorted((key.encode(), value.encode()) for key, value in WORDS.items())
    start = 28 + 16 * len(texts)
    tables, strings = b"", b""
    for column in (0, 1):
        for pair in texts:
            tables += struct.pack("<2I", len(pair[column]), start + len(strings))
            strings += pair[column] + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, 0)
    catalogue = tmp_path / "xx" / "LC_MESSAGES" / "libc.mo"
    catalogue.parent.mkdir(parents=True)
    catalogue.write_bytes(header + tables + strings)
    made = f"""
import ctypes, locale, os
os.environ["LANGUAGE"] = "xx"
locale.setlocale(locale.LC_ALL, "C.UTF-8")
ctypes.CDLL(None).bindtextdomain(b"libc", {str(tmp_path).encode()!r})
def said():
    try:
        ctypes.CDLL("libabsent.so")
    except OSError as error:
        return str(error)
"""
    if run(made + "print(said())") != [TRANSLATED]:
        pytest.skip("this C library takes C.UTF-8 for English")
    return made


def run(code: str) -> list[str]:
    return run_python(code).ok().stdout.splitlines()


def test_for_a_while_in_one_thread(prelude: str) -> None:
    code = """
import threading
from ortgpu.process.untranslated import untranslated
with untranslated():
    print(said())
    other = threading.Thread(target=lambda: print(said()))
    other.start()
    other.join()
try:
    with untranslated():
        raise KeyError
except KeyError:
    print(said())
"""
    assert run(prelude + code) == [ENGLISH, TRANSLATED, TRANSLATED]


@pytest.mark.parametrize("name", ["library-of-the-system-missing", "libstdc++-is-not-on-the-system"])
def test_the_cause_is_found_all_the_same(lab: Lab, prelude: str, name: str) -> None:
    case = next(each for each in CASES if each.name == name)
    case = dataclasses.replace(case, prelude=prelude)
    error = case.open(lab, case.machine(lab)).error
    assert error is not None
    assert error.type == case.error, error.text
    assert [words for words in case.says if words not in error.text] == [], error.text
    assert [words for words in case.silent_about if words in error.text] == [], error.text
