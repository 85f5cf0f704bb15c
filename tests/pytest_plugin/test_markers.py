"""What a test asks for with ``@pytest.mark.ortgpu``, and which GPUs it then gets."""

from __future__ import annotations

import pytest

from ortgpu.errors import GPUError
from ortgpu.testing import GPURequirement, UnmetRequirementError, choose_gpus
from tests.pytest_plugin.inner import NO_GPU, Faked, GiB, Run, gpu
from tests.support.children import program_text

pytest_plugins = "pytester"

# Markers

WRONG = {
    "memroy='8GiB'": "memroy is not known: there are count, memory, compute_capability, allow_cpu",
    "2": "takes its values by name, not 2",
    "count=0": "count=0 is not a number of GPUs: a positive int",
    "count=True": "count=True is not a number of GPUs: a positive int",
    "count='2'": "count='2' is not a number of GPUs: a positive int",
    "memory='8 GB of it'": (
        'memory=\'8 GB of it\' is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"'
    ),
    "memory='-1GiB'": 'memory=\'-1GiB\' is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"',
    "memory=0": 'memory=0 is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"',
    "memory=8.5": 'memory=8.5 is not an amount: bytes as an int, or a text like "8GiB" or "500 MB"',
    "compute_capability=8.0": "compute_capability=8.0 is not a pair of numbers like (8, 0)",
    "compute_capability=(8,)": "compute_capability=(8,) is not a pair of numbers like (8, 0)",
    "compute_capability='8.0'": "compute_capability='8.0' is not a pair of numbers like (8, 0)",
}


@pytest.mark.parametrize("mode", ["auto", "require", "skip"])
@pytest.mark.parametrize("also", ["", "@pytest.mark.xfail"])
def test_a_wrong_marker_is_an_error_of_its_test(
    pytester: pytest.Pytester, run: Run, faked: Faked, mode: str, also: str
) -> None:
    """Wherever it runs: that the test would be skipped here anyway, or may fail, hides nothing."""
    faked.has(gpu(0))
    lines = ["import pytest", "def test_plain(): pass"]
    for number, wrong in enumerate(WRONG):
        lines += [f"@pytest.mark.ortgpu({wrong})", also, f"def test_{number}(): print('a test ran')"]
    pytester.makepyfile("\n".join(lines))
    result = run(f"--ortgpu={mode}", "-s")
    result.assert_outcomes(passed=1, errors=len(WRONG))
    for number, message in enumerate(WRONG.values()):
        assert f" test_{number} ___" in result.stdout.str()
        assert f"\n@pytest.mark.ortgpu: {message}\n" in result.stdout.str()
    result.stdout.no_fnmatch_line("*a test ran*")


def test_a_wrong_marker_above_a_right_one(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    pytester.makepyfile(program_text("pytest_plugin.a_wrong_marker_above_a_right_one"))
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["@pytest.mark.ortgpu: cuont is not known: *"])


def test_the_closest_word_counts(pytester: pytest.Pytester, run: Run, faked: Faked) -> None:
    faked.has(gpu(0), gpu(1), gpu(2))
    faked.memory = {f"GPU-{number}": (number * GiB, 8 * GiB) for number in range(3)}
    pytester.makepyfile(program_text("pytest_plugin.the_closest_word_counts"))
    run().assert_outcomes(passed=2, skipped=1)


@pytest.mark.parametrize("mode", ["auto", "skip"])
@pytest.mark.parametrize("problem", [None, NO_GPU], ids=["one GPU", "none"])
def test_a_skip_names_the_line_of_its_test(
    pytester: pytest.Pytester, run: Run, faked: Faked, mode: str, problem: GPUError | None
) -> None:
    """As pytest does for a skipif: the summary has no names, and a line of the plugin would tell nobody anything."""
    faked.has(*([] if problem else [gpu(0)]), problem=problem)
    path = pytester.makepyfile(program_text("pytest_plugin.a_skip_names_the_line_of_its_test"))
    why = "needs a GPU, *" if mode == "skip" else "no GPU can be used: *" if problem else "needs 2 GPUs; found *"
    result = run(f"--ortgpu={mode}")
    result.assert_outcomes(skipped=6)
    places = {4: 1, 9: 2, 17: 1, 26: 1, 31: 1}
    result.stdout.fnmatch_lines(
        [f"SKIPPED [[]{number}[]] {path.name}:{line}: {why}" for line, number in places.items()], consecutive=True
    )


