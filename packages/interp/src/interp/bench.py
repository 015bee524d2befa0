"""What structure saves, and that it computes the same.

- Compared: each computation beside the same one done plainly. Peer and ours take turns (A B A B
  ...); `ratio` is peer time over ours, the median of the pairs with p10 and p90; `error` is the
  largest difference between the results relative to the largest.
- Memory: the largest tensor that all-pairs composition creates, which does not depend on the
  machine.
- Exact: the induction circuit over all sequences of a finite universe.
- Trained: an induction circuit that gradient descent finds, and its ablation.
- Sums: how far logit attributions are from the logit and folded weights from the model, relative
  to the largest.
- Import: what `import interp` costs on top of torch, in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp.circuits.composition import composition_scores
from interp.circuits.induction import (
    InductionTask,
    confirm_circuit,
    induction_circuit,
    induction_reference,
    repeated_tokens,
    train_induction,
)
from interp.circuits.low_rank import LowRank
from interp.circuits.vocabulary import copying_eigenvalues
from interp.decoder.fold import fold_decoder
from interp.decoder.gpt2 import GPT2, GPT2Config
from interp.lens import attribution
from interp.patching import logit_difference, patch_streams
from interp.tap import patch, record

Row = dict[str, float | int | str]
Run = Callable[[], Tensor]


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """All rows; `quick` takes seconds and small sizes, otherwise sizes are those of GPT-2 small."""
    torch.manual_seed(0)
    small = GPT2Config(vocab_size=1000, n_embd=96, n_layer=3, n_head=3)
    config = small if quick else GPT2Config()
    with torch.device(device):
        model = GPT2(config).requires_grad_(False).eval()
    rows = [*compositions(model, layers=3 if quick else 4), *spectra(model), copying(model)]
    rows += [patching(model), *composition_memory(), exact_circuit(), sums(model)]
    rows.append(trained_circuit(InductionTask(steps=20) if quick else InductionTask()))
    return [*rows, import_cost(processes=1 if quick else 3)]


def compositions(model: GPT2, *, layers: int) -> list[Row]:
    """K-composition of all pairs of heads of the first layers."""
    qk, ov = model.qk()[:layers], model.ov()[:layers]
    sizes = _sizes(ov)
    return [
        _compared(
            "k_composition",
            peer.__name__,
            sizes,
            partial(peer, ov, qk),
            partial(composition_scores, ov, qk, kind="k"),
            pairs=2,
        )
        for peer in (dense_pairs, batched_pairs)
    ]


def dense_pairs(ov: LowRank, qk: LowRank) -> Tensor:
    """K-composition by its definition, from dense d_model x d_model products."""
    layers, heads = ov.batch_shape
    scores = ov.a.new_zeros(layers, heads, layers, heads)
    writes, reads = ov.dense(), qk.dense()
    norms = torch.linalg.matrix_norm(writes), torch.linalg.matrix_norm(reads)
    for l1, l2 in itertools.combinations(range(layers), 2):
        for h1, h2 in itertools.product(range(heads), repeat=2):
            product = torch.linalg.matrix_norm(reads[l2, h2] @ writes[l1, h1])
            scores[l1, h1, l2, h2] = product / (norms[0][l1, h1] * norms[1][l2, h2])
    return scores


def batched_pairs(ov: LowRank, qk: LowRank) -> Tensor:
    """K-composition from one batched thin product over all pairs of heads."""
    layers, heads = ov.batch_shape
    write = (ov.a @ torch.linalg.qr(ov.b.mT).R.mT).flatten(0, 1)
    read = (torch.linalg.qr(qk.a).R @ qk.b).flatten(0, 1)
    norms: Tensor = torch.linalg.matrix_norm(read[None] @ write[:, None])
    scores = norms.view(layers, heads, layers, heads)
    later = torch.ones(layers, layers, device=scores.device).triu(1)
    return scores / (ov.norm()[:, :, None, None] * qk.norm()) * later[:, None, :, None]


def composition_memory() -> list[Row]:
    """The largest tensor that all pairs of GPT-2 small's heads need, from shapes (meta tensors)."""
    with torch.device("meta"):
        model = GPT2(GPT2Config())
    ov, qk = model.ov(), model.qk()
    inputs = ov.a.nbytes
    rows: list[Row] = []
    for run in (batched_pairs, partial(composition_scores, kind="k")):
        with _Largest() as seen:  # type: ignore[no-untyped-call]
            run(ov, qk)
        name = run.__name__ if not isinstance(run, partial) else run.func.__name__
        row: Row = {"case": "composition_memory", "how": name, **_sizes(ov)}
        rows.append({**row, "inputs_mib": 4 * inputs / 2**20, "largest_mib": seen.bytes / 2**20})
    return rows


