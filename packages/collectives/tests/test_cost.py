"""The cost model: exact counts, a fit that recovers prices, and the cheapest choice."""

import dataclasses

import numpy as np
import pytest
from collectives.choice.cost import CostModel, Sample, count_terms, list_candidates

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
PRICES = CostModel(2e-4, 1e-9, 2e-10, 4e-5)


def test_terms_match_the_textbook():
    ring = count_terms("all_reduce", "ring", 1000, (1, 1, 1, 1))
    assert (ring.messages, ring.wire_bytes, ring.reduced_bytes) == (6, 1500, 750)
    # A tree sends, then receives; a ring does both at every step.
    assert (ring.operations, count_terms("all_reduce", "tree", 8, (1, 1)).operations) == (12, 2)
    tree = count_terms("broadcast", "tree", 1000, (1,) * 8)
    assert (tree.messages, tree.wire_bytes) == (3, 3000)
    assert count_terms("reduce_scatter", "ring", 1000, (1, 1)).wire_bytes == 500
    # Two hosts of four: the link carries S (2(H-1)/H), not 7/4 S.
    assert count_terms("all_reduce", "hierarchical", 1000, (4, 4)).wire_bytes == 1000


def draw_samples(model, noise=0.0):
    generator = np.random.default_rng(0)
    noisy = []
    for hosts in ((2,), (1, 1), (2, 2)):
        for algorithm in list_candidates("all_reduce", hosts):
            for size in (1 << 10, 1 << 15, 1 << 20, 1 << 24):
                seconds = model.predict("all_reduce", algorithm, size, hosts)
                seconds *= 1 + noise * generator.normal()
                noisy.append(Sample("all_reduce", algorithm, size, hosts, seconds))
    return noisy


def test_fit_recovers_prices():
    fitted = CostModel.fit(draw_samples(PRICES))
    assert fitted.get_prices() == pytest.approx(PRICES.get_prices(), rel=1e-6)


def test_fit_to_noisy_samples_has_no_negative_price():
    fitted = CostModel.fit(draw_samples(PRICES, noise=0.1))
    assert all(price >= 0 for price in fitted.get_prices().values())
    for sample in draw_samples(PRICES):
        predicted = fitted.predict(
            "all_reduce", sample.algorithm, sample.size_bytes, sample.ranks_per_host
        )
        assert predicted == pytest.approx(sample.seconds, rel=0.25)


def test_short_messages_use_few_steps_and_long_ones_few_bytes():
    apart = (1,) * 8
    assert PRICES.choose("all_reduce", 64, apart) == "tree"
    assert PRICES.choose("broadcast", 64, apart) == "tree"
    assert PRICES.choose("broadcast", 1 << 28, apart) == "ring"
    assert PRICES.choose("all_to_all", 1 << 28, apart) == "ring"
    assert PRICES.choose("all_reduce", 1 << 28, (4, 4)) == "hierarchical"


def test_choice_has_lowest_predicted_time():
    for kind in KINDS:
        for hosts in ((2,), (6,), (1, 1), (1, 1, 1), (2, 2), (4, 2)):
            for size in (1, 1 << 10, 1 << 20, 1 << 30):
                choice = PRICES.choose(kind, size, hosts)
                times = [PRICES.predict(kind, a, size, hosts) for a in list_candidates(kind, hosts)]
                assert PRICES.predict(kind, choice, size, hosts) == min(times)
                # On one host nothing is measured.
                if len(hosts) == 1:
                    assert CostModel().choose(kind, size, hosts) == "shared_memory"


