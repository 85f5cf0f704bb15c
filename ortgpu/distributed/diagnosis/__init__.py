"""Judgement of the profile "training": checks, tries in child processes, published requirements."""
