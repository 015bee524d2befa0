"""The stages of a run: each module has a function `run(run) -> results` for every rank."""
