"""Which algorithm is taken: who shares a host, what each costs, what was measured."""
