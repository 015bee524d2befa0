"""The same model split other ways, on torch's own tools: by layers, inside layers, by tokens.

Pipelines (GPipe, 1F1B, interleaved) go through torch.distributed.pipelining, Megatron's column and
row split and its sequence parallelism through torch.distributed.tensor, and from four ranks on a
tensor split of two ranks stands inside data parallelism. All give the loss of one process, and
train the same weights.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llmsys_suite.config import UsageError
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.run import Run

ITERATIONS = 10
#: Steps of AdamW that each split trains besides, on the run's first batches.
TRAINED = 3


def run(run: Run) -> dict[str, Any]:
    """Ten iterations of each, timed, with the loss of each beside one process's; a few trained."""
    if run.world < 2:
        return {"skipped": "splitting a model needs at least two ranks"}
    possible = {name: make for name, make in SPLITS.items() if not make.why_not(run, run.model)}
    if not possible:
        return {"skipped": PipelineModel.why_not(run, run.model)}
    tokens, targets = batch(run, 0)
    reference = float(_model(run, run.model).loss(tokens, targets).detach())
    rows = []
    for name, make in possible.items():
        split = make(run, run.model)
        row = _timed(name, split, tokens, targets) | {"single_loss": reference}
        rows.append(row | {"trained_loss": split.train(run)[-1]})
    return {"rows": rows}


def batch(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, on every rank."""
    tokens, targets = run.corpus.batch(
        rows=run.config.rows, context=run.config.context, seed=run.config.seed, step=step
    )
    return tokens.to(run.device), targets.to(run.device)


class Split:
    """A model of which each rank has a part; `part` is this rank's.

    UsageError for a model that does not split so.
    """

    part: nn.Module

    def __init__(self, run: Run, config: ModelConfig) -> None:
        if reason := self.why_not(run, config):
            raise UsageError(reason)
        self.run, self.device = run, run.device

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """What of the model does not split over the run's ranks; empty where all does."""
        raise NotImplementedError

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of the whole batch; its mean loss, on every rank."""
        raise NotImplementedError

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' parts put together, on every rank, under the whole model's names."""
        raise NotImplementedError

    def bubble(self) -> float:
        """The share of a step in which a rank has nothing to do, were nothing sent: none."""
        return 0.0

    def train(self, run: Run, steps: int | None = None) -> list[float]:
        """A few steps of AdamW; the losses before each."""
        # Torch's fused loops do not mix split parameters with whole ones.
        rate = run.config.learning_rate
        optimizer = torch.optim.AdamW(self.part.parameters(), lr=rate, foreach=False)
        losses = []
        for step in range(TRAINED if steps is None else steps):
            losses.append(self.step(*batch(run, step)))
            optimizer.step()
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """Every parameter's, whole; an empty one where there is none."""
        found = {name: p.grad for name, p in self.part.named_parameters()}
        return self.whole({n: torch.zeros(0) if g is None else g for n, g in found.items()})

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole."""
        return self.whole({name: p.detach() for name, p in self.part.named_parameters()})


class PipelineModel(Split):
    """Consecutive blocks on each rank; microbatches flow through them (Huang et al. 2019)."""

    schedule_class: Any = ScheduleGPipe
    #: How many stages a rank has; each rank's are `world` stages apart.
    stages_a_rank = 1

    def __init__(self, run: Run, config: ModelConfig, microbatches: int | None = None) -> None:
        super().__init__(run, config)
        half = max(1, run.config.rows // 2)
        # Of two rows, or where that leaves fewer than there are ranks, of one.
        self.microbatches = microbatches or (half if half >= run.world else run.config.rows)
        if run.config.rows % self.microbatches:
            raise UsageError(
                f"{run.config.rows} rows do not split into {self.microbatches} microbatches"
            )
        self.last = run.rank == run.world - 1
        self.first = run.rank == 0
        count = run.world * self.stages_a_rank
        model, mine = _model(run, config), range(run.rank, count, run.world)
        parts = [LayerRange(model, stage, count) for stage in mine]
        self.stages = [
            PipelineStage(part, stage, count, run.device)
            for part, stage in zip(parts, mine, strict=True)
        ]
        self.part = nn.ModuleList(parts)
        self.schedule = self.schedule_class(
            self.stages if self.stages_a_rank > 1 else self.stages[0],
            self.microbatches,
            loss_fn=_cross_entropy,
        )

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """A stage needs a layer."""
        count = run.world * cls.stages_a_rank
        return f"{config.num_layers} layers do not make {count} stages" * (
            config.num_layers < count
        )

    def bubble(self) -> float:
        """(p - 1) / (m + p - 1) of p stages and m microbatches; a rank's further stages count as m.

        Narayanan et al. 2021, section 2.2.
        """
        waits = self.run.world - 1
        return waits / (self.microbatches * self.stages_a_rank + waits)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward over all microbatches; the mean loss, on every rank."""
        self.part.zero_grad()
        losses: list[Tensor] = []
        if self.first:
            self.schedule.step(tokens, target=targets if self.last else None, losses=losses)
        elif self.last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        mean = (
            torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)
        )
        dist.all_reduce(mean)
        return float(mean)

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every rank's layers."""
        found: dict[str, Tensor] = {}
        # Without the number of the stage among its rank's.
        named = {name.partition(".")[2]: tensor.cpu() for name, tensor in mine.items()}
        for share in self.run.gather(named):
            found |= share
        return {name: tensor.to(self.device) for name, tensor in found.items()}


