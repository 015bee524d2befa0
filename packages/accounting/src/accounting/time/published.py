"""Published training runs, what the model of a step says of each, and how far predictions are off.

A prediction is the step's seconds times one factor, the geometric mean of measured over modeled
seconds, and its interval comes from the same ratios: each run is predicted from all others, and the
errors of those predictions are what an interval is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from accounting import checks
from accounting.breakdown import Breakdown
from accounting.model.records import MLA, Experts
from accounting.model.shape import Shape
from accounting.plan import Plan
from accounting.time.step import OVERLAP, step_time


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run: what was trained how, and how long a step took."""

    model: Shape
    plan: Plan
    hardware: str
    batch: int
    seq: int
    seconds: float
    source: str
    precision: str = "megatron_bf16"
    flash: bool = False
    overlap: Mapping[str, float] = field(default_factory=lambda: OVERLAP)
    """What of the traffic hides, where the publication says more than the usual."""
    assumed: str = ""
    """What the publication leaves out, and what stands here for it."""


def _gpt(name: str, layers: int, d_model: int, heads: int) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        d_model=d_model,
        heads=heads,
        vocab_size=51200,
        positions=2048,
        tied=True,
        gated_mlp=False,
        activation="gelu",
        norm="layernorm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _narayanan(
    name: str, layers: int, d_model: int, heads: int, tensor: int, pipeline: int, data: int,
    batch: int, teraflops: float, chunks: int = 1,
) -> Published:  # fmt: skip
    # Their FLOPs a batch, recomputation counted: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    work = 96.0 * batch * 2048 * layers * d_model**2
    work *= 1 + 2048 / (6 * d_model) + 51200 / (16 * layers * d_model)
    devices = tensor * pipeline * data
    return Published(
        model=_gpt(name, layers, d_model, heads),
        plan=Plan(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            microbatches=batch // data,
            recompute="full",
            schedule="interleaved" if chunks > 1 else "1f1b",
            virtual_stages=chunks,
        ),
        hardware="A100",
        batch=batch,
        seq=2048,
        seconds=work / (teraflops * 1e12 * devices),
        source="Narayanan et al. 2021, Megatron-LM, table 1",
        assumed="micro-batches of one sequence"
        + (f", {chunks} chunks a stage" if chunks > 1 else ""),
    )


def _korthikanti(
    name: str, layers: int, d_model: int, heads: int, pipeline: int, batch: int,
    microbatch: int, chunks: int, seconds: float,
) -> Published:  # fmt: skip
    return Published(
        model=_gpt(name, layers, d_model, heads),
        plan=Plan(
            tensor=8,
            pipeline=pipeline,
            data=1,
            microbatches=batch // microbatch,
            recompute="selective",
            sequence_parallel=True,
            schedule="interleaved" if chunks > 1 else "1f1b",
            virtual_stages=chunks,
        ),
        hardware="A100",
        batch=batch,
        seq=2048,
        seconds=seconds,
        source="Korthikanti et al. 2022, tables 3 and 5",
    )


_LLAMA3 = Shape(
    name="Llama 3 405B", layers=126, d_model=16384, heads=128, kv_heads=8, d_ff=53248,
    vocab_size=128256,
)  # fmt: skip


def _llama3(data: int, batch: int, teraflops: float) -> Published:
    # 6 N a token and causal attention, forward and backward.
    work = batch * 8192 * (6 * 405_853_388_800 + 6 * 126 * 128 * 128 * 8192)
    return Published(
        model=_LLAMA3,
        plan=Plan(
            tensor=8,
            pipeline=16,
            data=data,
            zero=1,
            microbatches=batch // data,
            sequence_parallel=True,
            schedule="interleaved",
            virtual_stages=7,
        ),
        hardware="H100",
        batch=batch,
        seq=8192,
        seconds=work / (teraflops * 1e12 * data * 128),
        source="Grattafiori et al. 2024, The Llama 3 herd of models, table 4",
        flash=True,
        assumed="7 chunks a stage, micro-batches of one sequence, gradients reduced once a step",
    )


