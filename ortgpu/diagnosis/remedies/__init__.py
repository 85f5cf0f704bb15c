"""Fixes: commands that install, changes of the system, and releases that exist."""
