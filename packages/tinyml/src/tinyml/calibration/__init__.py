"""Statistics of the inputs of layers on calibration batches."""
