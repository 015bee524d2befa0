"""Bytes, calls and times of each step, charts of them, and a model of the overhead."""
