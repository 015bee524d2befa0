"""The dtype of a run decides the arithmetic of products, and nothing else."""

import itertools
import types
from dataclasses import replace

import pytest
import torch
from llmsys_suite.audit import evidence
from llmsys_suite.audit.stage_checks import attention as attention_checks
from llmsys_suite.audit.tolerances import compute_loss_tolerance, compute_weight_tolerance
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.resolution import check, resolve
from llmsys_suite.stages import attention, scale
from llmsys_suite.step.case import Case
from llmsys_suite.text.data import Corpus
from llmsys_suite.variants.single import Variant
from torch import nn


def make_run(dtype):
    config = RunConfig(size="mini", world=1, context=16, dtype=dtype)
    phase = types.SimpleNamespace(phase=lambda name: torch.profiler.record_function(name))
    return Run(config, 0, 1, torch.device("cpu"), None, phase, None)


def list_product_dtypes(run):
    seen = []
    variant = Variant(run, run.model)
    for module in variant.decoder.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    tokens = torch.arange(32).view(2, 16)
    loss = variant.forward_backward(tokens, tokens)
    return variant, loss, set(seen)


def test_products_of_a_run_in_bf16_are_in_bf16_and_all_state_is_float32():
    exact, loss, dtypes = list_product_dtypes(make_run("fp32"))
    assert dtypes == {torch.float32}
    variant, rounded, dtypes = list_product_dtypes(make_run("bf16"))
    assert dtypes == {torch.bfloat16}
    assert rounded == pytest.approx(loss, rel=1e-3)
    assert rounded != loss
    for theirs, parameter in zip(
        exact.decoder.parameters(), variant.decoder.parameters(), strict=True
    ):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        distance = (parameter.grad - theirs.grad).norm() / theirs.grad.norm()
        assert 0 < distance < 5e-2
    variant.update()
    state = [t for s in variant.optimizer.state.values() for t in s.values()]
    assert {tensor.dtype for tensor in state} == {torch.float32}


def test_queries_and_keys_stay_in_bf16_after_their_rotation():
    seen = []

    def attention(q, k, v, *, is_causal):
        seen.append({q.dtype, k.dtype, v.dtype})
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    model = Decoder(ModelConfig.from_size("mini", context=16), attention)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(256, (2, 16)))
    assert seen == [{torch.bfloat16}] * 2


def test_checks_in_float32_restore_the_dtype_also_after_an_exception():
    run = make_run("bf16")

    def fail():
        assert run.compute_dtype == torch.float32
        assert not run.autocast()._enabled
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), run.in_float32():
        fail()
    assert run.compute_dtype == torch.bfloat16
    assert run.autocast()._enabled


def test_saved_bytes_are_counted_in_the_dtype_of_the_run(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    saved = {}
    for dtype in ("fp32", "bf16"):
        run = make_run(dtype)
        run.config = replace(run.config, data=text, steps=1, warmup=0)
        saved[dtype] = evidence.compute_evidence(run)["saved_bytes"]
    assert saved["bf16"] < saved["fp32"]


def test_the_held_out_loss_of_scale_is_computed_in_float32(monkeypatch):
    run = make_run("tf32")
    run.corpus = Corpus(torch.arange(4000) % 256, torch.arange(20_000) % 256)
    precisions = []

    def loss(model, tokens, targets):
        if not torch.is_grad_enabled():
            precisions.append((run.config.dtype, torch.get_float32_matmul_precision()))
        return model(tokens).float().square().mean()

    monkeypatch.setattr(Decoder, "compute_loss", loss)
    monkeypatch.setattr(scale, "HELDOUT_ROWS", 2)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        scale.train_one(run, 1.0, 4, 0)
    finally:
        torch.set_float32_matmul_precision(before)
    assert precisions == [("fp32", "highest")]


def round_to_tf32(x):
    """Return x with the 11 significant bits of tf32; the gradient passes unchanged."""
    mantissa, exponent = torch.frexp(x.detach())
    rounded = torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)
    return x + (rounded - x.detach())


def compute_tf32_attention(q, k, v, *, is_causal):
    q, k, v = map(round_to_tf32, (q, k, v))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return round_to_tf32(scores.masked_fill(future, float("-inf")).softmax(-1)) @ v


@pytest.mark.parametrize(
    ("dtype", "factor", "passes"), [("fp32", 1, False), ("tf32", 1, True), ("tf32", 1.01, False)]
)
def test_the_audit_of_attention_allows_the_rounding_of_tf32_in_tf32_only(
    monkeypatch, dtype, factor, passes
):
    run = make_run(dtype)
    kernels = {
        "SDPA": lambda q, k, v, *, is_causal: (
            factor * compute_tf32_attention(q, k, v, is_causal=is_causal)
        )
    }
    monkeypatch.setattr(attention, "KERNELS", kernels)
    monkeypatch.setattr(attention_checks, "KERNELS", kernels)
    result = attention.run(run)
    checks = itertools.islice(attention_checks.check_stage(run, result), 3)
    assert {check.name: check.passed for check in checks}["outputs and gradients"] == passes


def test_tf32_is_refused_without_a_gpu_and_unknown_dtypes_everywhere(monkeypatch):
    with pytest.raises(UsageError, match="dtype tf32 needs a CUDA device, got preset cpu"):
        check(RunConfig(dtype="tf32"))
    with pytest.raises(UsageError, match="dtype tf32 needs device cuda"):
        Case(dtype="tf32")
    with pytest.raises(UsageError, match="dtype 'fp64' is unknown; choose from fp32, tf32, bf16"):
        resolve([], preset="cpu", dtype="fp64")
    monkeypatch.setattr("llmsys_suite.resolution.count_gpus", lambda: 2)
    assert resolve([], preset="gpu", dtype="tf32").dtype == "tf32"


@pytest.mark.parametrize("tolerance", [compute_loss_tolerance, compute_weight_tolerance])
def test_tolerances_widen_with_the_rounding_of_the_dtype(tolerance):
    exact, half, third = (
        tolerance(RunConfig(dtype=dtype), 5e-6) for dtype in ("fp32", "bf16", "tf32")
    )
    assert exact == 5e-6
    assert exact < third < half
