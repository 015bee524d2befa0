"""The mask for transformers can be copied, sliced and moved, and only our attention reads it."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers", reason="the mask is for its models")

from flashattn2.integrations import transformers as ours
from flashattn2.integrations.masks import AttentionMask, Rule


def draw(batch=2, seq_q=5, seq_k=7, **rule):
    """Return a causal mask with a window of 4 keys, whose first query is at key 2."""
    sequence = torch.ones(batch, seq_k, dtype=torch.int32)
    return AttentionMask(
        sequence,
        Rule(
            **{
                "seq_q": seq_q,
                "first": seq_k - seq_q,
                "left": 3,
                "right": 0,
                "is_dense": True,
                "owner": "the model of SomeConfig",
                **rule,
            }
        ),
    )


def attend(mask, q, k, v):
    out, _ = ours.attention(torch.nn.Identity(), q, k, v, mask)
    return out


def make_dense(mask):
    """Return the mask as a boolean tensor."""
    rule = mask.rule
    q, k = torch.arange(mask.shape[2])[:, None] + rule.first, torch.arange(mask.shape[3])[None]
    return ((q - k <= 3) & (k <= q) & (mask.sequence > 0)[:, None]).unsqueeze(1)


USES = {
    "add to scores": lambda mask, scores: scores + mask,
    "add in place": lambda mask, scores: scores.add_(mask),
    "multiply": lambda mask, scores: mask * scores,
    "compare": lambda mask, scores: mask == 0,
    "masked_fill": lambda mask, scores: scores.masked_fill(mask, -1.0),
    "where": lambda mask, scores: torch.where(mask, scores, -1.0),
    "sdpa": lambda mask, scores: torch.nn.functional.scaled_dot_product_attention(
        scores, scores, scores, attn_mask=mask
    ),
    "if": lambda mask, scores: bool(mask[:1, :, :1, :1]),
    "numpy": lambda mask, scores: mask.numpy(),
    "cat": lambda mask, scores: torch.cat([mask, mask]),
    "transpose": lambda mask, scores: mask.transpose(2, 3),
    "split": lambda mask, scores: mask.split(1),
    "step": lambda mask, scores: mask[:, :, ::2],
    "expand queries": lambda mask, scores: mask[:, :, :1].expand(-1, -1, 5, -1),
    "assign to numbers": lambda mask, scores: scores.__setitem__(slice(None), mask),
    "without subclasses": lambda mask, scores: _without_subclasses(mask, scores),
    "scripted": lambda mask, scores: torch.jit.script(_add)(scores, mask),
    "vmap": lambda mask, scores: torch.func.vmap(torch.add)(scores, mask),
}


def _add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _without_subclasses(mask, scores):
    with torch._C.DisableTorchFunctionSubclass():
        return scores + mask


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_other_use_of_the_mask_raises(use):
    mask, scores = draw(), torch.randn(2, 1, 5, 7)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        use(mask, scores)
    if isinstance(caught.value, ValueError):
        assert "the model of SomeConfig reads the attention mask itself" in str(caught.value)
    else:
        # Torch refuses these uses: they need a storage, or a shape that is not the mask's.
        assert use in (USES["numpy"], USES["scripted"], USES["vmap"])


COPIES = {
    "detach": lambda mask: mask.detach(),
    "clone": lambda mask: mask.clone(),
    "contiguous": lambda mask: mask.contiguous(),
    "to dtype and back": lambda mask: mask.to(torch.float16).bool(),
    "cpu": lambda mask: mask.cpu(),
    "more than all": lambda mask: mask[:, :, :5, :99],
    "reshape": lambda mask: mask.reshape(2, 1, 5, 7),
    "one head of four": lambda mask: mask.expand(2, 4, 5, 7)[:, 1:2],
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "deepcopy": lambda mask: copy.deepcopy(mask),
    "flatten": lambda mask: AttentionMask.__tensor_unflatten__(
        {"sequence": mask.sequence}, mask.__tensor_flatten__()[1], mask.shape, mask.stride()
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_of_the_mask_are_masks(make, padded):
    mask = draw()
    if padded:
        mask.sequence[0, :3] = 0
        mask = AttentionMask(mask.sequence, Rule(5, 2, 3, 0, False))
    q, (k, v) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 4, 7, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=make_dense(mask))
    # Query 0 of the first sequence is padding itself, and its output is not defined.
    rows = slice(1, None) if padded else slice(None)
    copied = make(mask)
    assert isinstance(copied, AttentionMask)
    torch.testing.assert_close(attend(copied, q, k, v)[:, rows], expected.transpose(1, 2)[:, rows])


@pytest.mark.parametrize("padded", [False, True])
def test_slices_of_the_mask_hide_the_same_keys(padded):
    mask = draw(batch=3, seq_q=7)
    if padded:
        mask.sequence[0, :2] = mask.sequence[2, -2:] = 0
        mask = AttentionMask(mask.sequence, Rule(7, 0, 3, 0, False))
    whole = make_dense(mask)
    q, (k, v) = torch.randn(3, 4, 7, 8), torch.randn(2, 3, 4, 7, 8)
    refused = 0
    cuts = [slice(a, b) for a, b in ((None, None), (0, 2), (1, 3), (2, 6), (-3, None), (3, 3))]
    for batches in cuts[:3]:
        for queries in cuts:
            for keys in cuts[:5]:
                part = mask[batches][:, :, queries, keys]
                seen = whole[batches][:, :, queries, keys]
                tensors = q[batches][:, :, queries], k[batches][:, :, keys], v[batches][:, :, keys]
                try:
                    out = attend(part, *tensors)
                except ValueError as error:
                    assert "do not end at the last" in str(error)  # noqa: PT017
                    refused += 1
                    continue
                right = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=seen)
                # A row that sees nothing, or is padding, has no defined output.
                is_defined = seen.any(-1)[:, 0]
                if padded:
                    is_defined = is_defined & (mask.sequence[batches][:, queries] > 0)
                torch.testing.assert_close(out[is_defined], right.transpose(1, 2)[is_defined])
    assert refused < 60


def test_masks_of_wrong_shapes_are_refused():
    mask = draw()
    q = torch.randn(2, 4, 5, 8)
    k, v = torch.randn(2, 2, 4, 7, 8)
    for wrong in ((q[:, :, :4], k, v), (q, k[:, :, :6], v[:, :, :6]), (q[:1], k[:1], v[:1])):
        with pytest.raises(ValueError, match="expected a mask of shape"):
            attend(mask, *wrong)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_compiled_functions_may_pass_the_mask_but_not_read_it(backend):
    torch._dynamo.reset()
    mask = draw()
    q = torch.randn(2, 4, 5, 8)
    k, v = torch.randn(2, 2, 4, 7, 8)

    def layers(q, k, v, mask):
        for _ in range(2):
            q = attend(mask[:, :, :, : k.shape[2]], q + 1, k * 2, v).transpose(1, 2)
        return q

    expected = layers(q, k, v, mask)
    compiled = torch.compile(layers, backend=backend)
    torch.testing.assert_close(compiled(q, k, v, mask), expected)
    shifted = draw(left=1)
    torch.testing.assert_close(compiled(q, k, v, shifted), layers(q, k, v, shifted))
    with pytest.raises(Exception, match="reads the attention mask itself"):
        torch.compile(lambda scores, mask: scores + mask, backend=backend)(
            torch.randn(2, 1, 5, 7), mask
        )
