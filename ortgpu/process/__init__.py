"""Threads, locks, signals and the language of this process: what everything else stands on."""
