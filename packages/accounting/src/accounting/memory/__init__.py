"""What a device holds while a model trains."""
