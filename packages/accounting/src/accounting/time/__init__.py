"""Time of messages, steps, and runs with failures."""
