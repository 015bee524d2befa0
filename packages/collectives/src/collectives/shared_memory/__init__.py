"""Memory that the ranks of a host share, and the collectives that use it."""
