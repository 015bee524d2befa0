"""The hand-over of asynchronous calls between the caller, the engine and the progress thread."""

import threading
import time
import weakref

import pytest
from collectives.execution.progress import ProgressQueue, State
from collectives.execution.work import Work
from collectives.shared_memory.engine import Job


def submit(queue, engine, gate=None):
    """Submit a call that waits for `gate`; `engine` is True if the engine supports the call."""
    with queue.submitting:
        job = queue.assign(lambda: Job() if engine else None, is_usable=True)

        def run():
            try:
                if job is None:
                    queue.running.acquire()
                if gate is not None:
                    assert gate.wait(20)
            finally:
                if job is None:
                    queue.running.release()
                queue.finish_first()

        work = Work(run)
        queue.submit(work, job)
    return job is not None, work


@pytest.mark.parametrize(
    ("supported", "executors", "state"),
    [
        ([], [], State.IDLE),
        ([True, True], [True, True], State.ENGINE),
        ([True, False], [True, False], State.ENGINE_THEN_PYTHON),
        # The engine supports the last call, but it is behind a call of Python.
        ([True, False, True], [True, False, False], State.ENGINE_THEN_PYTHON),
        ([False, True], [False, False], State.PYTHON),
    ],
)
def test_state_follows_from_the_executors_of_unfinished_calls(supported, executors, state):
    ended = threading.Event()
    queue = ProgressQueue(None, on_end=ended.set)
    gate = threading.Event()
    calls = [submit(queue, engine, gate) for engine in supported]
    assert [is_engine for is_engine, _ in calls] == executors
    assert queue.state is state
    if state in (State.ENGINE, State.ENGINE_THEN_PYTHON):
        assert queue.running.locked()
    gate.set()
    queue.wait_for_last()
    for _, work in calls:
        assert work.wait()
    assert queue.state is State.IDLE
    assert not queue.running.locked()
    queue.close()
    assert ended.is_set()


def test_every_thread_waits_for_the_queued_calls():
    # Otherwise the synchronous call of one thread would run before calls that were made earlier.
    queue = ProgressQueue(None, on_end=lambda: None)
    gate = threading.Event()
    _, work = submit(queue, engine=False, gate=gate)
    threads = [threading.Thread(target=queue.wait_for_last) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    gate.set()
    for thread in threads:
        thread.join()
    assert work.is_completed()
    assert queue.last is None
    queue.close()


def test_engine_is_not_used_while_a_synchronous_call_runs():
    queue = ProgressQueue(None, on_end=lambda: None)
    with queue.running:
        is_engine, work = submit(queue, engine=True)
        assert not is_engine
    work.wait()
    is_engine, work = submit(queue, engine=True)
    assert is_engine
    work.wait()
    queue.close()


def test_engine_is_not_used_by_a_group_that_has_failed():
    queue = ProgressQueue(None, on_end=lambda: None)
    with queue.submitting:
        assert queue.assign(lambda: Job(), is_usable=False) is None
    assert queue.state is State.PYTHON
    assert not queue.running.locked()


@pytest.mark.parametrize("engine", [True, False])
def test_queue_does_not_keep_a_finished_call_alive(engine):
    # The handle of the last call refers to its tensors.
    queue = ProgressQueue(None, on_end=lambda: None)
    _, work = submit(queue, engine)
    work.wait()
    gone = weakref.ref(work)
    del work
    deadline = time.monotonic() + 20
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None
    queue.close()
