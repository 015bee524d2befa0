"""How a model is laid over devices: the degrees of each parallelism, and which layers a stage
holds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from accounting import checks
from accounting.model.records import Matrix
from accounting.model.shape import Shape


@checks.named
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The degrees of parallelism and what goes with them; raises `ValueError` for plans that cannot
    be.

    The devices are `data * tensor * pipeline * context`. Experts are spread over `expert` of the
    `data * context` ranks that hold the same dense weights, so they need no devices of their own.
    """

    devices: int = 0
    """Checked against the degrees where both are given; alone, it sets `data`."""
    data: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    """What the data ranks shard: 1 the optimizer, 2 gradients too, 3 weights too (FSDP).

    In a pipeline, 3 is FSDP2 under torch's schedules, which keep a stage's weights and gradients
    whole during a step. There, 2 means a trainer that reduces gradients after each micro-batch;
    torch's schedules do not, and a search proposes no such plan.
    """
    microbatches: int = 1
    """Pieces that a data rank cuts its batch into, for the pipeline or to accumulate gradients."""
    schedule: str = "1f1b"
    """`gpipe`, `1f1b`, or `interleaved` with `virtual_stages` chunks a device."""
    virtual_stages: int = 1
    sequence_parallel: bool = False
    """Norms and dropout between the tensor-parallel matrices are split along the sequence."""
    recompute: str = "none"
    """`none`, `selective` (the attention's core) or `full` (every block from its input)."""
    reshard_after_forward: bool = True
    """FSDP frees gathered weights after the forward and gathers them again for the backward."""
    offload: str = "none"
    """What is kept on the host: `none`, `optimizer` (with master weights), `activations` (inputs of
    blocks, with full recomputation)."""

    def __post_init__(self) -> None:
        check_fields(vars(self))
        model_parallel = self.tensor * self.pipeline * self.context
        if not self.data:
            if self.devices % model_parallel:
                raise ValueError(
                    f"devices is {self.devices}, which tensor x pipeline x context = "
                    f"{model_parallel} does not divide"
                )
            object.__setattr__(self, "data", max(1, self.devices // model_parallel))
        product = self.data * model_parallel
        if self.devices not in (0, product):
            raise ValueError(
                f"devices is {self.devices}, but data x tensor x pipeline x context = "
                f"{self.data} x {self.tensor} x {self.pipeline} x {self.context} = {product}"
            )
        object.__setattr__(self, "devices", product)
        if self.replicas % self.expert:
            raise ValueError(
                f"expert is {self.expert}, which does not divide the data x context = "
                f"{self.replicas} ranks that experts are spread over"
            )
        if self.offload == "activations" and self.recompute != "full":
            raise ValueError(
                f"offload is 'activations' with recompute {self.recompute!r}; what is "
                "offloaded are the inputs of blocks, which recompute='full' keeps"
            )
        if self.schedule == "interleaved" and self.pipeline == 1:
            raise ValueError("schedule is 'interleaved' with pipeline=1; give several stages")
        if (self.virtual_stages > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"virtual_stages is {self.virtual_stages} with schedule {self.schedule!r}; "
                "more than one goes with 'interleaved', and only with it"
            )
        if self.schedule == "interleaved" and self.microbatches % self.pipeline:
            raise ValueError(
                f"microbatches is {self.microbatches}; interleaved stages need a multiple of "
                f"pipeline={self.pipeline}"
            )

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights: those of data and of context parallelism."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.replicas // self.expert

    def keeps_weights_whole(self) -> bool:
        """Return True for FSDP2 modules in a pipeline; `ValueError` if their memory is not modeled.

        See Note [FSDP2 under torch's pipeline schedules] in memory/training.py.
        """
        if self.zero < 3 or self.pipeline == 1 or self.replicas == 1:
            return False
        if self.schedule == "interleaved":
            raise ValueError(
                "zero is 3 with schedule 'interleaved': how many chunks torch keeps unsharded is "
                "not modeled; give zero=1, or schedule='1f1b'"
            )
        return True

    @checks.entry(batch=0, seq=0)
    def check(self, model: Shape, *, batch: int = 0, seq: int = 0) -> None:
        """Raise `ValueError` where this plan does not fit the model, the batch or the sequence."""
        if self.pipeline * self.virtual_stages > model.layers:
            raise ValueError(
                f"pipeline x virtual_stages is {self.pipeline * self.virtual_stages}, deeper than "
                f"the model's {model.layers} layers"
            )
        if self.pipeline > 1 and model.encoder:
            raise ValueError("pipeline must be 1 for a model with an encoder beside its decoder")
        if self.pipeline > 1 and model.embedding_dim != model.d_model:
            raise ValueError(
                f"embedding_dim is {model.embedding_dim} and d_model {model.d_model}; a model that "
                "projects its embedding cannot be cut into stages here, so pipeline must be 1"
            )
        for name, size in (("heads", model.heads), ("d_ff", model.d_ff)):
            if size % self.tensor:
                raise ValueError(f"tensor is {self.tensor}, which does not divide {name}={size}")
        if model.heads and model.kv_heads % self.tensor and self.tensor % model.kv_heads:
            raise ValueError(
                f"tensor is {self.tensor}, which neither divides kv_heads={model.kv_heads} "
                "nor is a multiple of it"
            )
        count = model.experts.count if model.experts else 0
        if self.expert > 1 and (not count or count % self.expert):
            raise ValueError(f"expert is {self.expert}; the model has {count} experts")
        pieces = self.data * self.microbatches
        if batch and batch % pieces:
            raise ValueError(
                f"batch is {batch} sequences, which data x microbatches = {pieces} does not divide"
            )
        if batch and not seq:
            raise ValueError("seq is 0; it must be at least 1")
        if seq and seq % self.context:
            raise ValueError(f"seq is {seq}, which context={self.context} does not divide")

    def stage_layers(self, model: Shape, stage: int) -> tuple[int, ...]:
        """The layers that a stage holds: as even as can be, the first stages one more. Where
        embedding and head make it even as a layer each, both ends have one less."""
        if not 0 <= checks.whole("stage", stage, least=-math.inf) < self.pipeline:
            raise ValueError(f"stage is {stage}; it must lie between 0 and {self.pipeline - 1}")
        chunks = self.pipeline * self.virtual_stages
        each, more = divmod(model.layers, chunks)
        ends = more and more == chunks - 2
        held: list[int] = []
        for chunk in range(stage, chunks, self.pipeline):
            # Llama 3 (section 3.3.2): 126 layers in 16 stages, 7 in the first and the last.
            start = chunk * each + (max(0, chunk - 1) if ends else min(chunk, more))
            longer = 0 < chunk < chunks - 1 if ends else chunk < more
            held += range(start, start + each + longer)
        return tuple(held)

    def stage_model(self, model: Shape, stage: int) -> Shape:
        """The part of the model on a stage, as a model: its layers, and the ends where they are.

        A tied embedding is on the first stage and again on the last, where it is the head.
        """
        held = self.stage_layers(model, stage)
        first, last = stage == 0, stage == self.pipeline - 1
        here = {layer: index for index, layer in enumerate(held)}

        def kept(layers: Iterable[int] | None) -> tuple[int, ...]:
            return tuple(here[i] for i in sorted(layers or ()) if i in here)

        def stays(matrix: Matrix) -> bool:
            if matrix.layers is not None:
                return bool(kept(matrix.layers))
            return first if matrix.where == "first" else last

        experts, window = model.experts, model.window
        if experts:
            layers = kept(experts.layers)
            experts = replace(experts, layers=layers) if layers else None
        if window:
            layers = kept(model.windowed_layers)
            window = replace(window, layers=layers) if layers else None
        return replace(
            model,
            layers=len(held),
            experts=experts,
            window=window,
            attention_layers=kept(model.attention_layers),
            mlp_layers=kept(model.mlp_layers),
            mixers=tuple(
                replace(mixer, layers=kept(mixer.layers))
                for mixer in model.mixers
                if kept(mixer.layers)
            ),
            extra=tuple(
                replace(m, layers=None if m.layers is None else kept(m.layers))
                for m in model.extra
                if stays(m)
            ),
            lm_head=model.lm_head and last,
            vocab_size=model.vocab_size if first or (last and model.lm_head) else 0,
            # A stage at one end has one table, which `tied` counts once; with both ends it stays as
            # it is.
            tied=model.tied if first and last else True,
            positions=model.positions if first else 0,
            head_bias=model.head_bias and last,
            final_norm=model.final_norm and last,
        )

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once (of one chunk of its layers)."""
        if self.schedule == "gpipe" or self.pipeline == 1:
            return self.microbatches if self.pipeline > 1 else 1
        if self.schedule == "1f1b":
            return min(self.microbatches, self.pipeline - stage)
        # Megatron's interleaving warms up with 2(p - s - 1) + (v - 1)p chunks, and runs one more.
        warm_up = 2 * (self.pipeline - stage - 1) + (self.virtual_stages - 1) * self.pipeline
        return min(self.microbatches * self.virtual_stages, warm_up + 1)


_CHOICES: dict[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": ("gpipe", "1f1b", "interleaved"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "activations"),
}


def check_fields(given: Mapping[str, object]) -> None:
    """Each field by itself: whole numbers, switches and names."""
    checks.fields(Plan, given, **_CHOICES)


def even(layers: int, chunks: int) -> bool:
    """Every chunk has as many layers, embedding and head counted as one each if need be."""
    return layers >= chunks and layers % chunks in (0, chunks - 2)


def fitted(plan: Plan | None, model: Shape, *, batch: int, seq: int) -> Plan:
    """The plan, or that of a single device, if it fits what it is for."""
    plan = Plan() if plan is None else plan
    checks.instance("plan", plan, Plan, "a Plan or None")
    plan.check(model, batch=batch, seq=seq)
    return plan


def split(count: int, ranks: int) -> int:
    """The largest share of `count` things over `ranks`."""
    return -(-count // ranks)
