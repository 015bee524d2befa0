"""Methods to send fewer bytes: lower precision, communication hooks and sparse gradients."""
