"""One start of ranks for the cases of several tests.

A start takes as long as several cases. Each case nevertheless has its own test, its own process
group, and its own entry in the report.
"""

import gc
import os
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from worker_pool import RankFailed, run_ranks, try_ranks

SECONDS = 300.0
LIMIT = timedelta(seconds=SECONDS)
#: The number of selected tests per file, which conftest.py counts.
selected = Counter()
#: If fewer tests of a file are selected, each case starts its own ranks.
FEW = 4


class StoppedError(Exception):
    """The end of a rank after a case that failed there, with the outcomes of its cases."""


class SharedRanks:
    """Ranks that run the cases of a test file one after the other.

    If a case fails on any rank, its test reports the errors of all ranks. The ranks then stop, and
    the tests of the later cases report the name of this case.

    serve: a function of the test file that calls `run_in_order(globals(), cases)`.
    """

    def __init__(self, serve, world):
        self.serve = serve
        self.world = world
        self.file = Path(serve.__code__.co_filename)
        #: The name of each case's function, and its arguments.
        self.cases = []
        #: For each rank, the result and the error of each case that has run; None before the start.
        self.outcomes = None
        #: The report if a rank died or did not finish in time.
        self.death = ""

    def case(self, *arguments):
        """Add the decorated function as one case, or as one case per tuple of arguments."""

        def add(function):
            self.cases += [(function.__name__, entry) for entry in arguments or [()]]
            return function

        return add

    def run(self, function, *arguments):
        """Return each rank's result of a case, or raise RankFailed."""
        case = function.__name__, arguments
        if case not in self.cases or selected[self.file] < FEW:
            return run_ranks(function, self.world, *arguments, timeout=SECONDS)
        if self.outcomes is None:
            self._start()
        if self.death:
            raise RankFailed(self.death)
        index = self.cases.index(case)
        num_run = max(len(outcomes) for outcomes in self.outcomes)
        if index >= num_run:
            raise RankFailed(f"not run, because {describe(*self.cases[num_run - 1])} failed")
        results = [outcomes[index] for outcomes in self.outcomes]
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]
        if errors:
            raise RankFailed("\n".join([f"{describe(*case)}:", *errors]))
        return [value for value, _ in results]

    def _start(self):
        outcomes = try_ranks(self.serve, self.world, self.cases, timeout=2 * SECONDS)
        self.outcomes = [
            outcome.error.args[0] if isinstance(outcome.error, StoppedError) else outcome.value
            for outcome in outcomes
        ]
        died = [o for o in outcomes if o.failed and not isinstance(o.error, StoppedError)]
        if died:
            # The ranks that were alive stopped after the same case.
            num_run = max((len(outcomes) for outcomes in self.outcomes if outcomes), default=0)
            case = describe(*self.cases[num_run - 1]) if num_run else "one of all cases"
            report = (f"rank {o.rank}: {o.trace or f'exit code {o.exit_code}'}" for o in died)
            self.death = "\n".join([f"ranks ended in {case}:", *report])


def describe(name, arguments):
    return f"{name}({', '.join(map(str, arguments))})"


def run_in_order(functions, cases):
    """Run cases on this rank until one fails on any rank; return their results and errors.

    functions: the functions of the test file by name.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    backend = dist.get_backend()
    path = os.environ["STORE_FILE"]
    reports = dist.FileStore(f"{path}-reports", world)
    outcomes = []
    for number, (name, arguments) in enumerate(cases):
        if number:
            dist.destroy_process_group()
            # The tensors of earlier cases must not take part in later ones.
            gc.collect()
            store = dist.FileStore(f"{path}-{number}", world)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=LIMIT
            )
        os.environ["CASE_FOLDER"] = f"{path}-folder-{number}"
        value, error = None, ""
        try:
            value = functions[name](*arguments)
        except BaseException:
            error = traceback.format_exc()
        outcomes.append((value, error))
        reports.set(f"{number} on {rank}", "failed" if error else "passed")
        if error:
            # Without clean-up, so that other ranks do not wait for this one in a collective.
            raise StoppedError(outcomes)
        keys = [f"{number} on {other}" for other in range(world)]
        reports.wait(keys, LIMIT)
        if any(reports.get(key) == b"failed" for key in keys):
            return outcomes
    return outcomes


def case_folder():
    """Return a folder for the files of this case, which is equal on all ranks."""
    # A case that has its own ranks has the folder of its store.
    folder = os.environ.get("CASE_FOLDER", f"{os.environ['STORE_FILE']}-folder")
    Path(folder).mkdir(exist_ok=True)
    return folder
