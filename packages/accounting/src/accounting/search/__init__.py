"""Which plan to run."""
