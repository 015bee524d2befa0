"""How long things take: messages, steps, runs that fail."""
