"""Measurement: steps and their phases, interleaved timings and a reference matmul."""
