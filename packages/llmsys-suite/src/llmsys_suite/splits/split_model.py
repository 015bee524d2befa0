"""A model whose blocks and matrices are split over ranks, trained as a variant."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from llmsys_suite.config import Layout, UsageError
from llmsys_suite.model import Block, ModelConfig, cross_entropy
from llmsys_suite.splits.pipeline import SCHEDULES, LayerRange
from llmsys_suite.variants.initial_weights import build_model_with
from llmsys_suite.variants.single import Variant

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run


class SplitModel(Variant):
    """A rank's part of a model that is split by a `Layout`, trained with AdamW by default.

    Raises `UsageError` if the layout does not fit the model, or the number of rows.
    """

    alone = False

    def __init__(
        self,
        run: Run,
        config: ModelConfig,
        layout: Layout,
        optimizer: partial[Any] | None = None,
    ) -> None:
        if reason := layout.explain_refusal(config, run.config.rows):
            raise UsageError(reason)
        self.run = run
        self.config = config
        self.layout = layout
        # AdamW's foreach implementation does not mix DTensors with plain tensors.
        rate = run.config.learning_rate
        super().__init__(
            run, config, optimizer or partial(torch.optim.AdamW, lr=rate, foreach=False)
        )

    def build(self) -> None:
        """Select and split this rank's part of the model, and create its optimizer."""
        layout = self.layout
        mesh = init_device_mesh(
            self.device.type,
            (layout.data, layout.pipeline, layout.tensor),
            mesh_dim_names=("data", "pipeline", "tensor"),
        )
        self.replicas = mesh["data"]
        self.pipeline = mesh["pipeline"]
        self.slices = mesh["tensor"]
        self.data_rank = self.replicas.get_local_rank()
        self.data_world = self.replicas.size()
        stage = self.pipeline.get_local_rank()
        self.reports_rows = stage == self.slices.get_local_rank() == 0
        self.layers = LayerRange(self.decoder, stage, layout.pipeline, self.run.autocast)
        if layout.tensor > 1:
            _split_blocks(self.list_blocks(), self.slices)
        self.model = self.layers
        # Free the layers of the other ranks.
        del self.decoder
        self.optimizer = self.make_optimizer(self.model.parameters())
        #: Created in the first step, because it depends on the number of rows, which a checkpoint
        #: may set.
        self.schedule: Any = None

    def draw_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets that this rank's replica trains on in a step of the run."""
        tokens, targets = (rows.chunk(self.data_world) for rows in self.run.draw_batch(step))
        return tokens[self.data_rank], targets[self.data_rank]

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> float:
        """Run forward and backward on this replica's rows; return their mean loss on every rank."""
        if self.pipeline.size() == 1:
            return super().forward_backward(tokens, targets)
        losses: list[Tensor] = []
        group = self.pipeline.get_group()
        rank, ranks = self.pipeline.get_local_rank(), self.pipeline.size()
        with self.phase("backward"):
            if self.schedule is None:
                stage = PipelineStage(self.layers, rank, ranks, self.device, group=group)
                self.schedule = SCHEDULES[self.layout.schedule](
                    stage, self.layout.count_microbatches(len(tokens)), loss_fn=cross_entropy
                )
            if rank == 0:
                self.schedule.step(tokens)
            elif rank == ranks - 1:
                self.schedule.step(target=targets, losses=losses)
            else:
                self.schedule.step()
            total = torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)
            total = total.detach()
            dist.all_reduce(total, group=group)
        return float(total)

    def communicate(self) -> None:
        """Average the gradients of this rank's part of the model over the replicas."""
        if self.data_world == 1:
            return
        with self.phase("communication"):
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                grad = parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                dist.all_reduce(local, group=self.replicas.get_group())
                local /= self.data_world

    def clip(self, max_norm: float) -> None:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`."""
        square = torch.zeros((), device=self.device)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            square += _unsplit_tensor(torch.linalg.vector_norm(parameter.grad)).square()
        dist.all_reduce(square, group=self.pipeline.get_group())
        # The foreach implementation does not mix DTensors with plain tensors.
        nn.utils.clip_grads_with_norm_(
            self.model.parameters(), max_norm, square.sqrt(), foreach=False
        )

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters under their names in the unsplit model."""
        return dict(self.layers.named_parameters())

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the full, unsplit parameters by name, on every rank."""
        parameters = self.named_parameters()
        return self._gather_unsplit({name: p.detach() for name, p in parameters.items()})

    def list_blocks(self) -> list[Block]:
        """Return the blocks of this rank."""
        return self.layers.list_blocks()

    def get_evaluated_model(self) -> nn.Module:
        """Return a new, unsplit model with the current weights, on every rank."""
        return build_model_with(self.run, self.config, self.gather_weights())

    def get_checkpoint_objects(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return unsplit copies of model and optimizer, whose checkpoint any variant can load."""
        model = build_model_with(self.run, self.config, self.gather_weights())
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.run.config.learning_rate)
        optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[0]["lr"]
        parameters = dict(model.named_parameters())
        for key in ("step", "exp_avg", "exp_avg_sq"):
            local_state = {
                name: self.optimizer.state[p][key]
                for name, p in self.named_parameters().items()
                if p in self.optimizer.state
            }
            for name, value in self._gather_unsplit(local_state).items():
                optimizer.state[parameters[name]][key] = value
        return model, optimizer

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy this rank's part from the results of `get_checkpoint_objects`."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.named_parameters().items():
                unsplit = parameters[name]
                parameter.copy_(_split_like(parameter, unsplit.detach()))
                self.optimizer.state[parameter] = {
                    key: _split_like(parameter, value) if value.shape == unsplit.shape else value
                    for key, value in optimizer.state[unsplit].items()
                }

    def _gather_unsplit(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the unsplit tensors of all pipeline stages of this replica, by name."""
        parts: list[Any] = [None] * self.pipeline.size()
        unsplit = {name: _unsplit_tensor(tensor).cpu() for name, tensor in tensors.items()}
        dist.all_gather_object(parts, unsplit, group=self.pipeline.get_group())
        gathered = {name: tensor for part in parts for name, tensor in part.items()}
        # The optimizer's step counters, which are scalars, stay on the host.
        return {name: x.to(self.device) if x.ndim else x for name, x in gathered.items()}


def _split_blocks(blocks: list[Block], mesh: DeviceMesh) -> None:
    """Split the matrices and the heads of each block over the ranks of a mesh.

    This is Megatron's split (Shoeybi et al. 2019, section 3): the first product is split by
    columns, the second by rows, and an all-reduce follows each pair of products.
    """
    whole = Replicate()
    for block in blocks:
        plan: dict[str, ParallelStyle] = {
            # q, k and v share one replicated input, and so do gate and up. The gradients of this
            # input are therefore summed on each rank before a single reduction over the ranks.
            "attention": PrepareModuleInput(
                input_layouts=(whole, None), desired_input_layouts=(whole, None)
            ),
            "ffn": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        # Each rank computes only its part of the heads.
        block.attention.num_heads //= mesh.size()


def _unsplit_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _split_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return an unsplit tensor, distributed over the ranks like `parameter`."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
