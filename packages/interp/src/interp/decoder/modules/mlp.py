"""MLPs and mixtures of experts of all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.decoder.modules.settings import Settings
from interp.decoder.modules.weights import Weights


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x), an approximation of GELU."""
    return x * (1.702 * x).sigmoid()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
}


class DecoderMLP(nn.Module):
    """The MLP down(act(up x)), or the gated MLP down(act(gate x) * up x).

    With `mlp_clip` (gpt-oss), `gate x` is clamped to at most `mlp_clip`, and `up x` to the range
    from -`mlp_clip` to `mlp_clip`. Then 1 is added to `up x`. MLPs without a gate are not clamped.
    """

    def __init__(self, weights: Weights, name: str, settings: Settings) -> None:
        super().__init__()
        if settings.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation {settings.activation!r} is not one of {known}")
        self.act = ACTIVATIONS[settings.activation]
        self.clip = settings.mlp_clip
        self.gate = weights.build_linear(f"{name}.gate") if f"{name}.gate" in weights else None
        self.up = weights.build_linear(f"{name}.up")
        self.down = weights.build_linear(f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (..., d_model) for `x` (..., d_model)."""
        up = self.up(x)
        if self.gate is None:
            inner = self.act(up)
        elif self.clip is None:
            inner = self.act(self.gate(x)) * up
        else:
            inner = self.act(self.gate(x).clamp(max=self.clip)) * (
                up.clamp(-self.clip, self.clip) + 1
            )
        out: Tensor = self.down(inner)
        return out


class Experts(nn.Module):
    """A mixture of experts: a router chooses MLPs per token. A shared MLP may be added."""

    def __init__(self, weights: Weights, name: str, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.router = weights.build_linear(f"{name}.router")
        #: A term that is added to the probabilities to choose experts, but not to weight them.
        self.correction = None
        if f"{name}.correction.bias" in weights.tensors:
            self.correction = weights.build_parameter(f"{name}.correction.bias")
        self.experts = nn.ModuleList(
            DecoderMLP(weights, f"{name}.experts.{i}", settings)
            for i in range(self.router.out_features)
        )
        self.shared = None
        if f"{name}.shared.up" in weights:
            self.shared = DecoderMLP(weights, f"{name}.shared", settings)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of the chosen experts, plus the shared MLP."""
        weights, chosen = self._choose(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            is_chosen = chosen == i  # [batch, seq, used]
            uses_expert = is_chosen.any(-1)
            if bool(uses_expert.any()):
                weight = (weights * is_chosen).sum(-1)[uses_expert].to(x.dtype)
                out[uses_expert] += weight[:, None] * expert(x[uses_expert])
        if self.shared is not None:
            out = out + self.shared(x)
        return out

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts, (batch, seq, used)."""
        options = self.settings
        if options.router_in_float32 and x.dtype != torch.float32:
            logits = F.linear(x.float(), self.router.weight.float())
        else:
            logits = self.router(x)
        is_sigmoid = options.router == "sigmoid"
        probabilities = logits.sigmoid() if is_sigmoid else logits.softmax(-1, dtype=torch.float32)
        ranked = probabilities if self.correction is None else probabilities + self.correction
        if options.expert_groups > 1:
            groups = ranked.unflatten(-1, (options.expert_groups, -1))
            # DeepSeek V3 ranks a group by its two best experts, and V2 by the best expert.
            group_scores = groups.topk(2 if is_sigmoid else 1, dim=-1).values.sum(-1)
            used = group_scores.topk(options.expert_groups_used, dim=-1).indices
            is_hidden = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, used, False)
            ranked = groups.masked_fill(is_hidden[..., None], float("-inf")).flatten(-2)
        chosen = ranked.topk(options.experts_used, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if options.experts_sum_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * options.experts_scale, chosen


class NoMLP(nn.Module):
    """A placeholder for the MLP of an attention-only model. Its output is zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros of the shape of `x`."""
        return torch.zeros_like(x)
