"""Edges of a decoder: exact effects against a forward pass, estimates against exact effects."""

import itertools
from collections.abc import Callable

import pytest
import torch
from interp import (
    AttentionOnly,
    Decoder,
    describe,
    induction_circuit,
    knock_out_attention,
    patch,
    record,
)
from interp.patching import (
    Node,
    edge_attribution,
    logit_difference,
    patch_edges,
    patch_streams,
)
from interp.patching.restart import Restart
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")

SIZES = {
    "vocab_size": 29, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 9,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXHAUSTIVE = pytest.mark.exhaustive
#: Gemma 2 has grouped queries and norms after the attention, GPT-NeoX has biases and parallel
#: blocks. An MLP is a black box for edges.
EDGES = (
    *("Gemma2", "GPTNeoX"),
    *(pytest.param(family, marks=EXHAUSTIVE) for family in ("GPT2", "Llama", "Mixtral")),
)
#: Norms after the attention matter to the senders, which exact effects test.
ESTIMATES = (
    *("Llama", "GPTNeoX", "Olmo2"),  # OLMo 2 normalizes the queries of all heads together.
    *(pytest.param(family, marks=EXHAUSTIVE) for family in ("GPT2", "Gemma2", "Mixtral")),
)
CLEAN = torch.tensor([[1, 2, 3, 4, 2, 7]])
CORRUPTED = torch.tensor([[1, 2, 9, 4, 11, 7]])


def build_random_decoder(family: str, size: float = 0.3) -> Decoder:
    sizes = {
        k: v
        for k, v in SIZES.items()
        if family != "GPTNeoX" or k not in ("num_key_value_heads", "head_dim")
    }
    if family == "GPT2":
        sizes = {"vocab_size": 29, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 9}
        sizes |= {"bos_token_id": None, "eos_token_id": None}
    if family == "Gemma2":
        sizes["sliding_window"] = 3
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model_class = getattr(transformers, name)
    config = model_class.config_class(**sizes, attn_implementation="eager")
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config)
    model = model.double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * size)
    return describe(model)


def build_metric(decoder: Decoder):
    return logit_difference(decoder.norm, decoder.unembed, 5, 8)


