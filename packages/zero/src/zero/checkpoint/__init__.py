"""Checkpoints of shards that any number of ranks can read."""
