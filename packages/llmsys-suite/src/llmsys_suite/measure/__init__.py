"""Measurement of steps and their phases, interleaved timings, clocks and counters."""
