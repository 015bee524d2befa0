"""Stage 3: each rank stores its shards of the parameters, and gathers a layer while it runs."""