def compute_by_hand(decoder: Decoder, sender: Node, receiver: Node) -> float:
    """Return the effect of an edge from a manual forward pass, without patches."""
    runs = []
    for tokens in (CLEAN, CORRUPTED):
        with record(
            decoder, "**", "blocks.*.attention.o:input", "blocks.0:input", "norm:input"
        ) as seen:
            decoder(tokens)
        runs.append(seen)
    clean, corrupted = runs
    at = f"blocks.{sender.layer}."
    if sender.kind == "embed":
        change = clean["blocks.0:input"] - corrupted["blocks.0:input"]
    elif sender.kind == "mlp":
        change = clean[at + "mlp_out"] - corrupted[at + "mlp_out"]
    else:
        block = decoder.layers[sender.layer]
        z = corrupted[at + "attention.o:input"].clone()
        mine = slice(
            sender.head * block.attention.d_head, (sender.head + 1) * block.attention.d_head
        )
        z[..., mine] = clean[at + "attention.o:input"][..., mine]
        change = block.attention_out(block.attention.o(z)) - corrupted[at + "attention_out"]
    x = corrupted["blocks.0:input"]
    for i, block in enumerate(decoder.layers):
        a = block.attention
        reads = {part: block.norm1(x) for part in "qkv"}
        projections = {part: getattr(a, part)(reads[part]) for part in "qkv"}
        if receiver.kind in projections and receiver.layer == i:
            mine = slice(receiver.head * a.d_head, (receiver.head + 1) * a.d_head)
            other = getattr(a, receiver.kind)(block.norm1(x + change))
            projections[receiver.kind] = projections[receiver.kind].clone()
            projections[receiver.kind][..., mine] = other[..., mine]
        pattern = a.compute_scores(projections["q"], projections["k"]).softmax(-1)
        v = projections["v"].unflatten(-1, (a.kv_heads, -1)).transpose(1, 2)
        v = v.repeat_interleave(a.heads // a.kv_heads, 1)
        attended = x + block.attention_out(a.o((pattern @ v).transpose(1, 2).flatten(2)))
        read = x if block.parallel else attended
        read = read + change if receiver.kind == "mlp" and receiver.layer == i else read
        x = attended + block.mlp_out(block.mlp(block.norm2(read)))
    metric = build_metric(decoder)
    base = metric(x if receiver.kind == "final" else corrupted["norm:input"])
    return (metric(x + change if receiver.kind == "final" else x) - base).item()


@torch.no_grad()
@pytest.mark.parametrize("family", EDGES)
def test_patch_edges_equals_a_manual_forward_pass(family: str) -> None:
    decoder = build_random_decoder(family)
    edges = patch_edges(decoder, CLEAN, CORRUPTED, build_metric(decoder), batch=5)
    layers, heads = len(decoder.layers), decoder.layers[0].attention.heads
    assert len(edges.senders) == 1 + layers * (heads + 1)
    compared = set()
    for (s, sender), (r, receiver) in itertools.product(
        enumerate(edges.senders), enumerate(edges.receivers)
    ):
        if edges.exists[s, r] and (s + r) % 7 == 0:  # a seventh of them, all kinds
            compared |= {f"from {sender.kind}", f"to {receiver.kind}"}
            expected = compute_by_hand(decoder, sender, receiver)
            assert edges.values[s, r].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    senders, receivers = ("embed", "head", "mlp"), ("q", "k", "v", "mlp", "final")
    assert compared == {*(f"from {k}" for k in senders), *(f"to {k}" for k in receivers)}
    effects = edges.values[edges.exists]
    largest = effects[effects.abs().argsort(descending=True)[:5]]
    assert [value for _, _, value in edges.top(5)] == largest.tolist()
    first_q, last_mlp = Node("q", 0, 0), Node("mlp", layers - 1)
    exists = {
        (a, b): edges.exists[i, j]
        for i, a in enumerate(edges.senders)
        for j, b in enumerate(edges.receivers)
    }
    assert exists[Node("embed"), first_q]
    assert not exists[Node("head", 0, 0), first_q]
    assert not exists[last_mlp, last_mlp]
    assert bool(exists[Node("head", 0, 0), Node("mlp", 0)]) != decoder.settings.parallel
    some = patch_edges(
        decoder,
        CLEAN,
        CORRUPTED,
        build_metric(decoder),
        senders=[Node("head", 0, 1)],
        receivers=[Node("k", 1, 0), Node("final")],
    )
    for j, receiver in enumerate(some.receivers):
        s, r = edges.senders.index(Node("head", 0, 1)), edges.receivers.index(receiver)
        torch.testing.assert_close(some.values[0, j], edges.values[s, r])


@pytest.mark.parametrize("family", ESTIMATES)
def test_attribution_of_edges_has_second_order_error(family: str) -> None:
    decoder = build_random_decoder(family)
    metric = build_metric(decoder)
    table = decoder.embed.weight
    step = torch.randn(2, table.shape[1], dtype=torch.float64)
    errors = []
    for size in (1e-2, 1e-3):  # the tokens that differ have embeddings this far apart
        table[[9, 11]] = table[[3, 2]] + size * step
        edges = edge_attribution(decoder, CLEAN, CORRUPTED, metric, exact=None)
        assert edges.values[edges.exists].abs().max() > size / 100
        errors.append(edges.error.abs().max().item())
    assert errors[1] < errors[0] / 30


def build_attention_only(layers: int, sharpness: float) -> Decoder:
    """Return a model whose heads attend to other tokens in the clean run than in the corrupted run.

    Each token that occurs has a separate dimension, so that column i of a projection is the query
    or key of the i-th token. Token 2 looks at token 1 and token 11 at token 4. Token 7 looks at
    token 3, and at token 1 where 9 stands in the place of 3.
    """
    occurring = [1, 2, 3, 4, 7, 9, 11]
    keys = {1: (1, 0, 0, 0), 2: (0, 0, 0, 1), 3: (0, 1, 0, 0), 4: (0, 0, 1, 0)}
    queries = {2: (1, 0, 0, 0), 11: (0, 0, 1, 0), 7: (0.4, 1, 0, 0)}
    model = AttentionOnly(vocabulary=12, context=6, d_model=8, layers=layers, heads=2).double()
    wave = torch.arange(64, dtype=torch.float64).view(8, 8)
    with torch.no_grad():
        model.embed.weight.zero_()
        model.position.weight.zero_()
        model.unembed.weight.copy_((1.7 * torch.arange(96.0).view(12, 8)).cos())
        model.embed.weight[occurring, range(len(occurring))] = 1
        for block in model.layers:
            attention = block.attention
            for linear, by_token in ((attention.q, queries), (attention.k, keys)):
                linear.weight.zero_()
                for token, vector in by_token.items():
                    column = torch.tensor(vector, dtype=torch.float64).repeat(2)
                    linear.weight[:, occurring.index(token)] = column
            attention.q.weight.mul_(sharpness)
            attention.v.weight.copy_((2.3 * wave).sin())
            # A small value, so that the second layer's heads attend to the same tokens.
            attention.o.weight.copy_(0.01 * (3.1 * wave).cos())
    return model


def build_sum_of_logit_differences(decoder: Decoder):
    direction = decoder.unembed.weight[5] - decoder.unembed.weight[8]
    return lambda stream: (stream @ direction).sum(-1)


@pytest.mark.parametrize("sharpness", [1.0, 3000.0])
def test_corrected_attribution_is_exact_if_linear_after_the_softmax(
    sharpness: float,
) -> None:
    """A saturated softmax has no gradient, so gradients alone would miss its effect."""
    two = build_attention_only(2, sharpness)
    metric = build_sum_of_logit_differences(two)
    last = [
        node for node in patch_edges(two, CLEAN, CORRUPTED, metric).receivers if node.layer == 1
    ]
    edges = edge_attribution(two, CLEAN, CORRUPTED, metric, receivers=last, exact=None)
    assert edges.values.abs().max() > 1e-4
    assert edges.error.abs().max() < 1e-9 * edges.values.abs().max()


def test_k_composition_is_the_only_path_through_the_induction_circuit() -> None:
    decoder = induction_circuit(dtype=torch.float64)
    clean, corrupted = torch.tensor([[0, 1, 2, 3, 4, 1]]), torch.tensor([[0, 3, 2, 3, 4, 1]])
    output = decoder.unembed.weight[2]  # 2 follows 1 in the clean run alone

    def metric(stream: Tensor) -> Tensor:
        return stream[:, -1] @ output

    edges = patch_edges(decoder, clean, corrupted, metric, senders=[Node("head", 0, 0)])
    effects = {str(b): value for _, b, value in edges.top(99) if abs(value) > 1e-12}
    assert effects == {"k 1.0": pytest.approx(1.0)}
    estimated = edge_attribution(decoder, clean, corrupted, metric, exact=None)
    assert estimated.error[estimated.senders.index(Node("head", 0, 0))].abs().max() < 1e-12
    # Edges of the embedding have an error, because the second layer's softmax is linearized.
    assert estimated.error[0].abs().max() == pytest.approx(1.0)


def test_errors_of_the_largest_estimates_are_reported() -> None:
    decoder = build_attention_only(2, 1.0)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    clean, corrupted = torch.cat([CLEAN, CORRUPTED.flip(1)]), torch.cat([CORRUPTED, CLEAN.flip(1)])
    for pair in ((CLEAN, CORRUPTED), (clean, corrupted)):
        edges = edge_attribution(decoder, *pair, metric, exact=5)
        exact = patch_edges(decoder, *pair, metric)
        measured = edges.exists & ~edges.error.isnan()
        assert measured.sum() == 5
        torch.testing.assert_close(edges.exact[measured], exact.values[measured])
        smallest = edges.values[measured].abs().min()
        assert (edges.values[edges.exists & ~measured].abs() <= smallest).all()
        assert not edge_attribution(decoder, *pair, metric).error[edges.exists].isnan().all()


def test_metrics_may_change_their_argument_in_place() -> None:
    decoder = build_attention_only(2, 1.0)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    effects = patch_edges(decoder, CLEAN, CORRUPTED, lambda streams: metric(streams.square_()))
    expected = patch_edges(decoder, CLEAN, CORRUPTED, lambda streams: metric(streams.square()))
    torch.testing.assert_close(effects.values, expected.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_metrics_may_have_another_type_than_the_model(dtype: torch.dtype) -> None:
    decoder = build_attention_only(2, 1.0).to(dtype)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    expected = patch_edges(decoder, CLEAN, CORRUPTED, metric).values.float()
    tolerance = float(expected.abs().max()) * 0.05
    wide = [lambda streams: metric(streams).float(), lambda streams: metric(streams).double()]
    for function in (*wide, lambda streams: metric(streams) > 0):
        effects = patch_edges(decoder, CLEAN, CORRUPTED, function)
        if function in wide:
            torch.testing.assert_close(effects.values.float(), expected, atol=tolerance, rtol=0)
            estimated = edge_attribution(decoder, CLEAN, CORRUPTED, function, exact=None)
            torch.testing.assert_close(estimated.exact, effects.values)
        else:
            with pytest.raises(ValueError, match="one number with a gradient"):
                edge_attribution(decoder, CLEAN, CORRUPTED, function)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for function in (patch_edges, edge_attribution):
            assert function(decoder, CLEAN, CORRUPTED, metric).values.isfinite().all()


def test_metrics_that_mix_streams_are_refused() -> None:
    decoder = build_attention_only(2, 1.0)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    mixtures: list[Callable[[Tensor], Tensor]] = [
        lambda values: values - values.mean(),
        lambda values: values.softmax(0),
        lambda values: values / values.abs().max(),
        lambda values: values.roll(1),
        lambda values: torch.from_numpy(values.numpy() - values.numpy().mean()),
    ]
    for mixed, function in itertools.product(mixtures, (patch_edges, patch_streams)):
        with pytest.raises(ValueError, match="depends on the other streams of its batch"):
            function(decoder, CLEAN, CORRUPTED, lambda streams, f=mixed: f(metric(streams)))


def test_metrics_without_gradients_are_measured() -> None:
    decoder = build_attention_only(2, 1.0)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    expected = patch_streams(decoder, CLEAN, CORRUPTED, metric).values
    values = patch_streams(
        decoder, CLEAN, CORRUPTED, lambda streams: torch.from_numpy(metric(streams).numpy())
    ).values
    assert torch.equal(values, expected)
    with torch.inference_mode():
        assert torch.equal(patch_streams(decoder, CLEAN, CORRUPTED, metric).values, expected)
    is_positive = patch_streams(decoder, CLEAN, CORRUPTED, lambda streams: metric(streams) > 0)
    assert torch.equal(is_positive.values, (expected > 0).float())


def test_unknown_edges_are_refused() -> None:
    decoder = build_attention_only(1, 1.0)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    with pytest.raises(ValueError, match=r"among the senders: embed, head 0\.0"):
        patch_edges(decoder, CLEAN, CORRUPTED, metric, senders=[Node("head", 1, 0)])
    with pytest.raises(TypeError, match=r"got a Linear; pass describe\(model\)"):
        patch_edges(torch.nn.Linear(2, 2), CLEAN, CORRUPTED, metric)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got exact effects of patch_edges"):
        patch_edges(decoder, CLEAN, CORRUPTED, metric).error  # noqa: B018


def test_edges_are_refused_inside_a_patch() -> None:
    decoder = build_attention_only(2, 1.0)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    knocked_out = {"blocks.1.attention.pattern": knock_out_attention([5], [2])}
    with patch(decoder, knocked_out):
        decoder(CLEAN)  # A patch that never runs is another error.
        for measure in (patch_edges, edge_attribution):
            with pytest.raises(ValueError, match=r"'blocks\.1\.attention\.pattern' has a hook"):
                measure(decoder, CLEAN, CORRUPTED, metric)


def test_recorded_runs_do_not_store_the_graph() -> None:
    run = Restart(build_random_decoder("GPTNeoX").requires_grad_(), CORRUPTED, batch=1)
    assert not any(stream.requires_grad for stream in run.block_inputs)


def test_equal_prompts_have_no_gap_to_recover() -> None:
    decoder = build_attention_only(2, 1.0)
    metric = logit_difference(None, decoder.unembed, 5, 8)
    for shift in range(3):
        result = patch_streams(decoder, CLEAN + shift, CLEAN + shift, metric)
        with pytest.raises(ValueError, match="no gap to recover"):
            result.recovered  # noqa: B018
