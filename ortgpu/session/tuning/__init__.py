"""Measure candidate settings of a model in a child process, and compare every result."""
