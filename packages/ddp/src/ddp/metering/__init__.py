"""What was sent, how long it took, what was waited for, and pictures of it."""
