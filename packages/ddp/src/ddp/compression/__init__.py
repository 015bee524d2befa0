"""Methods to send fewer bytes: lower precision, low-rank products, hooks and sparse gradients."""
