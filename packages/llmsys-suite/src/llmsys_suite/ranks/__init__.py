"""The processes of a run: launching ranks, the work of one rank, and the end after a failure."""
