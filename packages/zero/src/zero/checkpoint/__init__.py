"""Sharded checkpoints that can be loaded on any number of ranks."""
