"""Data, pipeline and tensor parallelism together: the split of large models.

Ranks form a grid (Narayanan et al. 2021, section 3). Neighbors along its last dimension split each
block by heads and columns, along the second one they have consecutive blocks, and along the first
one they read different rows and average their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, distribute_tensor

from llmsys_suite.model import Block, Decoder, ModelConfig
from llmsys_suite.splits.layers import split_blocks
from llmsys_suite.splits.pipeline import LayerRange, cross_entropy
from llmsys_suite.variants.single import Variant

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run

NAME = "data x pipeline x tensor"


class ThreeDimensional(Variant):
    """A stage of blocks per rank, whose matrices may be split further, trained by AdamW."""

    alone = False

    def __init__(self, run: Run, config: ModelConfig) -> None:
        self.run = run
        self.config = config
        super().__init__(run, config)

    def build(self) -> None:
        """Take this rank's part of the model and create its optimizer."""
        config = self.run.config
        shape = (config.data_parallel, config.pipeline, config.tensor)
        mesh = init_device_mesh(
            self.device.type, shape, mesh_dim_names=("data", "pipeline", "tensor")
        )
        self.replicas = mesh["data"]
        self.stages = mesh["pipeline"]
        self.slices = mesh["tensor"]
        self.data_rank = self.replicas.get_local_rank()
        self.data_world = self.replicas.size()
        self.reports_rows = self.stages.get_local_rank() == self.slices.get_local_rank() == 0
        stage = self.stages.get_local_rank()
        self.part = LayerRange(self.decoder, stage, config.pipeline, self.run.autocast)
        if config.tensor > 1:
            split_blocks(self.part.layers(), self.slices)
        self.model = self.part
        # The layers of the other ranks are freed.
        del self.decoder
        # Torch's fused loops do not mix split parameters with whole ones.
        rate = config.learning_rate
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=rate, foreach=False)
        #: Created in the first step, because it depends on the number of rows, which a checkpoint
        #: may set.
        self.schedule: Any = None

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> float:
        """Run forward and backward of this replica's rows; return their mean loss on each rank."""
        if self.stages.size() == 1:
            return super().forward_backward(tokens, targets)
        losses: list[Tensor] = []
        group = self.stages.get_group()
        stage, count = self.stages.get_local_rank(), self.stages.size()
        with self.phase("backward"):
            if self.schedule is None:
                part = PipelineStage(self.part, stage, count, self.device, group=group)
                self.schedule = Schedule1F1B(part, len(tokens), loss_fn=cross_entropy)
            if stage == 0:
                self.schedule.step(tokens)
            elif stage == count - 1:
                self.schedule.step(target=targets, losses=losses)
            else:
                self.schedule.step()
            total = torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)
            total = total.detach()
            dist.all_reduce(total, group=group)
        return float(total)

    def communicate(self) -> None:
        """Average the gradients over the replicas of this rank's part."""
        if self.replicas.size() == 1:
            return
        with self.phase("communication"):
            for parameter in self.part.parameters():
                assert parameter.grad is not None
                local = _local(parameter.grad)
                dist.all_reduce(local, group=self.replicas.get_group())
                local /= self.replicas.size()

    def clip(self, max_norm: float) -> None:
        """Clip by the norm over all parts of the model."""
        square = torch.zeros((), device=self.device)
        for parameter in self.part.parameters():
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad)
            square += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        dist.all_reduce(square, group=self.stages.get_group())
        # Torch's fused loops do not mix split gradients with whole ones.
        nn.utils.clip_grads_with_norm_(
            self.part.parameters(), max_norm, square.sqrt(), foreach=False
        )

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters, not split, on every rank."""
        return self._gathered({name: p.detach() for name, p in self.part.named_parameters()})

    def blocks(self) -> list[Block]:
        """Return the blocks of this rank."""
        return self.part.layers()

    def evaluated_model(self) -> nn.Module:
        """Return a whole model with the present weights."""
        return self._whole_model()

    def checkpointed(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a whole model and its optimizer, so that any variant can load the checkpoint."""
        model = self._whole_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.run.config.learning_rate)
        optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[0]["lr"]
        parameters = dict(model.named_parameters())
        for key in ("step", "exp_avg", "exp_avg_sq"):
            mine = {
                name: self.optimizer.state[p][key]
                for name, p in self.part.named_parameters()
                if p in self.optimizer.state
            }
            for name, value in self._gathered(mine).items():
                optimizer.state[parameters[name]][key] = value
        return model, optimizer

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take this rank's part of a model and an optimizer that `checkpointed` returned."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, mine in self.part.named_parameters():
                whole = parameters[name]
                mine.copy_(_like(whole.detach(), mine))
                self.optimizer.state[mine] = {
                    key: _like(value, mine) if value.shape == whole.shape else value
                    for key, value in optimizer.state[whole].items()
                }

    def _whole_model(self) -> Decoder:
        model = Decoder(self.config).to(self.device)
        model.load_state_dict(self.weights())
        return model

    def _gathered(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all ranks of this replica, whole and by name."""
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in mine.items()}
        parts: list[Any] = [None] * self.stages.size()
        named = {name: tensor.cpu() for name, tensor in whole.items()}
        dist.all_gather_object(parts, named, group=self.stages.get_group())
        gathered = {name: tensor for part in parts for name, tensor in part.items()}
        # The optimizer's counter of steps stays on the host.
        return {name: x.to(self.device) if x.ndim else x for name, x in gathered.items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(whole: Tensor, split: Tensor) -> Tensor:
    """Return `whole`, distributed over the ranks like `split`."""
    if not isinstance(split, DTensor):
        return whole
    return distribute_tensor(whole, split.device_mesh, split.placements)
