"""The Gluon kernels: lines executed in Python, and schedules explored; see also `test_compiled`."""

import itertools
import math

import pytest
import torch
from against_float64 import assert_as_good_as_plain
from flashattn2 import (
    attention_reference,
    dispatch,
    explain,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from flashattn2.experimental import backward, forward
from flashattn2.spec import AttentionSpec
from gluon_machine import Machine
from gluon_schedules import explore


@pytest.fixture
def machine(monkeypatch):
    """Run `backend="gluon"` on CPU tensors in a `Machine`."""
    kernel = Machine("forward_kernel")
    monkeypatch.setattr(forward, "forward_kernel", kernel)
    monkeypatch.setattr(dispatch, "_find_gluon_device_obstacle", lambda _: None)
    return kernel


@pytest.fixture(params=[2, 3], ids="{} consumers".format)
def consumers(request, monkeypatch):
    """Use this number of consumers at head dim 64, for any number of queries."""
    if request.param == 3:
        monkeypatch.setitem(forward.TILES, 64, forward.LONG_TILE)
    return request.param


@pytest.fixture
def back(machine, interpreter, monkeypatch):
    """Run the backward pass of `backend="gluon"` in a `Machine`."""
    kernel = Machine("backward_kernel")
    monkeypatch.setattr(backward, "backward_kernel", kernel)
    return kernel


def draw_tensors(seq_q, seq_k, dim, dtype=torch.bfloat16, heads=2, kv_heads=1, batch=1):
    q = torch.randn(batch, heads, seq_q, dim, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, seq_k, dim, dtype=dtype) for _ in "kv")
    return q, k, v


def compute_errors(q, k, v, **options):
    """Return the largest errors of the output and log-sum-exp, ours and those of plain PyTorch."""
    wide = [x.double() for x in (q, k, v)]
    exact, exact_lse = attention_reference(*wide, return_lse=True, **options)
    out, lse = flash_attention(q, k, v, return_lse=True, backend="gluon", **options)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    blind = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    assert not out[blind].any()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=2e-5)
    return (out - exact).abs().max().item(), exact


BANDS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"window": (70, 20)},
    "left": {"window": (150, None)},
    "ahead": {"window": (None, 40)},
    "narrow": {"window": (3, 0), "is_causal": True},
}


def list_lengths_and_bands():
    """Return the cases of the forward pass; the usual tests run each band and each length once."""
    cases = []
    for lengths, band in itertools.product([(129, 400), (300, 129), (1, 257)], BANDS):
        is_usual = lengths == (129, 400) or band == "causal"
        marks = [] if is_usual else [pytest.mark.exhaustive]
        cases.append(pytest.param(lengths, band, marks=marks))
    return cases


@pytest.mark.parametrize(("lengths", "band"), list_lengths_and_bands(), ids=str)
def test_gluon_lines_compute_attention(machine, consumers, lengths, band):
    """Errors against float64 are half a unit in the last place of P and of the output."""
    for dim, dtype in ((64, torch.bfloat16), (128, torch.float16))[: 4 - consumers]:
        ours, exact = compute_errors(*draw_tensors(*lengths, dim, dtype), **BANDS[band])
        assert ours <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def list_orders_lengths_and_bands():
    """Return the cases of the backward pass.

    Atomic additions concern only dQ, so the usual tests run them for three bands.
    """
    cases = []
    for order, lengths, band in itertools.product(
        ("ordered", "atomic"), [(129, 300), (200, 150)], BANDS
    ):
        is_usual = order == "ordered" or band in ("all", "causal", "window")
        marks = [] if is_usual and lengths == (200, 150) else [pytest.mark.exhaustive]
        cases.append(pytest.param(order == "ordered", lengths, band, marks=marks))
    return cases


@pytest.mark.parametrize(
    ("deterministic", "lengths", "band"), list_orders_lengths_and_bands(), ids=str
)
def test_gluon_gradients_are_as_good_as_plain(back, deterministic, lengths, band):
    """Gradients of queries that see no key, and of the log-sum-exp, are included."""

    def run(*args, **options):
        return flash_attention(*args, backend="gluon", deterministic=deterministic, **options)

    torch.manual_seed(len(band))
    dim = 64 if (lengths[0] > lengths[1]) == deterministic else 128
    assert_as_good_as_plain(run, draw_tensors(*lengths, dim), **BANDS[band])