class OneForwardOneBackward(PipelineModel):
    """As soon as the last stage has a microbatch it goes back: fewer are held (PipeDream)."""

    schedule_class = Schedule1F1B


class Interleaved(PipelineModel):
    """Two shorter stages a rank: half the bubble, twice the sending (Narayanan et al. 2021)."""

    schedule_class = ScheduleInterleaved1F1B
    stages_a_rank = 2


class LayerRange(nn.Module):
    """One pipeline stage: its share of the blocks, and the model's ends where it holds them."""

    rope: Tensor

    def __init__(self, model: Decoder, stage: int, stages: int) -> None:
        super().__init__()
        first, last = (len(model.blocks) * s // stages for s in (stage, stage + 1))
        self.embedding = model.embedding if stage == 0 else None
        # By the numbers that they have in the whole model.
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        self.norm = model.norm if stage == stages - 1 else None
        self.head = model.head if stage == stages - 1 else None
        self.register_buffer("rope", model.rope, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or the residual stream in; the residual stream or logits out."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, self.rope[:, : x.shape[1]])
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


class TensorModel(Split):
    """Heads and feed-forward columns on each rank, an all-reduce after each pair of products.

    Shoeybi et al. 2019, section 3: first product split by columns, second by rows.
    """

    #: How what stands between blocks lies on the ranks: whole on each.
    between: Any = Replicate()

    def __init__(self, run: Run, config: ModelConfig) -> None:
        super().__init__(run, config)
        self.mesh = self.ranks()
        self.model = self.part = _model(run, config)
        for block in self.model.layers():
            parallelize_module(block, self.mesh, self.block_plan())
            # Each rank holds whole heads, fewer of them.
            block.attention.num_heads //= self.mesh.size()

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """A rank has whole heads, and as many columns as any other."""
        for name in ("num_heads", "d_ff"):
            if (value := getattr(config, name)) % run.world:
                return f"{name} {value} does not split over {run.world} ranks"
        return ""

    def ranks(self) -> DeviceMesh:
        """Those that a layer is split over."""
        return init_device_mesh(self.run.device.type, (self.run.world,))

    def block_plan(self) -> dict[str, ParallelStyle]:
        """What of a block is split by columns, what by rows, and what goes in and out."""
        whole, out = Replicate(), self.between
        return {
            # One input for q, k and v (gate and up): their gradients are summed here before they
            # are reduced over the ranks, once for all and not once for each.
            "attention": PrepareModuleInput(
                input_layouts=(out, None), desired_input_layouts=(whole, None)
            ),
            "ffn": PrepareModuleInput(input_layouts=(out,), desired_input_layouts=(whole,)),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=out),
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=out),
        }

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of the whole batch on every rank; the loss."""
        self.model.zero_grad()
        loss = self.model.loss(tokens, targets)
        loss.backward()
        return float(loss.detach())

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gathered; what is not split is this rank's own."""
        found = mine.items()
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found}


