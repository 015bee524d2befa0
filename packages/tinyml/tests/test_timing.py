"""An implementation replaces another only if it is clearly faster, also on a noisy machine."""

import random
from types import SimpleNamespace

import pytest
import torch
from tinyml import quantize, timing
from tinyml.quantization import fastest_linear
from tinyml.quantization.fastest_linear import FastestLinear
from tinyml.quantization.int4 import Int4Linear
from tinyml.quantization.int8 import Int8Linear
from tinyml.timing import Timing, find_stored_timing, get_timing_path, measure, store_timing
from torch import nn

SEEDS = [*range(5), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(5, 20))]


def plain(): ...
def other(): ...


def always_right():
    return True


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock: return a function that sets the time of each call."""

    def install(took):
        monkeypatch.setattr(timing, "measure_ms", lambda call: took(call.func.__name__, "in"))
        monkeypatch.setattr(timing, "_measure_in_cache", timing.measure_ms)
        monkeypatch.setattr(
            timing, "_measure_after", lambda _, call: took(call.func.__name__, "out")
        )
        calls = {"plain": plain, "other": other}
        return measure(calls, torch.zeros(1, 1), always_right, "plain")

    return install


class Cost:
    """A clock that only injected functions advance, with the tokens of their calls."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        self.calls = []
        now = SimpleNamespace(thread_time=lambda: self.seconds, perf_counter=lambda: self.seconds)
        monkeypatch.setattr(timing, "time", now)

    def of(self, name, seconds, per_token, function=torch.clone):
        """Return `function` with a cost per call and per token, in seconds."""

        def call(*arguments):
            tokens = len(arguments[-1])
            self.calls.append((name, tokens))
            self.seconds += seconds + per_token * tokens
            return function(*arguments)

        return call


