"""Uncertainty of fitted laws: posterior, bootstrap, drift and backtests."""
