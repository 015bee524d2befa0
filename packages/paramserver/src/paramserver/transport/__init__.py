"""Transports, which carry messages and data between processes."""