def test_strides_and_a_missing_head_dimension_do_not_change_the_result(machine):
    q, k, v = draw_tensors(70, 130, 64, heads=4, kv_heads=2, batch=2)
    expected = flash_attention(q, k, v, backend="gluon")
    gaps = torch.zeros(2, 130, 2, 71, dtype=k.dtype).transpose(1, 2)[..., 3:67]
    gaps.copy_(k)
    assert torch.equal(flash_attention(q, gaps, v, backend="gluon"), expected)
    beside = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(flash_attention(q, k, beside, backend="gluon"), expected)
    single_head = (x[:, 0] for x in (q, k, v))
    assert torch.equal(flash_attention(*single_head, backend="gluon"), expected[:, 0])
    repeated = k[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(
        flash_attention(q, repeated, v, backend="gluon"),
        flash_attention(q, repeated.clone(), v, backend="gluon"),
    )


def test_empty_tensors_launch_no_program(machine):
    for shape, keys in (((0, 2, 5, 64), 5), ((1, 2, 0, 64), 5), ((1, 2, 5, 64), 0)):
        q, k = (torch.randn(*shape[:2], n, 64).bfloat16() for n in (shape[2], keys))
        out, lse = flash_attention(q, k, k, return_lse=True, backend="gluon")
        assert out.shape == q.shape
        assert not out.any()
        assert (lse == -math.inf).all()
    assert not machine.programs


def build_program(machine, dim, tiles, **options):
    """Return a program that iterates over `tiles` tiles of keys."""
    rows = forward.ROWS * forward.TILES[dim].consumers
    q, k, v = draw_tensors(rows, 128 * tiles, dim, heads=1)
    flash_attention(q, k, v, backend="gluon", **options)
    (program,) = machine.programs
    machine.programs.clear()
    return program


def build_backward_program(back, dim, tiles, which):
    """Return a program that streams `tiles` tiles; `which` names the kind of backward pass."""
    long, deterministic = backward.TILES[dim].rows * tiles, which != "atomic"
    lengths = (128, long) if which == "ordered by query" else (long, 128)
    inputs = [x.requires_grad_() for x in draw_tensors(*lengths, dim, heads=1)]
    out = flash_attention(*inputs, backend="gluon", deterministic=deterministic)
    out.sum().backward()
    program = back.programs[-1 if which == "ordered by query" else 0]
    back.programs.clear()
    return program


@pytest.mark.parametrize(
    "dim", [pytest.param(64, marks=pytest.mark.exhaustive), 128], ids="head dim {}".format
)
def test_no_schedule_of_the_forward_pass_deadlocks_or_races(machine, dim):
    """The number of tiles returns each barrier to its initial parity."""
    states = [
        explore(program.traces, program.arrivals)
        for tiles in range(1, 2 * forward.TILES[dim].stages + 2)
        for program in [build_program(machine, dim, tiles)]
    ]
    assert states == sorted(states)
    assert states[-1] > 2_000


@pytest.mark.parametrize(
    ("stages", "tiles"),
    [(2, 2), (2, 3), *(pytest.param(3, n, marks=pytest.mark.exhaustive) for n in range(1, 6))],
)
@pytest.mark.parametrize("window", [(None, 0), (192, 0)], ids=["causal", "window"])
def test_consumers_that_skip_tiles_neither_deadlock_nor_race(
    machine, monkeypatch, window, stages, tiles
):
    """Each of three consumers may skip the first or the last tile of the program.

    A stage is reused only if there are more tiles than stages.  The kernel has three stages, for
    which the exploration takes long, so the usual tests have two.
    """
    monkeypatch.setitem(forward.TILES, 64, forward.LONG_TILE._replace(stages=stages))
    program = build_program(machine, 64, tiles, window=window)
    assert len(program.traces) == 4
    products = [sum(op[0] == "mma" for op in trace) for trace in program.traces]
    assert tiles == 1 or len(set(products[:3])) > 1
    assert explore(program.traces, program.arrivals) > 100


WHICH = ["ordered by query", "atomic"]


@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.exhaustive), 128])
@pytest.mark.parametrize(
    "which", [pytest.param("ordered by key", marks=pytest.mark.exhaustive), *WHICH]
)
def test_no_schedule_of_the_backward_pass_deadlocks_or_races(back, which, dim):
    states = [
        explore(program.traces, program.arrivals)
        for tiles in (1, 2, 2 * backward.TILES[dim].stages + 1)
        for program in [build_backward_program(back, dim, tiles, which)]
    ]
    assert states == sorted(states)
    assert states[-1] > 300


