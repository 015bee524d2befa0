"""Training with pipeline and tensor parallelism, and with data-parallel replicas."""
