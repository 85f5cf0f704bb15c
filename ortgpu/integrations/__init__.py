"""GPU sessions inside other frameworks. Each is imported by its name, and needs the extra of that name."""
