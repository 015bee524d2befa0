"""Memory of a device during training."""
