"""The text of a run: reading, encoding as tokens, and generation with a trained model."""
