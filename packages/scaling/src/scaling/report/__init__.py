"""One page that shows runs, fits, residuals, backtests and answers."""
