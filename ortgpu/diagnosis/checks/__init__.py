"""Checks: pure functions from facts to an error that has not been raised yet, or None."""
