"""Laws as data: one form for all of them, a catalog, and one fit."""
