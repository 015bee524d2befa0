"""What is measured: steps and their phases, turns, live bytes, and a yardstick beside them."""
