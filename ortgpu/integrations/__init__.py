"""GPU sessions inside other frameworks. Import each integration by its name; it needs the extra of that name."""
