"""Memory of gradients: checks before a backward pass, and preservation of earlier gradients."""
