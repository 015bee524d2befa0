"""Sweeps of the learning rate over batch sizes, by training or from tables of runs."""