def test_tuned_model_interpolates_between_measured_sizes():
    hosts, off = (1, 1), {"ring": {1 << 10: 3.0, 1 << 20: 0.5}, "tree": {1 << 10: 0.25}}
    measured = []
    for algorithm, factors in off.items():
        for size, factor in factors.items():
            seconds = factor * PRICES.predict("all_reduce", algorithm, size, hosts)
            measured.append(Sample("all_reduce", algorithm, size, hosts, seconds))
    tuned = dataclasses.replace(PRICES, samples=tuple(measured))

    def factor(algorithm, size, kind="all_reduce", hosts=hosts):
        predicted = tuned.predict(kind, algorithm, size, hosts)
        return predicted / PRICES.predict(kind, algorithm, size, hosts)

    def time(size, algorithm="ring"):
        return tuned.predict("all_reduce", algorithm, size, hosts)

    assert factor("ring", 1 << 10) == pytest.approx(3.0)
    assert factor("ring", 1 << 20) == pytest.approx(0.5)
    assert time(1 << 15) == pytest.approx((time(1 << 10) * time(1 << 20)) ** 0.5)
    # Latency below the smallest size, bandwidth above the largest.
    assert time(1, "tree") == time(1 << 10, "tree")
    assert time(1 << 25) == pytest.approx(32 * time(1 << 20))
    assert factor("ring", 1 << 10, kind="broadcast") == 1.0
    assert factor("ring", 1 << 10, hosts=(1, 1, 1)) == 1.0
    assert factor("ring", 1 << 10, kind="all_gather") == 1.0
    assert tuned.choose("all_reduce", 1 << 10, hosts) == "tree"
    assert CostModel.from_json(tuned.to_json()) == tuned


def test_gloo_is_replaced_only_by_winners_of_three_in_four_rounds():
    hosts, sizes = (1, 1), (1 << 10, 1 << 20)

    def tuned(ring, tree):
        """Return a model in which `tree` is fastest and `ring` second, with their wins by size."""
        seconds = {"tree": 1.0, "ring": 2.0, "gloo": 3.0}
        wins = {"tree": tree, "ring": ring, "gloo": (0, 0)}
        samples = [
            Sample("all_reduce", name, size, hosts, seconds[name], won)
            for name in seconds
            for size, won in zip(sizes, wins[name], strict=True)
        ]
        model = dataclasses.replace(CostModel.fit(samples), samples=tuple(samples))
        return CostModel.from_json(model.to_json())

    def picks(model, *sizes, **native):
        return [model.choose("all_reduce", size, hosts, **native) for size in sizes]

    assert picks(tuned((1, 1), (0.75, 0.75)), 1, 1 << 15, 1 << 30) == ["tree"] * 3
    assert picks(tuned((1, 1), (0.74, 0.74)), 1, 1 << 15, 1 << 30) == ["ring"] * 3
    # Between two measured sizes the algorithm must have won at both.
    mixed = tuned((0.5, 1), (0.5, 0.5))
    assert picks(mixed, *sizes, 1 << 15) == ["gloo", "ring", "gloo"]
    assert picks(mixed, *sizes, native=False) == ["tree", "tree"]


def test_unknown_algorithm_and_empty_samples_are_refused():
    with pytest.raises(ValueError, match=r"expected one of .* for all_to_all .* got 'tree'"):
        PRICES.predict("all_to_all", "tree", 8, (1, 1))
    with pytest.raises(ValueError, match="no samples"):
        CostModel.fit([])
    with pytest.raises(ValueError, match="no samples"):
        CostModel.fit([Sample("all_reduce", "gloo", 8, (1, 1), 1.0)])
    with pytest.raises(ValueError, match="positive, finite seconds"):
        CostModel.fit([Sample("all_reduce", "ring", 8, (1, 1), 0.0)])
    with pytest.raises(ValueError, match="samples of at least two ranks"):
        CostModel.fit([Sample("all_reduce", "ring", 8, (1,), 1.0)])
    with pytest.raises(ValueError, match="size_bytes of at least 0, got -8"):
        PRICES.predict("all_reduce", "ring", -8, (1, 1))
    with pytest.raises(ValueError, match="got 'hierarchical'"):
        PRICES.predict("all_reduce", "hierarchical", 8, (4,))
    with pytest.raises(ValueError, match="got 'allreduce'"):
        PRICES.predict("allreduce", "shared_memory", 8, (4,))
    with pytest.raises(ValueError, match="positive number of ranks"):
        PRICES.choose("all_reduce", 8, ())
