"""One start of ranks for the programs of several tests, because a start takes longer than most."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from worker_pool import RankFailed, run_ranks

#: The name of a function of the test file, and its arguments.
Program = tuple[Any, ...]


@dataclass(frozen=True)
class Failure:
    """The error of a program on one rank."""

    trace: str


class SharedPrograms:
    """Programs of a test file that run one after the other on the same ranks.

    If a program fails on one rank only, later programs may fail too.

    Args:
        serve: function of the test file that calls `run_all(globals(), programs)`.
        programs: programs that `serve` runs. Other programs start their own ranks.
    """

    def __init__(self, serve: Callable, world: int, programs: list[Program]) -> None:
        self.serve = serve
        self.world = world
        self.programs = programs
        #: The results of each rank or the error of the start, by the function that starts ranks.
        self._outcomes: dict[Callable, list[dict[Program, Any]] | RankFailed] = {}

    def results(self, name: str, *arguments: Any) -> list[Any]:
        """Return the result of a program on each rank; raise `RankFailed` if it failed on one."""
        program = (name, *arguments)
        if program not in self.programs:
            function = self.serve.__globals__[name]
            return run_ranks(function, self.world, *arguments)
        # The fixture `backend` replaces `run_ranks` by a partial function for another backend.
        key = run_ranks.func if isinstance(run_ranks, partial) else run_ranks
        if key not in self._outcomes:
            try:
                self._outcomes[key] = run_ranks(self.serve, self.world)
            except RankFailed as error:
                self._outcomes[key] = error
        outcomes = self._outcomes[key]
        if isinstance(outcomes, RankFailed):
            raise outcomes
        results = [rank[program] for rank in outcomes]
        failures = [
            f"rank {rank}: {result.trace}"
            for rank, result in enumerate(results)
            if isinstance(result, Failure)
        ]
        if failures:
            raise RankFailed("\n".join(failures))
        return results


def run_all(functions: dict[str, Any], programs: list[Program]) -> dict[Program, Any]:
    """Return the result or the failure of each program on this rank."""
    outcomes: dict[Program, Any] = {}
    for name, *arguments in programs:
        try:
            outcomes[name, *arguments] = functions[name](*arguments)
        except BaseException:
            outcomes[name, *arguments] = Failure(traceback.format_exc())
    return outcomes
