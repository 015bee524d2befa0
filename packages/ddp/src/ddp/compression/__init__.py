"""How buckets are summed: whole, in fewer bits, as low-rank products, by a hook, or sparse."""
