"""Implementations of attention without Triton: tiled PyTorch, and torch's own CPU kernel."""
