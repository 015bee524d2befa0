import re
from pathlib import Path

import pytest
from interp.detect import DetectedHead

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()


def finds_induction_heads(seed: int) -> bool:
    """Run the quick start with another seed and return True if it confirms induction heads."""
    (snippet,) = re.findall(r"## Quick start\n.*?```python\n(.*?)```", README, re.DOTALL)
    seeded = snippet.replace("train_induction()", f"train_induction(InductionTask(seed={seed}))")
    assert seeded != snippet
    names: dict[str, object] = {}
    exec("from interp.circuits.induction import InductionTask\n" + seeded, names)
    heads: list[DetectedHead] = names["induction"]
    tokens, repeated = names["tokens"], names["repeated"]

    def accuracy(logits) -> float:
        correct = logits[:, :-1].argmax(-1) == tokens[:, 1:]
        return correct[repeated[:, 1:]].float().mean().item()

    return (
        {head.layer for head in heads} == {1}
        and accuracy(names["logits"]) > 0.9
        and accuracy(names["without"]) < 0.2
    )


def test_quick_start_finds_and_ablates_induction_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some seeds spread the circuit over more heads, so several may be trained."""
    monkeypatch.chdir(tmp_path)
    assert any(finds_induction_heads(seed) for seed in range(4))
    assert (tmp_path / "heads.html").stat().st_size > 1000


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
