"""The server that forks ranks imports zero once, so that not every rank has to import it."""

from worker_pool import PRELOADED

PRELOADED.append("zero")
