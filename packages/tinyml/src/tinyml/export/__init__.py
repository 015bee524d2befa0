"""Compressed models and adapters as files."""
