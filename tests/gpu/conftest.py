"""GPU tests: skipped, with a reason that can be checked, where the CUDA driver shows no GPU.

ORTGPU_REQUIRE_GPU=1 turns that skip into a failure, for hosts that are meant to have one; so does --ortgpu=require,
where ortgpu's own plugin is loaded. Without the plugin these tests run all the same.
Nothing in this process touches CUDA: tests read what child processes reported, so a crash costs the tests of one child.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import child_environment, run_child
from tests.support.this_machine import GPUs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """More time than other tests have: a test's setup can include an export by PyTorch, or a thousand sessions."""
    if config.pluginmanager.hasplugin("timeout"):  # without the plugin its marker is unknown, which is an error
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session", autouse=True)
def every_test_needs_gpus(gpus: GPUs) -> None:
    """Skipped, or failed, by the fixture."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("ORTGPU_TEST_MODELS")
    if kept:
        return Path(kept).absolute()
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def make_model(model_folder: Path) -> Callable[[str], tuple[Path, str]]:
    """Path and recipe of a model by name, made by a child the first time."""
    made: dict[str, dict[str, Any]] = {}

    def get(name: str) -> tuple[Path, str]:
        if name not in made:
            # PyTorch takes seconds to import: both models that need it are made by one child
            names = ["resnet50", "encoder"] if name in ("resnet50", "encoder") else ["mlp", "conv"]
            command = [sys.executable, "-m", "benchmarks.models", "--folder", str(model_folder), *names]
            child = run_child(command, env=child_environment(), deadline=200)
            made.update({each: child.reports.get(each, {"error": child.output}) for each in names})
        if "error" in made[name]:
            pytest.fail(f"the model {name} could not be made: {made[name]['error']}", pytrace=False)
        return Path(made[name]["path"]), str(made[name]["recipe"])

    return get


@pytest.fixture(scope="session")
def mlp(make_model: Callable[[str], tuple[Path, str]]) -> Path:
    return make_model("mlp")[0]


@pytest.fixture(scope="session")
def conv(make_model: Callable[[str], tuple[Path, str]]) -> Path:
    return make_model("conv")[0]


@pytest.fixture(scope="session")
def resnet50(make_model: Callable[[str], tuple[Path, str]]) -> Path:
    return make_model("resnet50")[0]
