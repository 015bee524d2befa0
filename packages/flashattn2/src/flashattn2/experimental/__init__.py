"""The kernels written for Hopper's warps by hand, in Gluon; imported only where it is asked for."""