def iter_faults(traces):
    """Yield the name of each injected fault and the traces of a kernel with it."""

    def is_at(op, kind, barrier):
        return op[0] == kind and (barrier is None or op[1][0] == barrier)

    def earlier(trace, kind, barrier):
        """Move each operation before its predecessor."""
        trace = list(trace)
        for i in range(1, len(trace)):
            if is_at(trace[i], kind, barrier):
                trace[i - 1 : i + 1] = trace[i], trace[i - 1]
        return trace

    changes = {
        "is missing": lambda op: [],
        "is there twice": lambda op: [op, op],
        "is for the other phase": lambda op: [(*op[:2], op[2] ^ 1)],
        "is for half of the bytes": lambda op: [(*op[:2], op[2] // 2)],
        "is too early": None,
    }
    of_kind = {
        "wait": ("is missing", "is for the other phase"),
        "arrive": ("is missing", "is there twice", "is too early"),
        "expect": ("is missing", "is there twice", "is for half of the bytes"),
        "fence": ("is missing",),
        "sent": ("is missing",),
    }
    for who, trace in enumerate(traces):
        places = {(op[0], op[1][0] if len(op) > 1 else None) for op in trace if op[0] in of_kind}
        for kind, barrier in sorted(places, key=str):
            for fault in of_kind[kind]:
                change = changes[fault]
                if change is None:
                    wrong = earlier(trace, kind, barrier)
                else:
                    changed = (change(op) if is_at(op, kind, barrier) else [op] for op in trace)
                    wrong = [op for ops in changed for op in ops]
                yield (
                    f"{kind} {barrier} of {who} {fault}",
                    [*traces[:who], wrong, *traces[who + 1 :]],
                )


def test_every_injected_barrier_fault_of_the_forward_pass_is_detected(machine):
    program = build_program(machine, 128, forward.TILES[128].stages + 2)
    injected = dict(iter_faults(program.traces))
    assert len(injected) == 2 * (3 * 2 + 2 * 3 + 2) + 2 * 2 + 3 * 3
    for fault, traces in injected.items():
        with pytest.raises(RuntimeError):
            print(fault, explore(traces, program.arrivals))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 2.0}, "it has a softcap"),
        ({"dim": 80}, "head dims of 64 or 128, equal for q and v, got 80 and 80"),
        ({"dtype": torch.float32}, "expected bfloat16 or float16, got torch.float32"),
    ],
)
def test_unsupported_input_of_gluon_is_refused_with_the_reason(machine, change, reason):
    change = dict(change)
    x = torch.randn(1, 1, 4, change.pop("dim", 64), dtype=change.pop("dtype", torch.bfloat16))
    with pytest.raises(ValueError, match=reason):
        flash_attention(x, x, x, backend="gluon", **change)


def test_gluon_needs_hopper_and_dense_input(machine, monkeypatch):
    x = torch.randn(1, 1, 4, 64).bfloat16()
    cu = torch.tensor([0, 4], dtype=torch.int32)
    flat = x[0].transpose(0, 1)
    with pytest.raises(ValueError, match="it has packed sequences or a cache"):
        flash_attention_varlen(flat, flat, flat, cu, cu, backend="gluon")
    with pytest.raises(ValueError, match="it has packed sequences or a cache"):
        flash_attention_with_kvcache(x, x, x, cache_seqlens=4, backend="gluon")
    assert explain(x, x, x).backend == "aten"
    assert explain(x, x, x, backend="gluon").backend == "gluon"
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"GPU of compute capability 9\.0, got cpu"):
        flash_attention(x, x, x, backend="gluon")


def test_auto_selects_gluon_for_long_sequences_that_fill_the_gpu(machine, monkeypatch):
    monkeypatch.setattr(dispatch, "_count_sms", lambda _: 132)

    def selected(heads, seq_q, seq_k, dim=64, dtype=torch.bfloat16, kv_heads=2, **options):
        q, k, v = draw_tensors(seq_q, seq_k, dim, dtype, heads, kv_heads, batch=5)
        return explain(q, k, v, **options)

    explanation = selected(8, 2048, 2048, is_causal=True)
    assert explanation.backend == "gluon"
    assert forward.choose_tile(64, 2048, AttentionSpec(1.0)) == forward.LONG_TILE
    causal = AttentionSpec(1.0, right=0)
    monkeypatch.setattr(forward, "IS_TRITON_3_6", True)
    assert forward.choose_tile(64, 2048, causal) == forward.LONG_TILE
    monkeypatch.setattr(forward, "IS_TRITON_3_6", False)
    assert forward.choose_tile(64, 2048, causal) == forward.TILES[64]
    assert forward.choose_tile(64, 2048, AttentionSpec(1.0, left=100)) == forward.TILES[64]
    for other in (
        {"seq_k": 2047},
        {"seq_q": 2047},
        {"dim": 80},
        {"dtype": torch.float32},
        {"softcap": 2.0},
        {"kv_heads": 1},
    ):
        case = {"heads": 8, "seq_q": 2048, "seq_k": 2048} | other
        assert selected(**case).backend != "gluon", other
