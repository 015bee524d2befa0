"""The text of a run: reading it, its tokens, and text that a model writes."""
