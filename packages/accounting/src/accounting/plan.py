"""The distribution of a model over devices: degrees of parallelism and the layers per stage."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from accounting import checks
from accounting.breakdown import format_count
from accounting.model.records import Matrix
from accounting.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The degrees of parallelism and the options of a training layout.

    There are `data * tensor * pipeline * context` devices. Experts are spread over `expert` of the
    `data * context` ranks that store the same dense weights, so they need no additional devices.
    Raises `ValueError` for an inconsistent plan.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    #: ZeRO stage: the `data * context` replicas shard the optimizer from stage 1 on, gradients from
    #: 2 on, and weights at 3 (FSDP). Stage 0 is DDP with `gradient_as_bucket_view=True`. In a
    #: pipeline, stage 3 means FSDP2 under torch's schedules, which store a stage's weights and
    #: gradients unsharded during a step. Stage 2 in a pipeline assumes a trainer that reduces
    #: gradients after each micro-batch. torch's schedules do not, so a search does not propose it.
    zero: int = 0
    #: Micro-batches per step and data rank, for the pipeline or for gradient accumulation.
    microbatches: int = 1
    #: `gpipe`, `1f1b`, or `interleaved` with `virtual_stages` chunks per device.
    schedule: str = "1f1b"
    virtual_stages: int = 1
    #: True if norms and dropout between tensor-parallel matrices are split along the sequence.
    sequence_parallel: bool = False
    #: `none`, `selective` (the core of attention) or `full` (each block from its input).
    recompute: str = "none"
    #: True if FSDP frees gathered weights after the forward and gathers them again in the backward.
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        checks.convert_fields(self, **CHOICES)
        if self.replicas % self.expert:
            raise ValueError(
                f"expected expert to divide data x context = {self.replicas}, got "
                f"expert={self.expert}; experts are spread over these ranks"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        interleaved = self.schedule == "interleaved"
        if interleaved and self.pipeline == 1:
            raise ValueError("expected pipeline > 1 if interleaved, got 1; pass schedule='1f1b'")
        if (self.virtual_stages > 1) != interleaved:
            raise ValueError(
                "expected virtual_stages > 1 with schedule='interleaved' and 1 otherwise, got "
                f"virtual_stages={self.virtual_stages} with schedule={self.schedule!r}"
            )
        if interleaved and self.microbatches % self.pipeline:
            raise ValueError(
                f"expected a multiple of pipeline={self.pipeline} for microbatches of interleaved "
                f"stages, got microbatches={self.microbatches}"
            )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """The number of ranks that store the same dense weights (data times context)."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """The number of ranks that store the same experts."""
        return self.replicas // self.expert

    def has_unsharded_weights(self) -> bool:
        """Return True for FSDP2 in a pipeline, whose stages keep weights unsharded during a step.

        See Note [FSDP2 under torch's pipeline schedules] in memory/fsdp_pipeline.py. Raises
        `ValueError` if the memory of the schedule is not modeled.
        """
        if self.zero < 3 or self.pipeline == 1 or self.replicas == 1:
            return False
        if self.schedule == "interleaved":
            raise ValueError(
                "expected zero < 3 with schedule='interleaved', got zero=3; the number of chunks "
                "that torch keeps unsharded is not modeled; pass zero=1 or schedule='1f1b'"
            )
        return True

    @checks.validate(batch=0, seq=0)
    def check(self, model: Transformer, *, batch: int = 0, seq: int = 0) -> None:
        """Raise `ValueError` if this plan is not valid for the model, the batch or the sequence."""
        self._check_stages(model)
        self._check_shards(model)
        model.check_positions(seq)
        ranks = self.data * self.microbatches
        if batch and batch % ranks:
            raise ValueError(f"expected data x microbatches = {ranks} to divide batch, got {batch}")
        if batch and not seq:
            raise ValueError("expected seq >= 1, got 0")
        if seq and seq % self.context:
            raise ValueError(f"expected context={self.context} to divide seq, got seq={seq}")
        if self.context > 1 and model.mixers:
            raise ValueError(
                f"expected context=1 for {model.name}, got {self.context}; the exchange of the "
                f"states of its recurrent layers ({model.mixers[0].name}) is not modeled"
            )

    def _check_stages(self, model: Transformer) -> None:
        chunks = self.pipeline * self.virtual_stages
        if chunks > model.layers:
            raise ValueError(
                f"expected pipeline x virtual_stages <= {format_count(model.layers, 'layer')}, got "
                f"{chunks}"
            )
        if self.pipeline > 1 and model.shared_kv_layers:
            raise ValueError(
                f"expected pipeline=1 for a model whose layers share keys and values, got "
                f"pipeline={self.pipeline}; the copy of a cache on another stage is not modeled"
            )
        if self.pipeline > 1 and model.embedding_dim != model.d_model:
            raise ValueError(
                f"expected pipeline=1 for a model that projects its embedding "
                f"(embedding_dim={model.embedding_dim}, d_model={model.d_model}), "
                f"got pipeline={self.pipeline}"
            )

    def _check_shards(self, model: Transformer) -> None:
        for name, size in list_tensor_parallel_sizes(model).items():
            if size % self.tensor:
                raise ValueError(f"expected tensor to divide {name}={size}, got {self.tensor}")
        check_key_heads(model, self.tensor)
        num_experts = model.experts.count if model.experts else 0
        if self.expert > 1 and (not num_experts or num_experts % self.expert):
            raise ValueError(
                f"expected expert to divide the {format_count(num_experts, 'expert')} of the "
                f"model, got {self.expert}"
            )

    def list_stage_layers(self, model: Transformer, stage: int) -> tuple[int, ...]:
        """Return the layers of a stage, whose chunks are as equal as possible.

        If the division is uneven, the first chunks have one more layer. The exception is a division
        that is even if embedding and head count as one layer each. In this case, the first and the
        last chunk have one layer fewer than the other chunks. Raises `ValueError` for a stage
        outside the pipeline.
        """
        if not 0 <= checks.require_integer("stage", stage, minimum=-math.inf) < self.pipeline:
            raise ValueError(f"expected 0 <= stage < {self.pipeline}, got {stage}")
        chunks = self.pipeline * self.virtual_stages
        layers_per_chunk, remainder = divmod(model.layers, chunks)
        ends = remainder and remainder == chunks - 2
        indices: list[int] = []
        for chunk in range(stage, chunks, self.pipeline):
            # Llama 3 (section 3.3.2): 126 layers in 16 stages, 7 in the first and the last.
            start = chunk * layers_per_chunk + (
                max(0, chunk - 1) if ends else min(chunk, remainder)
            )
            longer = 0 < chunk < chunks - 1 if ends else chunk < remainder
            indices += range(start, start + layers_per_chunk + longer)
        return tuple(indices)

    def build_stage_model(self, model: Transformer, stage: int) -> Transformer:
        """Return the layers of a stage as a model, with embedding and head if the stage has them.

        A tied embedding is on the first stage and, as the head, also on the last stage.
        """
        indices = self.list_stage_layers(model, stage)
        return build_part(model, indices, stage == 0, stage == self.pipeline - 1)

    @property
    def layout(self) -> str:
        """The plan as one line of text."""
        chunks = (
            f" in {format_count(self.virtual_stages, 'chunk')}" if self.virtual_stages > 1 else ""
        )
        return (
            f"data {self.data}, tensor {self.tensor}, pipeline {self.pipeline} ({self.schedule}"
            f"{chunks}), context {self.context}, expert {self.expert}, ZeRO {self.zero}, "
            f"{format_count(self.microbatches, 'micro-batch')}, recompute {self.recompute}"
        )


def count_in_flight(plan: Any, stage: int) -> int:
    """Return the largest number of micro-batches whose activations a stage stores at once.

    With interleaved stages, each chunk of a micro-batch counts as one. `plan` is a `Plan`, or a
    layout of a search, which has the same fields.
    """
    if plan.pipeline == 1:
        return 1
    if plan.schedule == "gpipe":
        return int(plan.microbatches)
    if plan.schedule == "1f1b":
        return int(min(plan.microbatches, plan.pipeline - stage))
    # Megatron's interleaved schedule runs 2(p - s - 1) + (v - 1)p forwards of chunks before it
    # alternates forwards and backwards.
    warm_up = 2 * (plan.pipeline - stage - 1) + (plan.virtual_stages - 1) * plan.pipeline
    return int(min(plan.microbatches * plan.virtual_stages, warm_up + 1))


@lru_cache(maxsize=1024)
def build_part(
    model: Transformer, indices: tuple[int, ...], has_embedding: bool, has_head: bool
) -> Transformer:
    """Return a model of the layers `indices`, with the embedding and the head as stated."""
    local_index = {layer: index for index, layer in enumerate(indices)}

    def select_local_layers(layers: Iterable[int] | None) -> tuple[int, ...]:
        return tuple(local_index[i] for i in sorted(layers or ()) if i in local_index)

    def is_on_stage(matrix: Matrix) -> bool:
        if matrix.layers is not None:
            return bool(select_local_layers(matrix.layers))
        return has_embedding if matrix.where == "first" else has_head

    experts, window = model.experts, model.window
    if experts:
        layers = select_local_layers(experts.layers)
        experts = replace(experts, layers=layers) if layers else None
    if window:
        layers = select_local_layers(model.windowed_layers)
        window = replace(window, layers=layers) if layers else None
    return replace(
        model,
        layers=len(indices),
        experts=experts,
        window=window,
        attention_layers=select_local_layers(model.attention_layers),
        shared_kv_layers=select_local_layers(model.shared_kv_layers),
        mlp_layers=select_local_layers(model.mlp_layers),
        mixers=tuple(
            replace(mixer, layers=select_local_layers(mixer.layers))
            for mixer in model.mixers
            if select_local_layers(mixer.layers)
        ),
        extra=tuple(
            replace(m, layers=None if m.layers is None else select_local_layers(m.layers))
            for m in model.extra
            if is_on_stage(m)
        ),
        lm_head=model.lm_head and has_head,
        vocab_size=model.vocab_size if has_embedding or (has_head and model.lm_head) else 0,
        # A stage with either embedding or head has one table, which `tied` counts once. A stage
        # with both needs the model's value.
        tied=model.tied if has_embedding and has_head else True,
        positions=model.positions if has_embedding else 0,
        head_bias=model.head_bias and has_head,
        final_norm=model.final_norm and has_head,
    )


#: Allowed values of the fields `zero`, `schedule` and `recompute` of a `Plan`.
CHOICES: dict[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": ("gpipe", "1f1b", "interleaved"),
    "recompute": ("none", "selective", "full"),
}


def can_split_evenly(layers: int, chunks: int) -> bool:
    """Return True if all chunks can have the same number of layers.

    The embedding and the head may count as one layer each, as in `Plan.list_stage_layers`.
    """
    return layers >= chunks and layers % chunks in (0, chunks - 2)


def validate_plan(plan: Plan | None, model: Transformer, *, batch: int, seq: int) -> Plan:
    """Return a valid plan unchanged, or the plan of a single device for None.

    Raises `ValueError` if the plan is not valid for the model, the batch or the sequence, or if the
    training step of the model is not modeled.
    """
    plan = Plan() if plan is None else plan
    checks.require_instance("plan", plan, Plan, "a Plan or None")
    model.check_step()
    plan.check(model, batch=batch, seq=seq)
    return plan


def list_tensor_parallel_sizes(model: Transformer) -> dict[str, int]:
    """Return the sizes that the tensor-parallel degree must divide, keyed by their names."""
    sizes = {"heads": model.heads}
    if model.low_rank:
        sizes["low_rank.out_groups"] = model.low_rank.out_groups
    if model.mlp_layers:
        sizes["d_ff"] = model.d_ff
    if model.experts:
        sizes |= {"experts.width": model.experts.width, "experts.shared": model.experts.shared}
    for mixer in model.mixers:
        for matrix in mixer.matrices:
            if matrix.split != "none":
                size = matrix.rows if matrix.split == "rows" else matrix.columns
                sizes[f"the {matrix.split} of {matrix.name!r} in {mixer.name}"] = size
    return sizes


def check_key_heads(model: Transformer, tensor: int) -> None:
    """Raise `ValueError` unless `tensor` divides the number of key/value heads or vice versa."""
    for group in model.attention_groups if not model.mla else ():
        if group.kv_heads % tensor and tensor % group.kv_heads:
            raise ValueError(
                f"expected tensor to divide kv_heads={group.kv_heads} or to be a multiple of it, "
                f"got tensor={tensor}"
            )


def split(num_items: int, ranks: int) -> int:
    """Return the size of the largest part if `num_items` items are split over `ranks` ranks."""
    return -(-num_items // ranks)
