"""Stage 3: each rank stores shards of the parameters, and gathers units when their modules run."""
