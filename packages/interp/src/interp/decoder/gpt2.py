"""GPT-2 as a `Decoder`: of any size with random weights, or from a checkpoint on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from interp.decoder.decoder import Decoder, Settings
from interp.decoder.describe import load_decoder


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


class GPT2(Decoder):
    """GPT-2 with random weights, to be trained; the unembedding is tied."""

    def __init__(self, config: GPT2Config) -> None:
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is no multiple of n_head {config.n_head}")
        d, inner, layers = config.n_embd, config.n_inner or 4 * config.n_embd, config.n_layer
        shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (config.vocab_size, d),
            "position.weight": (config.n_positions, d),
        }
        linears = {f"attention.{part}": (d, d) for part in "qkvo"}
        linears |= {"mlp.up": (inner, d), "mlp.down": (d, inner)}
        for block in (f"blocks.{i}." for i in range(layers)):
            for name, shape in linears.items():
                shapes |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[:1]}
            shapes |= {
                f"{block}norm{n}.{kind}": (d,) for n in (1, 2) for kind in ("weight", "bias")
            }
        shapes |= {"norm.weight": (d,), "norm.bias": (d,)}
        settings = Settings(
            heads=config.n_head,
            d_head=d // config.n_head,
            eps=config.layer_norm_epsilon,
            centred=True,
            activation="gelu_new",
            scale=(d // config.n_head) ** -0.5,
            frequencies=((),) * layers,
            windows=(None,) * layers,
        )
        super().__init__({k: torch.empty(shape) for k, shape in shapes.items()}, settings)
        self.config = config
        for name, parameter in self.train().requires_grad_(True).named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)


def load_gpt2(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """`load_decoder` for a folder that holds GPT-2 and nothing else."""
    return load_decoder(path, dtype=dtype, device=device, families=("gpt2",))
