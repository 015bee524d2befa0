"""A model of the communication that remains after the backward pass, and the best bucket size.

There are n buckets of s/n bytes each. The bandwidth is w bytes per second, and the latency is o
seconds per call. All buckets except the last are sent while the backward pass computes. After the
backward pass, the last bucket and the latencies of all calls remain:

    overhead(n) = s / (n w) + n o,    minimal at s/n = sqrt(s o w), where it is 2 sqrt(s o / w).
"""

from __future__ import annotations

import math


def overhead_seconds(
    model_bytes: float, bandwidth: float, latency: float, num_buckets: float
) -> float:
    """Return the seconds from the end of the backward pass to the last gradient: s/(n w) + n o.

    `bandwidth` is in bytes per second, and `latency` is in seconds per call. Raises `ValueError`
    unless `latency` is at least 0 and the other arguments are positive.
    """
    _check_positive(model_bytes=model_bytes, bandwidth=bandwidth, num_buckets=num_buckets)
    if not latency >= 0:
        raise ValueError(f"expected latency >= 0, got latency={latency}")
    return model_bytes / (num_buckets * bandwidth) + num_buckets * latency


def optimal_bucket_bytes(model_bytes: float, bandwidth: float, latency: float) -> float:
    """Return the bucket size that minimizes `overhead_seconds`: sqrt(s o w) bytes.

    Raises `ValueError` unless all arguments are positive.
    """
    _check_positive(model_bytes=model_bytes, bandwidth=bandwidth, latency=latency)
    return math.sqrt(model_bytes * latency * bandwidth)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"expected {name} > 0, got {name}={value}")
