"""The choice of an algorithm: the topology of the ranks, the cost model and its measurement."""
