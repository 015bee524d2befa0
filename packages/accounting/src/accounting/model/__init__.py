"""What a model is: its sizes, its matrices, and the families that are known."""