RUNS: tuple[Published, ...] = (
    _narayanan("GPT 1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    _narayanan("GPT 3.6B", 30, 3072, 32, 2, 1, 32, 512, 138),
    _narayanan("GPT 7.5B", 36, 4096, 32, 4, 1, 32, 512, 142),
    _narayanan("GPT 39.1B", 48, 8192, 64, 8, 2, 32, 1536, 138, 2),
    _narayanan("GPT 76.1B", 60, 10240, 80, 8, 4, 32, 1792, 140, 2),
    _narayanan("GPT 310.1B", 96, 16384, 128, 8, 16, 15, 2160, 155, 2),
    _narayanan("GPT 529.6B", 105, 20480, 128, 8, 35, 9, 2520, 163, 3),
    _korthikanti("GPT 22B", 48, 6144, 64, 1, 4, 4, 1, 1.10),
    _korthikanti("GPT 175B", 96, 12288, 96, 8, 64, 1, 3, 13.75),
    _korthikanti("GPT 1T", 128, 25600, 160, 64, 512, 1, 1, 71.49),
    _llama3(64, 2048, 430),
    _llama3(128, 2048, 400),
    Published(
        model=Shape(
            name="PaLM 540B",
            layers=118,
            d_model=18432,
            heads=48,
            kv_heads=1,
            head_dim=256,
            vocab_size=256_000,
            tied=True,
            norms_per_layer=1,
            parallel_block=True,
        ),
        plan=Plan(tensor=12, data=512, zero=3, recompute="full", sequence_parallel=True),
        hardware="TPU v4",
        batch=2048,
        seq=2048,
        seconds=2048 * 2048 / 238_300,
        overlap={**OVERLAP, "tensor": 0.5},
        source="Chowdhery et al. 2022, PaLM, section 4 and table 3",
        precision="amp_bf16",
    ),
    Published(
        model=Shape(
            name="Llama 2 70B",
            layers=80,
            d_model=8192,
            heads=64,
            kv_heads=8,
            d_ff=28672,
            vocab_size=32000,
        ),
        plan=Plan(tensor=8, data=256, zero=1, microbatches=4, sequence_parallel=True),
        hardware="A100",
        batch=1024,
        seq=4096,
        seconds=0.93 * 1_720_320 * 3600 / 2048 / (2e12 / (1024 * 4096)),
        source="Touvron et al. 2023, Llama 2, table 2",
        flash=True,
        assumed="the whole layout, on 2,048 devices; 7 % of the hours lost to restarts",
    ),
    Published(
        model=Shape(
            name="DeepSeek-V3",
            layers=61,
            d_model=7168,
            heads=128,
            head_dim=128,
            v_head_dim=128,
            d_ff=18432,
            vocab_size=129280,
            mla=MLA(q_rank=1536, kv_rank=512, rope_head_dim=64),
            experts=Experts(
                count=256, per_token=8, width=2048, shared=2048, layers=tuple(range(3, 61))
            ),
        ),
        plan=Plan(pipeline=16, data=128, expert=64, zero=1, microbatches=120),
        hardware="H800",
        batch=15360,
        seq=4096,
        seconds=2_664_000 * 3600 / 2048 / (14.8e12 / (15360 * 4096)),
        source="DeepSeek-AI 2024, DeepSeek-V3 technical report, sections 3 and 4",
        precision="deepseek_v3",
        flash=True,
        # DualPipe runs the experts' exchange behind the other direction's arithmetic.
        overlap={**OVERLAP, "expert": 1.0},
        assumed="micro-batches of one sequence; DualPipe as 1F1B with hidden all-to-alls",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A prediction with the range in which 80 % of the published runs came out."""

    low: float
    middle: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The same of something proportional."""
        return Interval(low=self.low * factor, middle=self.middle * factor, high=self.high * factor)

    def __str__(self) -> str:
        return f"{self.middle:.4g} ({self.low:.4g} to {self.high:.4g})"


@lru_cache
def ratios() -> tuple[float, ...]:
    """Measured over modeled seconds, run by run."""
    return tuple(run.seconds / float(modeled(run).total) for run in RUNS)


def modeled(run: Published) -> Breakdown:
    """What the model of a step says of a run, before any learning."""
    return step_time(
        run.model,
        run.plan,
        batch=run.batch,
        seq=run.seq,
        hardware=run.hardware,
        precision=run.precision,
        overlap=run.overlap,
        flash=run.flash,
    )


def learned(seen: tuple[float, ...]) -> Interval:
    """The factor that the ratios of some runs give, and its interval.

    Each of them is predicted from the others; the interval is as wide as the error that 80 % of
    these predictions, and the next, stay below (a conformal quantile: ceil(.8 (n + 1)) of n).
    """
    logs = [math.log(ratio) for ratio in seen]
    errors = sorted(abs(log - (sum(logs) - log) / (len(logs) - 1)) for log in logs)
    width = errors[min(len(errors), math.ceil(0.8 * (len(errors) + 1))) - 1]
    middle = sum(logs) / len(logs)
    return Interval(
        low=math.exp(middle - width), middle=math.exp(middle), high=math.exp(middle + width)
    )


def predicted(seconds: float) -> Interval:
    """Modeled seconds as a prediction: times the factor learned from all published runs."""
    return learned(ratios()).scaled(checks.number("seconds", seconds))


def left_out() -> list[tuple[Published, Interval]]:
    """Each run with what all others predict of it."""
    found = ratios()
    return [
        (run, learned(found[:i] + found[i + 1 :]).scaled(run.seconds / found[i]))
        for i, run in enumerate(RUNS)
    ]
