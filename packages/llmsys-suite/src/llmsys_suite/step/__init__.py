"""One training step of one model, timed in separate processes by size, context and precision."""
