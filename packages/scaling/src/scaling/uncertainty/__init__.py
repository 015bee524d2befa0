"""Uncertainty of fitted laws: bootstrap, profile likelihood, drift and backtests."""
