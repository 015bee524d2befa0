"""The stages of a run: each is a function `run(run) -> results` that every rank executes."""
