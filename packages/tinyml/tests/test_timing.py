"""An implementation replaces another only if it is clearly faster, also on a noisy machine."""

import random

import pytest
from tinyml import timing
from tinyml.timing import Timing, measure, store_timing, stored_timing, timing_file


def plain(): ...
def other(): ...


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock: return a function that sets the time of each call."""

    def install(took):
        monkeypatch.setattr(timing, "milliseconds", lambda call: took(call.__name__, "in"))
        monkeypatch.setattr(timing, "_milliseconds_in_cache", timing.milliseconds)
        monkeypatch.setattr(
            timing, "_milliseconds_after", lambda _, call: took(call.__name__, "out")
        )
        return measure({"plain": plain, "other": other}, "plain")

    return install


@pytest.mark.parametrize(
    ("inside", "outside", "fastest"),
    [
        (0.5, 0.5, "other"),
        (0.95, 0.5, "plain"),  # a tie
        (0.75, 0.75, "plain"),  # one product on two copies of a weight differs by this factor
        (2.0, 0.5, "plain"),  # as 4 bits without AVX512: only out of the cache is it faster
        (0.5, 2.0, "plain"),
        (5.0, 0.1, "plain"),
    ],
)
def test_an_implementation_is_selected_only_if_it_wins_in_and_out_of_the_cache(
    clock, inside, outside, fastest
):
    ours = {"in": inside, "out": 4 * outside}
    its = {"in": 1.0, "out": 4.0}
    result = clock(lambda name, where: (ours if name == "other" else its)[where])
    assert result.selected == fastest
    if inside < 3:
        assert result.milliseconds == {"plain": 1.0, "other": inside}
        assert result.out_of_cache == {"plain": 4.0, "other": 4 * outside}


@pytest.mark.parametrize("seed", range(20))
def test_spikes_change_nothing(clock, seed):
    noise = random.Random(seed)

    def took(name, where):
        slow = noise.choice([1, 1, 1, 1, 1, 1, 1, 10])  # one call in eight is interrupted
        return slow * (0.5 if name == faster else 1.0)

    for faster in ("plain", "other"):
        assert clock(took).selected == faster


@pytest.mark.parametrize("seed", range(20))
def test_a_mostly_disturbed_reference_counts_at_its_best(clock, seed):
    noise = random.Random(seed)

    def took(name, where):  # three of four of its rounds are disturbed, none of the other's
        return 0.8 if name == "other" else noise.choice([0.7, 1.0, 1.1, 1.5])

    result = clock(took)
    assert result.selected == "plain"


@pytest.mark.parametrize("seed", range(20))
def test_equal_implementations_in_noise_leave_the_reference(clock, seed):
    noise = random.Random(seed)
    result = clock(lambda name, where: noise.lognormvariate(0, 0.3))
    assert result.selected == "plain"


def test_what_takes_longer_than_a_cache_to_fill_is_timed_in_one_state(clock):
    result = clock(lambda name, where: 20.0 if name == "other" else 50.0)
    assert result.selected == "other"
    assert not result.out_of_cache


def test_implementation_with_lowest_median_is_selected(monkeypatch):
    monkeypatch.setattr(timing, "milliseconds", lambda call, before=None: call())
    calls = {"hopeless": lambda: 9.0, "first": lambda: 2.0, "second": lambda: 1.0}
    assert measure(calls).selected == "second"
    assert measure(calls, "hopeless").selected == "second"
    assert measure(calls, "second").selected == "second"
    assert measure({"only": lambda: 1.0}, "only").selected == "only"


def test_decisions_are_stored_per_machine(monkeypatch):
    decided = Timing("other", {"plain": 2.0, "other": 1.0}, {})
    store_timing("key", decided)
    assert stored_timing("key") == decided
    monkeypatch.setattr(timing, "_machine", lambda: "another processor")
    assert stored_timing("key") is None
    store_timing("key", Timing("plain", {"plain": 1.0}, {}))
    monkeypatch.undo()


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "{"])
def test_a_damaged_file_of_timings_is_ignored_and_replaced(content):
    timing_file().parent.mkdir(parents=True)
    timing_file().write_text(content)
    assert stored_timing("key") is None
    store_timing("key", Timing("plain", {"plain": 1.0}, {}))
    assert stored_timing("key") == Timing("plain", {"plain": 1.0}, {})


def test_a_folder_that_cannot_be_written_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store_timing("key", Timing("plain", {"plain": 1.0}, {}))
    assert stored_timing("key") is None
