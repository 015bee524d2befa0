"""File formats of compressed models and adapters."""