class _Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator creates."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    self.bytes = max(self.bytes, tensor.nbytes)
        return out


def spectra(model: GPT2) -> list[Row]:
    """Eigenvalues and singular values of one layer's OV circuits."""
    ov = model.ov()[:1]
    rank = ov.rank

    def dense_eigenvalues() -> Tensor:
        values: Tensor = torch.linalg.eigvals(ov.dense())
        return values.abs().sort(-1, descending=True).values[..., :rank]

    def eigenvalues() -> Tensor:
        return ov.eigenvalues().abs().sort(-1, descending=True).values

    def dense_svd() -> Tensor:
        values: Tensor = torch.linalg.svd(ov.dense(), full_matrices=False).S[..., :rank]
        return values

    return [
        _compared("ov_eigenvalues", "dense", _sizes(ov), dense_eigenvalues, eigenvalues, pairs=2),
        _compared("ov_svd", "dense", _sizes(ov), dense_svd, lambda: ov.svd()[1], pairs=3),
    ]


def copying(model: GPT2) -> Row:
    """Eigenvalues of W_U W_OV W_E of all heads, over the whole vocabulary."""
    ov, embed, unembed = model.ov(), model.embed.weight, model.unembed.weight

    def each_head_folded() -> Tensor:
        layers, heads = ov.batch_shape
        values = [
            torch.linalg.eigvals((ov[i, j].b @ embed.T) @ (unembed @ ov[i, j].a))
            for i, j in itertools.product(range(layers), range(heads))
        ]
        return torch.stack(values).view(layers, heads, -1).sum(-1).real

    return _compared(
        "copying_eigenvalues",
        "each_head_folded",
        _sizes(ov),
        each_head_folded,
        lambda: copying_eigenvalues(ov, embed, unembed).sum(-1).real,
        pairs=2,
    )


