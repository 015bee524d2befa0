"""Stages 1 and 2: each rank stores the optimizer state and averaged gradients of its shard."""
