"""Algorithms that send messages, and the table of the function that runs each collective."""
