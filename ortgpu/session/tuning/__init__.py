"""Measure which settings suit a model, each in a child process, and compare every result."""
