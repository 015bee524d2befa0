"""Checks that keep ranks consistent: models, gradients, parameters, buffers and failures."""
