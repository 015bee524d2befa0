"""The description of a model: sizes, matrices, and known families."""
