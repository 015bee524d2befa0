"""Hooks and callbacks of autograd: when gradients are final, and when a backward pass ends."""
