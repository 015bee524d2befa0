"""Time of collectives, of training steps, and of runs with failures."""
