"""What carries messages between processes: shared memory, torch.distributed, ZeroMQ, Ray."""
