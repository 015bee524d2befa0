"""Algorithms that send messages, and a table that maps each collective to its function."""
