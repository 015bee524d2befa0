"""Learning rate against batch size, by training."""
