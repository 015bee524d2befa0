"""Benchmarks of composition scores and batched patching, compared with direct computations.

The direct computation (the peer) and ours alternate (A B A B ...). The columns `ratio_p10`,
`ratio_p50` and `ratio_p90` are quantiles of the peer's time divided by our time. `error` is the
largest difference divided by the largest result of the peer. If the peer would compute many forward
passes of equal cost, it computes only a sample, and its time is scaled up.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp.circuits.composition import composition_scores
from interp.circuits.low_rank import LowRank
from interp.decoder.decoder import Decoder
from interp.decoder.describe import describe
from interp.decoder.modules.settings import Settings
from interp.decoder.rotary import Rotary, compute_rotary_angles
from interp.patching import logit_difference, patch_parts, patch_streams
from interp.patching.activation import find_sites_and_heads
from interp.patching.batching import replace_heads
from interp.tap import patch, record

Row = dict[str, float | int | str]
Run = Callable[[], Tensor]
Peer = Callable[[LowRank, LowRank], Tensor]


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Run the benchmarks of patching; return one row per case.

    The models have the size of GPT-2 small, or 3 layers of 96 dimensions if `quick`.
    """
    torch.manual_seed(0)
    sizes = {"vocabulary": 50257, "d_model": 768, "layers": 12, "heads": 12}
    if quick:
        sizes = {"vocabulary": 1000, "d_model": 96, "layers": 3, "heads": 3}
    length, sample = (8, 8) if quick else (15, 24)
    rows = []
    for family in ("gpt2", "llama"):
        model = build_random_decoder(family, **sizes).to(device)
        for part in (":input", "attention.o:input"):
            rows.append(compare_patching(model, family, part, length, sample=sample))
    return rows


def build_random_decoder(
    family: str, *, vocabulary: int, d_model: int, layers: int, heads: int, context: int = 1024
) -> Decoder:
    """Return a random decoder like "gpt2", or like Llama with 3 query heads per key head."""
    is_gpt2 = family == "gpt2"
    d_head = d_model // heads
    d_keys = d_model if is_gpt2 else heads // 3 * d_head
    d_mlp = 4 * d_model if is_gpt2 else 8 * d_model // 3
    block: dict[str, tuple[int, ...]] = {"norm1": (d_model,), "norm2": (d_model,)}
    block |= {"attention.q": (d_model, d_model), "attention.k": (d_keys, d_model)}
    block |= {"attention.v": (d_keys, d_model), "attention.o": (d_model, d_model)}
    block |= {"mlp.up": (d_mlp, d_model), "mlp.down": (d_model, d_mlp)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, d_model), "norm": (d_model,)}
    if is_gpt2:
        shapes["position"] = (context, d_model)
    else:
        shapes["unembed"] = (vocabulary, d_model)
        block["mlp.gate"] = (d_mlp, d_model)
    for i in range(layers):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    weights = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1
        weights[f"{name}.weight"] = torch.ones(shape) if is_norm else 0.02 * torch.randn(shape)
        if is_gpt2 and name not in ("embed", "position"):
            weights[f"{name}.bias"] = torch.zeros(shape[0])
    settings = Settings(
        heads=heads,
        d_head=d_head,
        scale=d_head**-0.5,
        rotary=(Rotary(() if is_gpt2 else compute_rotary_angles(d_head, 1e4)),) * layers,
        windows=(None,) * layers,
        centered=is_gpt2,
        activation="gelu_new" if is_gpt2 else "silu",
    )
    return Decoder(weights, settings)


def compare_composition(peer: Peer, ov: LowRank, qk: LowRank) -> Row:
    """Compare K-composition scores of all pairs of heads with those of a peer.

    The columns `peer_mib` and `ours_mib` are the sizes of the largest tensors in MiB.
    """
    ours = partial(composition_scores, kind="k")
    peer_run, our_run = partial(peer, ov, qk), partial(ours, ov, qk)
    row = _compare("k_composition", _get_sizes(ov), peer_run, our_run, pairs=6)
    for key, run in (("peer_mib", peer_run), ("ours_mib", our_run)):
        with _LargestTensor() as largest:  # type: ignore[no-untyped-call]
            run()
        row[key] = largest.bytes / 2**20
    return row


def compare_with_transformer_lens() -> Row:
    """Compare K-composition scores with TransformerLens's function, at the size of GPT-2 small."""
    matrix = importlib.import_module("transformer_lens.FactoredMatrix").FactoredMatrix
    scores = importlib.import_module("transformer_lens.utilities.matrix").composition_scores

    def transformer_lens(ov: LowRank, qk: LowRank) -> Tensor:
        # TransformerLens uses row vectors, and also scores pairs whose first head is not earlier.
        pairs: Tensor = scores(matrix(ov.b.mT, ov.a.mT), matrix(qk.a, qk.b).T)
        return pairs * torch.ones(pairs.shape[::2], device=pairs.device).triu(1)[:, None, :, None]

    ov, qk = (LowRank(torch.randn(12, 12, 768, 64), torch.randn(12, 12, 64, 768)) for _ in range(2))
    version = importlib.metadata.version("transformer-lens")
    return compare_composition(transformer_lens, ov, qk) | {"peer": f"transformer_lens {version}"}


