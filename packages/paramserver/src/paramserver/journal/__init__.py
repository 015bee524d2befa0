"""The journal of a server, from which it continues after its process was killed."""
