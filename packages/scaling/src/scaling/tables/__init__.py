"""Tables as people keep them: records from any source, their columns by name, their cells."""
