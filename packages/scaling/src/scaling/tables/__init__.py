"""Tables of runs: records from any source, columns recognized by name, and cells as numbers."""
