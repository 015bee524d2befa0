"""The journal of a server, from which a killed server recovers."""
