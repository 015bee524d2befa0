"""Integrations with torch's SDPA and with transformers."""
