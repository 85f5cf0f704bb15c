"""Every error is explained, truly, in the one page that people write and `ortgpu explain` reads."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ortgpu
from ortgpu.__main__ import main
from ortgpu.cli.explain import sections
from ortgpu.diagnosis.messages import cuda_codes
from ortgpu.diagnosis.remedies import fixes as remedies
from ortgpu.diagnosis.remedies import releases
from ortgpu.errors import GPUError, catalogue

PACKAGE = Path(ortgpu.__file__).parent
PAGE = PACKAGE / "ERRORS.md"
LISTS = ("Causes", "How to confirm", "How to fix it")
NOT_RAISED = "*Never raised itself: catch it to catch all errors below it.*"


@dataclass(frozen=True)
class Explanation:
    """A section of the page, taken apart by the form that the page states at its top."""

    code: str
    title: str
    class_line: str
    is_raised: bool
    means: str
    comes_about: tuple[str, ...]
    tell: tuple[str, ...]
    mend: tuple[str, ...]
    sources: str

    @classmethod
    def of(cls, code: str) -> Explanation:
        title, text = sections()[code]
        found = re.fullmatch(
            r"`(?P<class>[^`\n]+)`\n\n"
            rf"(?P<unraised>{re.escape(NOT_RAISED)}\n\n)?"
            r"(?P<means>[^*\n][^\n]+)"
            + "".join(
                rf"(?:\n\n\*\*{name}\*\*\n\n(?P<list{number}>(?:[- ] [^\n]+\n?)+?))?"
                for number, name in enumerate(LISTS)
            )
            + r"(?:\n\nSources: (?P<sources>[^\n]+))?",
            text,
        )
        assert found, f"the section {code} does not have the form that the page states:\n{text}"
        comes_about, tell, mend = (_entries(found[f"list{number}"] or "") for number in range(len(LISTS)))
        is_raised = found["unraised"] is None
        sources = found["sources"] or ""
        return cls(code, title, found["class"], is_raised, found["means"], comes_about, tell, mend, sources)


def _entries(lines: str) -> tuple[str, ...]:
    """Entries of a list, and the commands in the fenced blocks between them."""
    assert re.fullmatch(r"(?:- \S[^\n]*\n?|  ```\n  \S[^\n]*\n  ```\n?)*", lines), lines
    return tuple(line[2:] for line in lines.splitlines() if line != "  ```")


EXPLANATIONS = [Explanation.of(code) for code in sections()]
BY_CODE = {explanation.code: explanation for explanation in EXPLANATIONS}
BY_NAME = pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda explanation: explanation.code)


def made_in_the_sources() -> set[str]:
    """Codes of the classes that some module makes an instance of."""
    sources = [path for path in PACKAGE.rglob("*.py") if path.name != "errors.py"]
    made = {name for path in sources for name in re.findall(r"\b(\w+Error)\(", path.read_text(encoding="utf-8"))}
    return {code for code, cls in catalogue().items() if cls.__name__ in made}


# The texts


def test_every_error_is_explained_in_the_order_of_the_catalogue() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(catalogue())
    index = re.findall(r"^( *)- \[`([\w-]+)`\]\(#([\w-]+)\): \S", page, re.MULTILINE)
    bases = {code: [base for base in cls.__mro__ if issubclass(base, GPUError)] for code, cls in catalogue().items()}
    assert index == [("  " * (len(found) - 1), code, code) for code, found in bases.items()]


@BY_NAME
def test_class_its_bases_and_its_fields_are_those_of_the_catalogue(explanation: Explanation) -> None:
    cls = catalogue()[explanation.code]
    fields = [name for name in cls.fields if name not in getattr(cls.__base__, "fields", ())] or list(cls.fields)
    expected = f"{cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"
    assert explanation.class_line == expected + (f"; fields: {', '.join(fields)}" if fields else "")


@BY_NAME
def test_text_is_whole(explanation: Explanation) -> None:
    assert explanation.means.endswith(".")
    assert not explanation.title.endswith(".")
    assert len(explanation.title) <= 66, "one line of the list"
    assert explanation.tell
    assert explanation.mend
    assert explanation.comes_about or issubclass_of_many(explanation)
    for text in (explanation.means, *explanation.comes_about, *explanation.tell, *explanation.mend):
        assert "  " not in text.partition("#")[0].rstrip()
        assert text.count("`") % 2 == 0, text


def issubclass_of_many(explanation: Explanation) -> bool:
    return bool(catalogue()[explanation.code].__subclasses__())


@BY_NAME
def test_it_is_said_whether_the_error_is_raised(explanation: Explanation) -> None:
    assert explanation.is_raised is (explanation.code in made_in_the_sources())
    assert explanation.is_raised or issubclass_of_many(explanation), "nothing raises it, and nothing is caught by it"


@BY_NAME
def test_fields_that_a_text_names_exist(explanation: Explanation) -> None:
    cls = catalogue()[explanation.code]
    known = {*cls.fields, "code", "summary", "evidence", "fixes", "others"}
    text = " ".join((explanation.means, *explanation.tell))
    named = set(re.findall(r"`error\.(\w+)`", text)) | set(re.findall(r"`(\w+)` (?:holds|is what)", text))
    assert named <= known


@BY_NAME
def test_names_of_variables_and_commands_are_real(explanation: Explanation) -> None:
    from ortgpu.cli import COMMANDS

    texts = " ".join((explanation.means, *explanation.comes_about, *explanation.tell, *explanation.mend))
    assert set(re.findall(r"`?\bortgpu ([a-z]+)\b(?= --|`)", texts)) <= set(COMMANDS)
    assert "https://" not in texts, "sources have a place of their own"


def test_numbers_in_the_texts_are_those_of_the_checks() -> None:
    def text(code: str) -> str:
        one = BY_CODE[code]
        return " ".join((one.means, *one.comes_about, *one.tell, *one.mend))

    lowest = (remedies.LOWEST_DRIVER, remedies.LOWEST_DRIVER_OF_WINDOWS)
    assert all(numbers[major] in text("driver-too-old") for numbers in lowest for major in (12, 13))
    assert f"`{releases.FOR_CUDA_12.requirement}`" in text("library-version")
    entries = [entry.partition(":")[0] for entry in BY_CODE["driver-unusable"].comes_about]
    ranges = [re.fullmatch(r"(\d+)(?: to (\d+))?", entry) for entry in entries]
    explained = {code for each in ranges if each for code in range(int(each[1]), int(each[2] or each[1]) + 1)}
    # an uncorrectable memory error says all there is to say in the error itself
    assert explained == set(cuda_codes.UNUSABLE) - {214}
    assert "226, 700, 702, 710, 714 to 719, 721 and 810" in text("poisoned-context")
    assert {226, 700, 702, 710, *range(714, 720), 721, 810} == cuda_codes.STICKY


def test_sticky_codes_are_those_of_cudas_header() -> None:
    folders = [Path(entry, "nvidia") for entry in sys.path]
    headers = [path for folder in folders for path in sorted(folder.glob("*/include/driver_types.h"))]
    if not headers:
        pytest.skip("no wheel of NVIDIA's here has driver_types.h: nvidia-cuda-runtime does")
    entries = re.findall(
        r"/\*\*((?:(?!\*/).)*)\*/\s*cudaError\w+\s*=\s*(\d+)", headers[0].read_text(encoding="utf-8"), re.DOTALL
    )
    says = {int(code): " ".join(comment.replace("*", " ").split()) for comment, code in entries}
    ending = {code for code, comment in says.items() if "process must be terminated and relaunched" in comment}
    assert 700 in ending
    assert ending - {911} <= cuda_codes.STICKY  # 911, an external device's, has this only in one of its two forms
    assert not ending & cuda_codes.LOST
    assert set(says) >= cuda_codes.LOST


def test_sources_are_threads_or_named_documents() -> None:
    for explanation in EXPLANATIONS:
        links = re.findall(r"\[([^\]]+)\]\((\S+?)\)", explanation.sources)
        assert len(set(links)) == len(links)
        for name, address in links:
            repository, _, number = name.partition("#")
            thread = f"https://github.com/{repository}/issues/{number}"
            assert address == (thread if number else f"https://{name}"), name
        assert "#" not in re.sub(r"\[[^\]]+\]\(\S+?\)", "", explanation.sources), "a thread without its address"


# The page


def test_page_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8")


def test_section_of_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--markdown", "driver-too-old"]) == 0
    section = capsys.readouterr().out
    assert section.startswith("## driver-too-old\n")
    assert section in PAGE.read_text(encoding="utf-8")


# The command


@pytest.mark.parametrize(
    "name", ["driver-not-found", "DriverNotFoundError", "DRIVER-NOT-FOUND", "driver_not_found", "driver-not-found:"]
)
def test_code_or_class_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("driver-not-found: ")
    assert "DriverNotFoundError(DriverError)" in shown
    for title in ("Causes", "How to confirm", "How to fix it", "Sources"):
        assert title in shown.splitlines()


@BY_NAME
def test_each_is_shown(explanation: Explanation, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", explanation.code]) == 0
    shown = capsys.readouterr().out
    for entry in (explanation.means, *explanation.comes_about, *explanation.tell, *explanation.mend):
        assert entry in shown
    assert ("Never raised itself" in shown) is not explanation.is_raised


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(catalogue())


def test_on_a_terminal_classes_to_catch_others_by_stand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", file := Terminal())
    assert main(["explain"]) == 0
    bold = re.findall(r"\x1b\[1m([\w-]+)", file.getvalue())
    assert bold == [code for code, cls in catalogue().items() if cls.__subclasses__()]


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ("driver-not-foun", "driver-not-found"),
        ("DriverNotFound", "driver-not-found"),
        ("library_missing", "library-"),
        ("", "lists all"),
        ("xyzzy", "lists all"),
    ],
)
def test_unknown_code(wrong: str, suggestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", wrong]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert suggestion in captured.err


def test_the_last_line_of_a_message_is_a_command_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    for cls in catalogue().values():
        last = str(cls("it failed")).splitlines()[-1]
        program, *arguments = last.removeprefix("More: ").split()
        assert program == "ortgpu"
        assert main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_no_error_is_left_out_by_the_help_of_python() -> None:
    """The catalogue is found by walking subclasses: a class outside of errors.py would be missing here."""
    assert {cls.code for cls in catalogue().values()} == set(BY_CODE)
    assert catalogue()["gpu-error"] is GPUError