def patching(model: GPT2, *, positions: int = 8) -> Row:
    """The stream patched at every layer and position, for one logit difference."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    clean = torch.randint(vocabulary, (1, positions), generator=generator)
    corrupted = torch.randint(vocabulary, (1, positions), generator=generator)
    clean, corrupted = (x.to(model.embed.weight.device) for x in (clean, corrupted))
    right, wrong = 1, 2

    def one_forward_each() -> Tensor:
        with record(model, "blocks.*:input") as seen:
            model(clean)
        values = []
        for (site, stream), position in itertools.product(seen.items(), range(positions)):

            def put(x: Tensor, stream: Tensor = stream, position: int = position) -> Tensor:
                x = x.clone()
                x[:, position] = stream[:, position]
                return x

            with patch(model, {site: put}):
                logits = model(corrupted)[0, -1]
            values.append(logits[right] - logits[wrong])
        return torch.stack(values).view(-1, positions)

    metric = logit_difference(model.norm, model.unembed, right, wrong)
    return _compared(
        "patch_streams",
        "one_forward_each",
        _sizes(model.ov()),
        one_forward_each,
        lambda: patch_streams(model, "blocks.*", clean, corrupted, metric).values,
        pairs=2,
    )


def exact_circuit() -> Row:
    """How many of all 4,096 sequences the induction circuit maps to its specification."""
    words = itertools.product(range(1, 5), repeat=6)
    universe = torch.tensor([(0, *sequence) for sequence in words])
    logits, expected = induction_circuit(5, 7)(universe), induction_reference(universe, 5)
    equal = int((logits == expected).all(-1).all(-1).sum())
    return {"case": "exact_circuit", "sequences": len(universe), "bit_equal": equal}


def trained_circuit(task: InductionTask) -> Row:
    """Train, find and ablate an induction circuit."""
    start = time.perf_counter()
    model, _ = train_induction(task)
    generator = torch.Generator().manual_seed(task.seed + 1)
    found = confirm_circuit(
        model,
        *repeated_tokens(
            64, task.length, task.vocabulary, periods=task.periods, generator=generator
        ),
    )
    return {
        "case": "trained_circuit",
        "steps": task.steps,
        "time_s": time.perf_counter() - start,
        "accuracy": found.accuracy,
        "accuracy_without_previous": found.accuracy_without_previous,
        "previous_score": found.previous.score,
        "induction_score": found.induction.score,
        "k_composition": found.k_composition,
        "k_composition_others": found.k_composition_others,
    }


def sums(model: GPT2) -> Row:
    """The error of attributions against logits and of folded against original log-probabilities."""
    tokens = torch.arange(16, device=model.embed.weight.device)[None]
    shares = attribution(model.components(tokens), model.norm, model.unembed, tokens)
    attributed = (shares.terms.sum(0) - shares.logits).abs() / shares.terms.abs().sum(0)
    expected = model(tokens).log_softmax(-1)
    folded = (fold_decoder(model)(tokens).log_softmax(-1) - expected).abs().max()
    return {
        "case": "sums",
        "terms": len(shares.names),
        "attribution_error": attributed.max().item(),
        "folding_error": (folded / expected.abs().max()).item(),
    }


def import_cost(*, processes: int) -> Row:
    """Milliseconds and modules that `import interp` adds to `import torch`."""
    program = (
        "import sys, time, torch; n = len(sys.modules); t = time.perf_counter(); import interp; "
        "print(1e3 * (time.perf_counter() - t), len(sys.modules) - n)"
    )
    times, modules = [], 0
    for _ in range(processes):
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        milliseconds, count = out.stdout.split()
        times.append(float(milliseconds))
        modules = int(count)
    return {"case": "import", "added_ms": min(times), "added_modules": modules}


def _sizes(ov: LowRank) -> Row:
    layers, heads = ov.batch_shape
    return {"layers": layers, "heads": heads, "d_model": ov.shape[-1]}


def _compared(case: str, peer_name: str, sizes: Row, peer: Run, ours: Run, *, pairs: int) -> Row:
    """Run both in turns: times, ratio, and the error of ours against the peer."""
    times: list[tuple[float, float]] = []
    _timed(ours)
    for _ in range(pairs):
        (expected, before), (result, after) = _timed(peer), _timed(ours)
        times.append((before, after))
    ratios = torch.tensor([a / b for a, b in times])
    error = (expected - result).abs().max() / expected.abs().max()
    return {
        "case": case,
        "peer": peer_name,
        **sizes,
        "peer_ms": 1e3 * min(a for a, _ in times),
        "ours_ms": 1e3 * min(b for _, b in times),
        "ratio_p50": ratios.quantile(0.5).item(),
        "ratio_p10": ratios.quantile(0.1).item(),
        "ratio_p90": ratios.quantile(0.9).item(),
        "error": error.item(),
    }


def _timed(run: Run) -> tuple[Tensor, float]:
    start = time.perf_counter()
    result = run()
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return result, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m interp.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def table(rows: list[Row]) -> str:
    """Rows as aligned text, a block for each set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns, *(tuple(_cell(v) for v in row.values()) for row in group)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
