"""Hooks and callbacks of autograd."""
