"""Stage 3: each rank stores shards of the parameters, and gathers a layer only while it runs."""
