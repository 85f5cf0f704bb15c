"""Fixes: commands that install, what only the system can mend, and releases that exist."""
