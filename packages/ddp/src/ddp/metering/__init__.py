"""Bytes, calls and times of each step, and charts of them."""
