"""Measure in a child process which settings suit a model, and compare every result."""
