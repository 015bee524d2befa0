"""Cases drawn from all options together, and their references in float64."""

import random

import torch
from against_float64 import compute_textbook_attention
from flashattn2 import flash_attention, flash_attention_varlen, flash_attention_with_kvcache

DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)


def draw(seed, kernels):
    """Draw a function, tensors and options; Triton `kernels` support fewer options."""
    rng = random.Random(seed)
    pick = rng.choice
    case = {
        "seed": seed,
        "kind": pick(("dense", "dense", "packed", "decode", "served", "flat")),
        "dtype": pick(DTYPES[1:] if kernels else DTYPES),
        "backend": "triton" if kernels else pick(("auto", "torch")),
        "splits": pick((1, 3)),
        "tma": pick((True, False)),
        "layouts": [pick(("heads first", "sequence first", "gaps", "reversed")) for _ in "qkvg"],
        "needs": [rng.random() < 0.8 for _ in "qkv"],
        "lse_gradient": pick((True, False)),
    }
    most = 40 if kernels else pick((9, 60, 300))
    dims = (16, 24, 40) if kernels else (1, 3, 8, 16, 33, 64)
    case["dim"] = pick(dims)
    case["v_dim"] = pick((case["dim"], case["dim"], pick(dims)))
    case["kv_heads"], case["group"] = rng.randint(1, 3), pick((1, 1, 2, 3))
    case["batch"] = rng.randint(1, 3)
    case["lengths"] = [
        (rng.randint(0 if case["kind"] == "packed" else 1, most), rng.randint(1, most))
        for _ in range(case["batch"])
    ]
    if case["kind"] == "packed" and rng.random() < 0.3:
        case["lengths"][0] = (case["lengths"][0][0], 0)
    if case["kind"] in ("dense", "flat") and rng.random() < 0.4:
        case["lengths"][0] = (case["lengths"][0][0],) * 2

    def bound():
        return pick((None, 0, rng.randint(0, most), 2**31))

    options = {
        "is_causal": pick((True, False)),
        "window": pick((None, None, (bound(), bound()), rng.randint(0, most))),
        "softcap": pick((None, None, 0.7, 30.0)),
        "scale": pick((None, None, 0.05, 1.0)),
    }
    case["sinks"] = pick((True, False, False))
    case["page_size"] = pick((None, 1, 7, 16))
    case["new"] = pick((0, 0, 1, 3))
    case["deterministic"] = pick((True, False))
    return case, options


def draw_tensors(case):
    """Return leaves in the case's dtype: q, k, v `(batch, heads, seq, dim)` and sinks or None."""
    torch.manual_seed(case["seed"])
    heads, batch = case["kv_heads"] * case["group"], case["batch"]
    seq_q, seq_k = case["lengths"][0]
    if case["kind"] == "packed":
        batch, seq_q, seq_k = 1, *(sum(x) for x in zip(*case["lengths"], strict=True))
    if case["kind"] == "flat":
        heads = case["kv_heads"] = case["group"] = 1
    shapes = (
        (batch, heads, seq_q, case["dim"]),
        (batch, case["kv_heads"], seq_k, case["dim"]),
        (batch, case["kv_heads"], seq_k, case["v_dim"]),
        (batch, heads, seq_q, case["v_dim"]),
    )
    inputs = [
        lay_out(torch.randn(shape).to(case["dtype"]), layout)
        for shape, layout in zip(shapes, case["layouts"], strict=True)
    ]
    return *inputs, torch.randn(heads) * 2 if case["sinks"] else None


def lay_out(x, layout):
    """Return the same values with other strides."""
    if layout == "sequence first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "gaps":
        return torch.stack((x, x + 1), -1).flatten(-2)[..., ::2]
    if layout == "reversed":
        return x.mT.contiguous().mT
    return x


def differentiate(run, case, options, leaves, dtype):
    """Return the output, log-sum-exp and gradients that the case requests."""
    q, k, v, grad, sinks = (None if x is None else x.detach().to(dtype) for x in leaves)
    wanted = [
        x.requires_grad_()
        for x, needed in zip((q, k, v), case["needs"], strict=True)
        if needed or not any(case["needs"])
    ]
    if sinks is not None:
        sinks = leaves[-1].detach().to(torch.float64 if dtype == torch.float64 else torch.float32)
        wanted.append(sinks.requires_grad_())
    out, lse = run(q, k, v, sinks=sinks, **options)
    loss = (out * grad).double().sum()
    if case["lse_gradient"]:
        seen = lse.isfinite()
        loss = loss + (lse.double() * torch.linspace(-1, 1, lse.numel()).view_as(lse))[seen].sum()
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]
    return [x.detach().double().nan_to_num(neginf=0.0) for x in (out, lse, *zeros)]


def run_ours(case):
    """Call the public function of the case."""
    fixed = {
        "backend": case["backend"], "return_lse": True, "deterministic": case["deterministic"],
    }  # fmt: skip

    def run(q, k, v, **options):
        if case["kind"] == "dense":
            return flash_attention(q, k, v, **fixed, **options)
        if case["kind"] == "flat":
            out, lse = flash_attention(*(x[:, 0] for x in (q, k, v)), **fixed, **options)
            return out[:, None], lse[:, None]
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        cu = (torch.tensor((0, *x)).cumsum(0).int() for x in zip(*case["lengths"], strict=True))
        out, lse = flash_attention_varlen(*rows, *cu, **fixed, **options)
        return out.transpose(0, 1)[None], lse[None]

    return run


