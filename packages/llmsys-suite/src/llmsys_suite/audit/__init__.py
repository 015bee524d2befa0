"""Checks of the numbers of a run, each against an independent source."""
