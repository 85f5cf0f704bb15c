"""Fixtures that every test may ask for."""

import os

import pytest

# One variable for these tests, with ortgpu's plugin and without it: see tests/gpu/conftest.py.
if os.environ.get("ORTGPU_REQUIRE_GPU") == "1":
    os.environ.setdefault("ORTGPU_GPU", "require")

pytest.register_assert_rewrite("tests.lab")

from tests.lab.fixtures import lab, models, stubs, wheels  # noqa: E402 - after the rewriting of its assertions is on

__all__ = ["lab", "models", "stubs", "wheels"]
