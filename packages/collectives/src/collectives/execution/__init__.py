"""The order and the threads in which the calls of a group run, and their handles."""