def measure_describe(*, quick: bool = False) -> Row:
    """Measure `describe` for a bfloat16 Llama of TinyLlama's size, or a small Llama if `quick`.

    The column `memory` is the peak memory, including the model, divided by the memory of the model.
    It is correct only in a new process.
    """
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=64 if quick else 2048,
        intermediate_size=96 if quick else 5632,
        num_hidden_layers=2 if quick else 22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=64 if quick else 2048,
        dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    decoder = describe(model)
    seconds = time.perf_counter() - start
    added_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib) * 1024
    return {
        "case": "describe",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "memory": (model_bytes + added_bytes) / model_bytes,
        "longest_text": max(comparison.length for comparison in decoder.comparisons),
    }


class _LargestTensor(TorchDispatchMode):
    """A mode that records the size of the largest tensor that an operator creates, except views."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = out if isinstance(out, tuple | list) else (out,)
            for tensor in outputs:
                if isinstance(tensor, Tensor):
                    self.bytes = max(self.bytes, tensor.nbytes)
        return out


def compare_patching(
    model: Decoder, family: str, part: str, length: int, *, sample: int = 24
) -> Row:
    """Compare batched patching with one forward pass per patch.

    The patches replace every stream (`part=":input"`), or every head of a part, at every position.
    The peer computes about `sample` patches, evenly spaced, and its time is scaled up.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.embed.num_embeddings, (2, 1, length), generator=generator)
    clean, corrupted = tokens.to(model.embed.weight.device)
    metric = logit_difference(model.norm, model.unembed, 1, 2)
    sites, heads = find_sites_and_heads(model, part)
    patches = list(itertools.product(range(len(sites)), range(heads), range(length)))
    chosen = patches[:: max(1, len(patches) // sample)]

    def one_forward_each() -> Tensor:
        with record(model, *sites) as recorded:
            model(clean)
        values = []
        for layer, head, position in chosen:
            new = recorded[sites[layer]].unflatten(-1, (heads, -1))[0, position, head]
            index = slice(None), position, head
            with patch(model, {sites[layer]: partial(replace_heads, index, new, heads)}):
                logits = model(corrupted)[0, -1]
            values.append(logits[1] - logits[2])
        return torch.stack(values)

    def ours() -> Tensor:
        if part == ":input":
            values = patch_streams(model, clean, corrupted, metric).values[:, None]
        else:
            values = patch_parts(model, part, clean, corrupted, metric).values
        return torch.stack([values[index] for index in chosen])

    case = f"patch_{'streams' if part == ':input' else 'heads'}_{family}"
    sizes = {**_get_sizes(model.ov()), "patches": len(patches)}
    peer_scale = len(patches) / len(chosen)
    return _compare(case, sizes, one_forward_each, ours, pairs=2, peer_scale=peer_scale)


def _get_sizes(ov: LowRank) -> Row:
    layers, heads = ov.batch_shape
    return {"layers": layers, "heads": heads, "d_model": ov.shape[-1]}


def _compare(
    case: str, sizes: Row, peer: Run, ours: Run, *, pairs: int, peer_scale: float = 1.0
) -> Row:
    """Measure both computations alternately, `pairs` times; return a row of the table.

    `peer_scale` is the factor from the peer's sample to all results.
    """
    _measure_seconds(ours)  # A warm-up.
    peer_seconds, our_seconds = torch.empty(pairs), torch.empty(pairs)
    for i in range(pairs):
        expected, seconds = _measure_seconds(peer)
        peer_seconds[i] = seconds * peer_scale
        result, our_seconds[i] = _measure_seconds(ours)
    ratios = peer_seconds / our_seconds
    return {
        "case": case,
        "peer": (peer.func if isinstance(peer, partial) else peer).__name__,
        **sizes,
        "peer_ms": 1e3 * peer_seconds.median().item(),
        "ours_ms": 1e3 * our_seconds.median().item(),
        "ratio_p50": ratios.quantile(0.5).item(),
        "ratio_p10": ratios.quantile(0.1).item(),
        "ratio_p90": ratios.quantile(0.9).item(),
        "error": ((expected - result).abs().max() / expected.abs().max()).item(),
    }


def _measure_seconds(run: Run) -> tuple[Tensor, float]:
    """Return the result of `run` and the seconds that it takes."""
    start = time.perf_counter()
    result = run()
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return result, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks and print their rows; with `--json`, also write them to a file."""
    parser = argparse.ArgumentParser(prog="python -m interp.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    parser.add_argument(
        "--beside-transformer-lens", action="store_true", help="compare with TransformerLens only"
    )
    parser.add_argument(
        "--describe", action="store_true", help="describe a large model on one thread only"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    if arguments.beside_transformer_lens:
        rows = [compare_with_transformer_lens()]
    elif arguments.describe:
        torch.set_num_threads(1)
        rows = [measure_describe(quick=arguments.quick)]
    else:
        rows = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json:
        part = arguments.json.with_name(f"{arguments.json.name}.{os.getpid()}.part")
        part.write_text(json.dumps(rows, indent=1) + "\n")
        part.replace(arguments.json)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
