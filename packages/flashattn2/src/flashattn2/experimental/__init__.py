"""Experimental Gluon kernels for Hopper, which schedule their warps explicitly.

`backend="auto"` selects them for long sequences: see `flashattn2.dispatch`.  The modules are
imported on first use, because they need Triton.
"""
