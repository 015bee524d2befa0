"""The parametric law: variable projection, Newton's method, and the search that proves."""
