"""Figures of sessions: measured, and drawn."""
