"""Checks of a run's numbers, each against an independent reference."""
