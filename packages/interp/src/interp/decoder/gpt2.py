"""GPT-2 with every circuit within reach, loaded from a Hugging Face checkpoint on disk.

Notable: the fused c_attn (stored as input x output) is split into separate q, k, v of
`nn.Linear`, so that `qk()` and `ov()` read circuits off the weights; nothing is downloaded;
tensors come out of the file one at a time and become the parameters, so that the model exists
once, not twice; a missing or left-over tensor is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from interp.circuits.low_rank import LowRank
from interp.decoder.attention_only import Attention, stacked
from interp.lens import head_outputs
from interp.tap import record


@dataclass(frozen=True)
class GPT2Config:
    """Sizes under Hugging Face's names; the defaults are GPT-2 small."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5


class MLP(nn.Module):
    """Two linear layers around a GELU in its tanh form."""

    def __init__(self, d_model: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, inner)
        self.down = nn.Linear(inner, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, d_model) to the same."""
        out: Tensor = self.down(nn.functional.gelu(self.up(x), approximate="tanh"))
        return out


class GPT2Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        d, eps = config.n_embd, config.layer_norm_epsilon
        self.norm1 = nn.LayerNorm(d, eps)
        self.attention = Attention(d, config.n_head, d // config.n_head, bias=True)
        self.norm2 = nn.LayerNorm(d, eps)
        self.mlp = MLP(d, config.n_inner or 4 * d)

    def forward(self, x: Tensor) -> Tensor:
        """Map the stream (batch, seq, d_model) to the stream."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT2(nn.Module):
    """GPT-2, tokens (batch, seq) to logits (batch, seq, vocabulary); the unembedding is tied."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is no multiple of n_head {config.n_head}")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.unembed = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.unembed.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens; at most `n_positions` of them."""
        if tokens.shape[-1] > self.config.n_positions:
            raise ValueError(
                f"{tokens.shape[-1]} tokens do not fit {self.config.n_positions} positions"
            )
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.unembed(self.norm(x))
        return logits

    @property
    def layers(self) -> list[GPT2Block]:
        """The blocks under their own type."""
        return cast(list[GPT2Block], list(self.blocks))

    def qk(self) -> LowRank:
        """W_QK of every head without biases, batch (layers, heads)."""
        return stacked([block.attention.qk() for block in self.layers])

    def ov(self) -> LowRank:
        """W_OV of every head without biases, batch (layers, heads)."""
        return stacked([block.attention.ov() for block in self.layers])

    @torch.no_grad()
    def components(self, tokens: Tensor) -> dict[str, Tensor]:
        """Everything that is added to the stream, by name; the sum is what `norm` reads."""
        sites = ("embed", "position", "blocks.*.attention.o:input", "blocks.*.mlp")
        with record(self, *sites) as seen:
            self(tokens)
        parts = {"embed": seen["embed"], "position": seen["position"].unsqueeze(0)}
        for i, block in enumerate(self.layers):
            o = block.attention.o
            mixed = seen[f"blocks.{i}.attention.o:input"]
            parts |= head_outputs(mixed, o.weight, heads=self.config.n_head, prefix=f"head {i}.")
            parts |= {
                f"attention bias {i}": o.bias.expand(1, 1, -1),
                f"mlp {i}": seen[f"blocks.{i}.mlp"],
            }
        return parts


def load_gpt2(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> GPT2:
    """Load GPT-2 from a folder that Hugging Face saved: `config.json` and `model.safetensors`.

    Raises FileNotFoundError for a missing file, ValueError for another architecture or for tensors
    that are missing, left over or of the wrong shape.
    """
    folder = Path(path)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name} does not exist; save the model there with save_pretrained()"
            )
    settings = json.loads((folder / "config.json").read_text())
    _require_plain_gpt2(settings)
    known = {k: settings[k] for k in GPT2Config.__dataclass_fields__ if k in settings}
    with torch.device("meta"):
        model = GPT2(GPT2Config(**known))
    state: dict[str, Tensor] = {}
    with safe_open(folder / "model.safetensors", framework="pt", device=str(device)) as file:
        for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
            for ours, tensor in _renamed(key.removeprefix("transformer."), file.get_tensor(key)):
                state[ours] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    state["unembed.weight"] = state.get("embed.weight", torch.empty(0))
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{folder / 'model.safetensors'} does not fit its config.json: {error}"
        ) from error
    model.unembed.weight = model.embed.weight
    return model.requires_grad_(False).eval()


_NAMES = {
    "wte.": "embed.",
    "wpe.": "position.",
    "ln_f.": "norm.",
    "h.": "blocks.",
    ".ln_1.": ".norm1.",
    ".ln_2.": ".norm2.",
    ".attn.c_proj.": ".attention.o.",
    ".mlp.c_fc.": ".mlp.up.",
    ".mlp.c_proj.": ".mlp.down.",
}


def _renamed(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors for one of theirs, whose Conv1D weights are input x output."""
    # The tied unembedding, and the causal masks that old checkpoints carry.
    if key == "lm_head.weight" or key.endswith((".attn.bias", ".attn.masked_bias")):
        return
    if "c_" in key and key.endswith(".weight"):
        tensor = tensor.T
    if ".attn.c_attn." in key:
        block, _, kind = key.removeprefix("h.").partition(".attn.c_attn.")
        for name, part in zip("qkv", tensor.chunk(3), strict=True):
            yield f"blocks.{block}.attention.{name}.{kind}", part
        return
    for theirs, ours in _NAMES.items():
        if theirs.startswith(".") or key.startswith(theirs):
            key = key.replace(theirs, ours, 1)
    yield key, tensor


def _require_plain_gpt2(settings: dict[str, object]) -> None:
    expected = {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "add_cross_attention": False,
    }
    for key, value in expected.items():
        if settings.get(key, value) != value:
            raise ValueError(
                f"config.json has {key} = {settings[key]!r}; this loader reads {value!r} only"
            )
