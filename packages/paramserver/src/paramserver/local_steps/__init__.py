"""Local steps of a worker (DiLoCo), and the checkpoints between them."""
