"""What is measured: steps and their phases, turns, and a yardstick beside them."""
