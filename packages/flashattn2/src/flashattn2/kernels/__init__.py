"""Triton kernels; imported only where they run, since importing triton is not free."""