class SequenceModel(TensorModel):
    """And between blocks, where norms and sums are, each rank has a part of the tokens.

    Korthikanti et al. 2022, section 4.2: an all-reduce becomes a reduce-scatter and an all-gather.
    """

    between = Shard(1)

    def __init__(self, run: Run, config: ModelConfig) -> None:
        super().__init__(run, config)
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(self.model, self.mesh, ends)

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """Tokens and bytes split too."""
        for name in ("context", "vocabulary"):
            if (value := getattr(config, name)) % run.world:
                return f"{name} {value} does not split over {run.world} ranks"
        return super().why_not(run, config)

    def block_plan(self) -> dict[str, ParallelStyle]:
        """With the norms."""
        norms = {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
        return super().block_plan() | norms


class DataTensorModel(TensorModel):
    """Two dimensions: layers split over pairs of ranks, rows over the pairs."""

    def ranks(self) -> DeviceMesh:
        """The pair; the ranks that hold what this one holds are kept too."""
        mesh = init_device_mesh(
            self.run.device.type, (self.run.world // 2, 2), mesh_dim_names=("data", "tensor")
        )
        self.replicas = mesh["data"]
        return mesh["tensor"]

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """Pairs of ranks, at least two, with rows for each."""
        if run.world < 4 or run.world % 2:
            return f"{run.world} ranks make no two pairs"
        if run.config.rows % (run.world // 2):
            return f"{run.config.rows} rows do not split over {run.world // 2} pairs"
        return super().why_not(run, config)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of this pair's rows, then the mean over the pairs."""
        pairs, mine = self.replicas.size(), self.replicas.get_local_rank()
        loss = super().step(tokens.chunk(pairs)[mine], targets.chunk(pairs)[mine])
        means = [torch.tensor(loss, device=self.device)]
        for parameter in self.part.parameters():
            assert parameter.grad is not None
            grad = parameter.grad
            means.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        for tensor in means:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.replicas.get_group())
            tensor /= pairs
        return float(means[0])


SPLITS: dict[str, type[Split]] = {
    "pipeline (GPipe)": PipelineModel,
    "pipeline (1F1B)": OneForwardOneBackward,
    "pipeline (interleaved)": Interleaved,
    "tensor (Megatron)": TensorModel,
    "tensor and sequence": SequenceModel,
    "data x tensor": DataTensorModel,
}


def _model(run: Run, config: ModelConfig) -> Decoder:
    torch.manual_seed(run.config.seed)
    return Decoder(config).to(run.device)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _timed(name: str, model: Split, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    loss = model.step(tokens, targets)
    seconds = []
    clocked_ns, worked = time.time_ns(), time.process_time()
    for _ in range(ITERATIONS):
        dist.barrier()
        begin = time.perf_counter()
        loss = model.step(tokens, targets)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - begin, device=tokens.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    clocked = (time.time_ns() - clocked_ns) / 1e9
    working = torch.tensor((time.process_time() - worked) / clocked, device=tokens.device)
    dist.all_reduce(working)
    return {
        "split": name,
        "iterations": ITERATIONS,
        "total_s": sum(seconds),
        "iteration_ms": statistics.median(seconds) * 1e3,
        "bubble": model.bubble(),
        "waiting": 1 - float(working) / dist.get_world_size(),
        "loss": loss,
        "clocked_s": clocked,
    }
