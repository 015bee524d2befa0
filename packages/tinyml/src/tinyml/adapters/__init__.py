"""Trainable additions to a frozen model: low-rank adapters and soft prompts."""
