"""What is said, in what order, and what follows: no lock, thread, socket or clock."""
