"""The Triton kernels, imported only when they are needed because importing Triton is slow."""
