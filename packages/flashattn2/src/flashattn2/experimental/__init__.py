"""Experimental backends.

Status: experimental.  The kernels were compiled for sm_90, and their lines and schedules were
tested in Python; they never ran on a GPU.  `backend="auto"` does not select them.

Gluon kernels for Hopper with explicitly scheduled warps, imported only for `backend="gluon"`.
"""
