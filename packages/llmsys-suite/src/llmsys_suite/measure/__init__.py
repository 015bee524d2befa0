"""Measurement: steps and their phases, interleaved timings and clocks."""
