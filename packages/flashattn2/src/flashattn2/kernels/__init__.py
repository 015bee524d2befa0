"""The Triton kernels, imported only before they run because importing triton is slow."""