@pytest.fixture
def cost(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Cost(monkeypatch)
    torch.set_num_threads(threads)


def test_a_slow_implementation_runs_twice_and_on_few_tokens(cost):
    calls = {"plain": cost.of("plain", 0.0, 2e-4), "slow": cost.of("slow", 0.0, 4e-3)}
    assert measure(calls, torch.zeros(512, 1), always_right, "plain").selected == "plain"
    assert cost.calls.count(("slow", 32)) == 2
    assert len([name for name, _ in cost.calls if name == "slow"]) == 2
    assert ("plain", 512) not in cost.calls  # nothing is left to compare it with


@pytest.mark.parametrize("ratio", [0.7, 0.9, 1.1])
def test_the_rounds_end_when_the_reference_cannot_be_replaced(cost, ratio):
    calls = {"plain": cost.of("plain", 0.02, 0.0), "other": cost.of("other", 0.02 * ratio, 0.0)}
    assert measure(calls, torch.zeros(1, 1), always_right, "plain").selected == "plain"
    assert len(cost.calls) <= 10  # the two first calls and three rounds of both


@pytest.mark.parametrize("bits", [8, 4])
def test_slow_kernels_do_not_delay_the_decision_for_a_layer(bits, cost, monkeypatch):
    # The times of 1024 x 4096 weights on a CPU without int8 dot products.
    monkeypatch.setattr(fastest_linear, "_timings", {})
    in_float = cost.of("float", 0.002, 2.2e-4, FastestLinear.compute_in_float)
    for layer_type, kernel in (
        (Int8Linear, cost.of("kernel", 0.003, 4.2e-3, Int8Linear._multiply_in_int8)),
        (Int4Linear, cost.of("kernel", 0.004, 3e-3, Int4Linear._compute_weights_alone)),
    ):
        implementations = {layer_type.kernel: kernel, "float": in_float}
        monkeypatch.setattr(layer_type, "implementations", implementations)
    small = quantize(nn.Sequential(nn.Linear(64, 64)), bits, activations="auto")
    assert type(small[0]) is nn.Linear
    assert 0.1 < cost.seconds < 1.5
    assert all(tokens <= 32 for name, tokens in cost.calls if name == "kernel")


def test_an_implementation_that_is_wrong_or_not_supported_is_not_selected(cost):
    def not_supported(inputs):
        raise RuntimeError("expected another shape")

    inputs, reference = torch.zeros(1, 1), cost.of("plain", 1.0, 0.0)
    calls = {"plain": reference, "other": cost.of("other", 0.1, 0.0)}
    assert measure(calls, inputs, always_right, "plain").selected == "other"
    timed = measure(calls, inputs, lambda: False, "plain")
    assert timed.selected == "plain"
    assert timed.milliseconds.keys() == {"plain", "other"}
    timed = measure({"plain": reference, "other": not_supported}, inputs, always_right, "plain")
    assert timed == Timing("plain", {"plain": timed.milliseconds["plain"]}, {})
    with pytest.raises(RuntimeError, match="another shape"):
        measure({"plain": not_supported, "other": reference}, inputs, always_right, "plain")


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
    assert result.milliseconds == {"plain": 1.0, "other": inside}
    if inside < 0.8:
        assert result.out_of_cache == {"plain": 4.0, "other": 4 * outside}


@pytest.mark.parametrize("seed", SEEDS)
def test_spikes_change_nothing(clock, seed):
    noise = random.Random(seed)

    def took(name, where):
        slow = noise.choice([1, 1, 1, 1, 1, 1, 1, 10])  # one call in eight is interrupted
        return slow * (0.5 if name == faster else 1.0)

    for faster in ("plain", "other"):
        assert clock(took).selected == faster


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mostly_disturbed_reference_counts_at_its_best(clock, seed):
    noise = random.Random(seed)

    def took(name, where):  # three of four of its rounds are disturbed, none of the other's
        return 0.8 if name == "other" else noise.choice([0.7, 1.0, 1.1, 1.5])

    result = clock(took)
    assert result.selected == "plain"


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_implementations_in_noise_leave_the_reference(clock, seed):
    noise = random.Random(seed)
    result = clock(lambda name, where: noise.lognormvariate(0, 0.3))
    assert result.selected == "plain"


def test_what_takes_longer_than_a_cache_to_fill_is_timed_in_one_state(clock):
    result = clock(lambda name, where: 20.0 if name == "other" else 50.0)
    assert result.selected == "other"
    assert not result.out_of_cache


def test_the_clearly_faster_implementation_is_selected(cost):
    calls = {"first": cost.of("first", 0.2, 0.0), "second": cost.of("second", 0.1, 0.0)}
    for reference in calls:
        timed = measure(calls, torch.zeros(1, 1), always_right, reference)
        assert timed.selected == "second"


def test_decisions_are_stored_per_machine(monkeypatch):
    decided = Timing("other", {"plain": 2.0, "other": 1.0}, {})
    decided_elsewhere = Timing("plain", {"plain": 1.0}, {})
    store_timing("key", decided)
    assert find_stored_timing("key") == decided
    with monkeypatch.context() as another_machine:
        another_machine.setattr(timing, "_describe_machine", lambda: "another processor")
        assert find_stored_timing("key") is None
        store_timing("key", decided_elsewhere)
        store_timing("second key", decided)
        assert find_stored_timing("key") == decided_elsewhere
    assert find_stored_timing("key") == decided
    assert find_stored_timing("second key") is None


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "{"])
def test_a_damaged_file_of_timings_is_ignored_and_replaced(content):
    get_timing_path().parent.mkdir(parents=True)
    get_timing_path().write_text(content)
    assert find_stored_timing("key") is None
    store_timing("key", Timing("plain", {"plain": 1.0}, {}))
    assert find_stored_timing("key") == Timing("plain", {"plain": 1.0}, {})


def test_a_folder_that_cannot_be_written_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store_timing("key", Timing("plain", {"plain": 1.0}, {}))
    assert find_stored_timing("key") is None
