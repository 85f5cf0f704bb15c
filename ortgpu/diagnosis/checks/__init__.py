"""Checks: each a pure function from facts to an error that has not been raised yet, or to nothing."""
