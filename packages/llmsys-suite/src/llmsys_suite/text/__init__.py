"""The text of a run: reading it, encoding it as tokens, and generating more with a model."""
