"""Algorithms that send messages, and `dispatch`, which runs each call by one of the algorithms."""
