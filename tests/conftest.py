"""Fixtures that every test may ask for."""

import pytest

pytest.register_assert_rewrite("tests.lab")

from tests.lab.fixtures import lab, models, stubs, wheels  # noqa: E402 - after the rewriting of its assertions is on

__all__ = ["lab", "models", "stubs", "wheels"]