def compute_plainly(case):
    """Compute plain attention for each packed sequence separately."""

    def attend_dense(q, k, v, **options):
        spec = {name: options[name] for name in ("scale", "softcap", "is_causal", "window")}
        return compute_textbook_attention(q, k, v, **spec, sinks=options["sinks"])

    def run(q, k, v, **options):
        if case["kind"] != "packed":
            return attend_dense(q, k, v, **options)
        parts = []
        at_q = at_k = 0
        for n_q, n_k in case["lengths"]:
            keys = slice(at_k, at_k + n_k)
            parts.append(
                attend_dense(q[:, :, at_q : at_q + n_q], k[:, :, keys], v[:, :, keys], **options)
            )
            at_q, at_k = at_q + n_q, at_k + n_k
        out, lse = zip(*parts, strict=True)
        return torch.cat(out, 2), torch.cat(lse, 2)

    return run


def check(case, options):
    """Assert that errors are at most four times plain PyTorch's, plus a few roundings."""
    leaves = draw_tensors(case)
    if case["kind"] in ("decode", "served"):
        return check_decode(case, options, leaves)
    exact = differentiate(compute_plainly(case), case, options, leaves, torch.float64)
    plain = differentiate(compute_plainly(case), case, options, leaves, case["dtype"])
    arguments = [
        None if x is None else lay_out(x, layout)
        for x, layout in zip(leaves, (*case["layouts"], ""), strict=True)
    ]
    assert_close(
        case,
        options,
        differentiate(run_ours(case), case, options, arguments, case["dtype"]),
        plain,
        exact,
    )
    return None


def fill_caches(page, k, v, counts):
    """Return both caches with the first `counts[b]` rows of each sequence, and the block table."""
    batch, kv_heads = k.shape[:2]
    room = k.shape[2] + 5
    caches = []
    table = None
    if page:
        pages = -(-room // page)
        numbers = torch.randperm(batch * pages + 2)[: batch * pages]
        table = numbers.view(batch, pages).int()
    for x in (k, v):
        if page is None:
            cache = torch.full((batch, kv_heads, room, x.shape[-1]), torch.nan, dtype=x.dtype)
        else:
            cache = torch.full(
                (batch * pages + 2, kv_heads, page, x.shape[-1]), torch.nan, dtype=x.dtype
            )
        for b, count in enumerate(counts):
            for j in range(count):
                if page is None:
                    cache[b, :, j] = x[b, :, j]
                else:
                    cache[table[b, j // page], :, j % page] = x[b, :, j]
        caches.append(cache)
    return caches, table


def check_decode(case, options, leaves):
    """Check a cache with unused capacity, and appended keys or packed queries.

    In a "served" case, the sequences have different numbers of queries.
    """
    q, k, v, _, sinks = leaves
    counts = [min(n, k.shape[2]) for _, n in case["lengths"]]
    queries = [q.shape[2]] * len(q)
    new = min(case["new"], *counts)
    rows, packing = q, {}
    if case["kind"] == "served":
        new = 0
        queries = [min(n, q.shape[2]) for n, _ in case["lengths"]]
        rows = torch.cat([q[b, :, :n].transpose(0, 1) for b, n in enumerate(queries)])
        packing["cu_seqlens_q"] = torch.tensor((0, *queries)).cumsum(0).int()
    caches, table = fill_caches(case["page_size"], k, v, [count - new for count in counts])
    added = [
        torch.stack([x[b, :, count - new : count] for b, count in enumerate(counts)])
        for x in (k, v)
    ]
    out, lse = flash_attention_with_kvcache(
        rows,
        *caches,
        *(added if new else ()),
        return_lse=True,
        block_table=table,
        cache_seqlens=torch.tensor(counts, dtype=torch.int32) - new,
        sinks=sinks,
        backend=case["backend"],
        **packing,
        **options,
    )
    if packing:
        out, lse = ([*x.split(queries, dim)] for x, dim in ((out, 0), (lse, 1)))
        out = [x.transpose(0, 1) for x in out]
    for b, count in enumerate(counts):
        keys, values = (x[b : b + 1, :, :count] for x in (k, v))
        sequence = q[b : b + 1, :, : queries[b]], keys, values
        results = [
            [
                x.double().nan_to_num(neginf=0.0)
                for x in compute_textbook_attention(
                    *(x.to(dtype) for x in sequence),
                    **options,
                    sinks=None if sinks is None else sinks.to(dtype),
                )
            ]
            for dtype in (case["dtype"], torch.float64)
        ]
        mine = [x[b][None].double().nan_to_num(neginf=0.0) for x in (out, lse)]
        assert_close(case, options, mine, *results)


def assert_close(case, options, mine, plain, exact):
    """Assert that each error is at most four times plain's, plus a few roundings."""
    rounding = torch.finfo(case["dtype"]).eps * (8 if case["dtype"].itemsize == 2 else 16)
    assert len(mine) == len(exact)
    for number, (m, p, e) in enumerate(zip(mine, plain, exact, strict=True)):
        assert m.shape == e.shape, (number, m.shape, e.shape, case, options)
        if e.numel():
            size = e.abs().max().item()
            allowed = 4 * (p - e).abs().max().item() + rounding * (size + 1)
            error = (m - e).abs().max().item()
            assert error <= allowed, (number, error, allowed, case, options)
