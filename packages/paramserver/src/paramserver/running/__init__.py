"""Start, supervision and termination of server and worker processes."""
