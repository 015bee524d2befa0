"""Stage 3: each rank keeps its share of the parameters, and has the rest while a layer runs."""
