"""One model's training step, timed in processes of its own: by size, context, precision and way."""
