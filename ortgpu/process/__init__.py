"""Threads, locks, signals, channels and the language of this process: everything else stands on it."""
