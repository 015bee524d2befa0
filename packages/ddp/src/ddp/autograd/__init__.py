"""Hooks and callbacks of autograd, and calls that `torch.compile` does not trace."""
