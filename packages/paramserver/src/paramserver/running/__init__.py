"""Processes of servers and workers: their start, supervision and end."""
