"""The protocol of servers and workers: messages, order of updates, and the state of each side."""
