"""Training with data, pipeline and tensor parallelism, which split one model over the ranks."""
