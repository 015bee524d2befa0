"""Attention for other people's models."""
