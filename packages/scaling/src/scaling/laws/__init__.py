"""Laws as data: one form for all laws, a catalog of published laws, and one fit."""
