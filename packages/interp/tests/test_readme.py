import re
from pathlib import Path
from typing import Any

import pytest
import torch
from induction_checks import compute_accuracy_on_repeats, find_circuit, is_textbook_circuit
from interp import attribution, detect_heads
from interp.circuits.vocabulary import copying_scores
from scipy import stats
from torch import Tensor

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
(SNIPPET,) = re.findall(r"## Quick start\n.*?```python\n(.*?)```", README, re.DOTALL)


def run_quick_start(seed: int) -> dict[str, Any]:
    """Return the names that the quick start defines with another seed."""
    seeded = SNIPPET.replace(
        "train_induction()",
        f"train_induction(seed={seed}, steps=300, batch=16, learning_rate=1e-2)",
    )
    assert seeded != SNIPPET
    names: dict[str, Any] = {}
    exec(seeded, names)
    return names


def has_the_circuit(names: dict[str, Any]) -> bool:
    """Return True if the detected heads are an induction circuit that the model needs."""
    tokens, repeated = names["tokens"], names["repeated"]
    circuit = find_circuit(names["model"], tokens, repeated)
    return (
        {head.layer for head in names["induction"]} == {1}
        and compute_accuracy_on_repeats(names["logits"], tokens, repeated) > 0.9
        and compute_accuracy_on_repeats(names["without"], tokens, repeated) < 0.2
        and is_textbook_circuit(circuit)
    )


def assert_copying_heads_write_the_logits(names: dict[str, Any]) -> None:
    """Check that the best induction head copies, and that its logits are small elsewhere."""
    model, tokens = names["model"], names["tokens"]
    repeated = names["repeated"][:, 1:]
    best = names["induction"][0]
    copying = copying_scores(model.ov(), model.embed.weight, model.unembed.weight)
    assert copying[best.layer, best.head] > 0.8
    parts = model.components(tokens[:, :-1])
    direct = attribution(parts, None, model.unembed, tokens[:, 1:]).named()
    on_repeats = {name: float(term[repeated].mean()) for name, term in direct.items()}
    head = f"head {best.layer}.{best.head}"
    assert max(on_repeats, key=on_repeats.__getitem__) == head
    assert direct[head][~repeated].mean() < 0.1 * on_repeats[head]


def permute_pattern(pattern: Tensor, generator: torch.Generator) -> Tensor:
    """Return a pattern with the weights of the visible keys of each query and head permuted."""
    future = torch.ones(pattern.shape[-2:], dtype=torch.bool).triu(1)
    order = torch.rand(pattern.shape, generator=generator).masked_fill(future, 2.0).argsort(-1)
    return pattern.gather(-1, order)


@pytest.mark.parametrize("permutations", [20, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_quick_start_finds_and_ablates_induction_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permutations: int
) -> None:
    """With some seeds, more heads form the circuit, so several models may be trained."""
    monkeypatch.chdir(tmp_path)
    runs = (run_quick_start(seed) for seed in range(5))
    names = next(run for run in runs if has_the_circuit(run))
    assert (tmp_path / "heads.html").stat().st_size > 1000
    assert_copying_heads_write_the_logits(names)
    # At most 5 % of permutations of the trained model's patterns have a significant head.
    tokens, repeated = names["tokens"][:6], names["repeated"][:6]
    patterns = [pattern[:6] for pattern in names["patterns"].values()]
    assert detect_heads(patterns, tokens, queries=repeated).significant("induction")
    generator = torch.Generator().manual_seed(0)
    counts: dict[str, int] = {}
    for _ in range(permutations):
        null = detect_heads(
            [permute_pattern(pattern, generator) for pattern in patterns], tokens, queries=repeated
        )
        for kind in null.scores:
            counts[kind] = counts.get(kind, 0) + bool(null.significant(kind))
    most = stats.binom(permutations, 0.05).ppf(0.98)  # exceeded in 2 % of all cases at most
    assert all(count <= most for count in counts.values()), counts


@pytest.mark.exhaustive
def test_quick_start_prints_the_accuracies_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other processors sum in another order, which changes a trained model slightly."""
    monkeypatch.chdir(tmp_path)
    exec(SNIPPET, {})
    (text,) = re.findall(r"## Quick start\n.*?```text\n(.*?)```", README, re.DOTALL)
    stated, printed = (
        re.findall(r"^(.*): accuracy (.*)$", lines, re.MULTILINE)
        for lines in (text, capsys.readouterr().out)
    )
    assert [name for name, _ in printed] == [name for name, _ in stated]
    for (_, accuracy), (_, expected) in zip(printed, stated, strict=True):
        assert float(accuracy) == pytest.approx(float(expected), abs=0.02)


def test_sections_are_in_the_order_of_the_style_guide() -> None:
    sections = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert sections == [
        "Install",
        "Quick start",
        "API",
        "How it works",
        "Results",
        "Guarantees",
        "Limits",
        "References",
    ]


def test_links_of_the_readme_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)", README):
        assert (PACKAGE / link).exists(), link