def test_a_skip_of_a_fixture_that_is_asked_for_late_names_the_line(
    pytester: pytest.Pytester, run: Run, faked: Faked
) -> None:
    path = pytester.makepyfile(
        """
        def test_it(request):
            assert True
            request.getfixturevalue("gpu_device")
        """
    )
    run().stdout.fnmatch_lines([f"SKIPPED [[]1[]] {path.name}:1: no GPU can be used: *"])


# What a test asks for


@pytest.mark.parametrize(
    ("written", "size"),
    [("8GiB", 8 * GiB), ("8 GiB", 8 * GiB), ("1.5gib", 3 * GiB // 2), ("500MB", 500_000_000), ("64 B", 64), (7, 7)],
)
def test_amounts_of_memory(written: object, size: int) -> None:
    assert GPURequirement.parse(memory=written).memory == size


def test_a_requirement_says_what_it_is() -> None:
    requirement = GPURequirement.parse(count=2, memory="8GiB", compute_capability=[8, 0])
    assert str(requirement) == "2 GPUs with 8.0 GiB free and compute capability 8.0"
    assert str(GPURequirement()) == "a GPU"


@pytest.mark.parametrize(
    ("first", "count", "chosen"),
    [(0, 1, [0]), (1, 1, [1]), (5, 1, [1]), (2, 2, [2, 3]), (3, 2, [3, 0]), (9, 4, [1, 2, 3, 0])],
)
def test_choosing_begins_with_a_number(first: int, count: int, chosen: list[int]) -> None:
    gpus = [gpu(number) for number in range(4)]
    assert [found.ordinal for found in choose_gpus(gpus, GPURequirement(count), first=first)] == chosen


@pytest.mark.parametrize(("lowest", "does"), [((9, 0), True), ((8, 9), True), ((9, 1), False), ((10, 0), False)])
def test_both_numbers_of_a_compute_capability_count(lowest: tuple[int, int], does: bool) -> None:
    gpus, requirement = [gpu(0, compute_capability=(9, 0))], GPURequirement(compute_capability=lowest)
    if does:
        assert choose_gpus(gpus, requirement) == tuple(gpus)
        return
    with pytest.raises(UnmetRequirementError, match=r"cuda:0 .*: compute capability 9\.0"):
        choose_gpus(gpus, requirement)


def test_choosing_passes_over_what_does_not_do(faked: Faked) -> None:
    gpus = [gpu(0, compute_capability=(7, 5)), gpu(1), gpu(2), gpu(3, uuid=None, compute_capability=None)]
    faked.memory = {"GPU-0": (9 * GiB, 80 * GiB), "GPU-1": (GiB, 80 * GiB), "GPU-2": (9 * GiB, 80 * GiB)}
    requirement = GPURequirement(2, 8 * GiB, (8, 0))
    assert [found.ordinal for found in choose_gpus(gpus, requirement)] == [2, 3]  # what is unknown may do
    with pytest.raises(UnmetRequirementError) as raised:
        choose_gpus(gpus[:3], requirement)
    assert str(raised.value) == (
        "needs 2 GPUs with 8.0 GiB free and compute capability 8.0; found "
        "cuda:0 (NVIDIA H200, GPU-0): compute capability 7.5; "
        "cuda:1 (NVIDIA H200, GPU-1): 1.0 GiB of 80.0 GiB free; cuda:2 (NVIDIA H200, GPU-2)"
    )
    with pytest.raises(UnmetRequirementError, match="needs a GPU; found none"):
        choose_gpus([], GPURequirement())
