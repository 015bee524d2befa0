"""Quick estimates of memory and time, which decide which plans are computed in full.

An estimate is arithmetic on a few numbers per plan, so tens of thousands of plans are sorted in
less than a second. `search/plans.py` computes the memory and the step time of the most promising
plans in full, and reports only those.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from accounting.flops import flops
from accounting.hardware import Hardware
from accounting.memory.activations import activations
from accounting.memory.states import device_parameters
from accounting.model.transformer import Transformer
from accounting.plan import Plan, even, tensor_parallel_sizes
from accounting.precision import bytes_of
from accounting.workload import Workload

#: Compute time relative to a step without recomputation.
RECOMPUTE_FACTOR = {"none": 1.0, "selective": 1.03, "full": 4 / 3}
#: Fraction of the peak that the estimate assumes for all arithmetic.
ASSUMED_UTILIZATION = 0.7
#: Estimates may be a tenth too high, so plans that exceed the memory by at most that are kept.
MEMORY_TOLERANCE = 1.1


class Candidate(NamedTuple):
    """Degrees and schedule of a plan that is not yet built and checked; fields as in `Plan`."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    microbatches: int
    virtual_stages: int
    schedule: str
    zero: int

    @property
    def replicas(self) -> int:
        """Number of ranks that store the same dense weights."""
        return self.data * self.context

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose activations a stage stores at once."""
        if self.schedule == "gpipe":
            return self.microbatches
        return min(self.microbatches, self.pipeline)

    @property
    def keeps_weights_whole(self) -> bool:
        """True for FSDP2 in a pipeline, which stores unsharded weights and gradients in a step."""
        return self.zero == 3 and self.pipeline > 1

    @property
    def shards_gradients(self) -> bool:
        """True if gradients are reduced and sharded after each micro-batch."""
        return self.zero >= 2 and not self.keeps_weights_whole

    @property
    def gathers(self) -> int:
        """Number of collectives per step over the weights or gradients of a stage."""
        if self.zero == 3:
            return self.microbatches + 2 if self.pipeline > 1 else 3 * self.microbatches
        return self.microbatches if self.zero == 2 else 1


class Estimate(NamedTuple):
    """The estimated time and memory of one candidate with one kind of recomputation."""

    seconds: float
    #: Bytes on one device.
    memory_bytes: float
    candidate: Candidate
    recompute: str


class TensorShard(NamedTuple):
    """Sizes that depend on the tensor-parallel degree only."""

    #: Parameters per device outside the experts, before the pipeline divides them.
    dense: int
    #: Parameters of the experts per device, before pipeline and expert parallelism divide them.
    routed: int
    #: Mean bytes of saved activations per token and layer, by kind of recomputation.
    activation_bytes: dict[str, float]

    def sharded(self, candidate: Candidate) -> float:
        """Return the parameters per device of a stage that ZeRO shards over all replicas."""
        return (self.dense + self.routed) / candidate.pipeline / candidate.replicas


class Estimator:
    """Estimates of all plans for one model and batch on a number of devices.

    `memory_bytes` is the usable memory of a device, and `fixed` contains fields of `Plan` that the
    search does not vary.
    """

    def __init__(
        self,
        model: Transformer,
        device: Hardware,
        devices: int,
        work: Workload,
        memory_bytes: float,
        fixed: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.device = device
        self.devices = devices
        self.work = work
        self.memory_bytes = memory_bytes
        self.fixed = fixed
        kind = work.kind
        operations = float(flops(model, seq=work.seq, batch=work.batch).total) / devices
        self.compute_seconds = operations / (ASSUMED_UTILIZATION * device.peak(kind.compute))
        self.weight_bytes = float(bytes_of(kind.weights))
        self.gradient_bytes = float(bytes_of(kind.gradients))
        self.cast_bytes = float(bytes_of(kind.cast_weights)) if kind.cast_weights else 0.0
        states = float(kind.bytes_per_parameter)
        self.optimizer_bytes = states - self.weight_bytes - self.gradient_bytes

    def estimates(self) -> Iterator[Estimate]:
        """Yield an estimate of each plan that may fit in memory."""
        for estimate in self._all_estimates():
            if estimate.memory_bytes <= MEMORY_TOLERANCE * self.memory_bytes:
                yield estimate

    def by_memory(self) -> list[Estimate]:
        """Return the estimates of all plans, also of those that do not fit, the smallest first."""
        return sorted(self._all_estimates(), key=lambda estimate: estimate.memory_bytes)

    def _all_estimates(self) -> Iterator[Estimate]:
        for tensor in self._tensor_degrees():
            shard = self._tensor_shard(tensor)
            for candidate in self._candidates(tensor):
                # Parameters of a stage per device before ZeRO shards them.
                whole = (shard.dense + shard.routed / candidate.expert) / candidate.pipeline
                gradient_bytes = self._gradient_bytes(candidate, shard, whole)
                state_bytes = gradient_bytes + self._other_state_bytes(candidate, shard, whole)
                # The first backward of a pipeline stage creates the gradients and frees the
                # activations of a micro-batch, which only another forward replaces.
                fraction_beside_gradients = 1.0
                if candidate.pipeline > 1 and candidate.microbatches <= candidate.in_flight:
                    fraction_beside_gradients -= 1 / candidate.in_flight
                exposed = self._exposed_seconds(candidate, whole)
                idle = (candidate.pipeline - 1) / (
                    candidate.microbatches * candidate.virtual_stages
                )
                stored_tokens = self._tokens(candidate) * candidate.in_flight
                layers = self.model.layers / candidate.pipeline
                for recompute, token_bytes in shard.activation_bytes.items():
                    saved = token_bytes * stored_tokens * layers
                    # FSDP2 in a pipeline stores all weights at the end of the last backward, when
                    # no activations are left.
                    gathered = (self.cast_bytes or self.weight_bytes) * whole
                    at_end = gathered if candidate.keeps_weights_whole else 0.0
                    needed = max(
                        state_bytes - gradient_bytes + saved,
                        state_bytes + max(saved * fraction_beside_gradients, at_end),
                    )
                    busy = self.compute_seconds * RECOMPUTE_FACTOR[recompute] + exposed
                    yield Estimate(busy * (1 + idle), needed, candidate, recompute)

    def fields_of_plan(self, estimate: Estimate) -> dict[str, Any]:
        """Return the arguments of `Plan` for an estimate."""
        return estimate.candidate._asdict() | {
            "recompute": estimate.recompute,
            "sequence_parallel": self._sequence_parallel(estimate.candidate.tensor),
            "reshard_after_forward": self.fixed.get("reshard_after_forward", True),
        }

    def _choices(self, name: str, default: Iterable[Any]) -> list[Any]:
        if name in self.fixed:
            return [self.fixed[name]]
        return list(default)

    def _sequence_parallel(self, tensor: int) -> bool:
        return bool(self.fixed.get("sequence_parallel", tensor > 1))

    def _tensor_degrees(self) -> Iterator[int]:
        """Yield tensor-parallel degrees that divide the model and fit in a node."""
        largest = min(self.device.devices_per_node, self.devices)
        for tensor in self._choices("tensor", powers_of_two(largest)):
            sizes = tensor_parallel_sizes(self.model).values()
            divides = all(size % tensor == 0 for size in sizes)
            if divides or "tensor" in self.fixed:
                yield tensor

    def _tensor_shard(self, tensor: int) -> TensorShard:
        dense, routed = device_parameters(self.model, Plan(tensor=tensor))
        sequence = replace(self.work, batch=1)
        numbers = self.work.seq * self.model.layers
        sequence_parallel = self._sequence_parallel(tensor)
        saved = {}
        for recompute in self._choices("recompute", RECOMPUTE_FACTOR):
            plan = Plan(tensor=tensor, sequence_parallel=sequence_parallel, recompute=recompute)
            saved[recompute] = float(activations(self.model, plan, sequence).total) / numbers
        return TensorShard(dense, routed, saved)

    def _candidates(self, tensor: int) -> Iterator[Candidate]:
        """Yield candidates with this degree whose degrees divide the devices and the batch."""
        model, devices = self.model, self.devices
        most_context = min(devices, max(1, self.work.seq // 1024))
        for pipeline in self._choices("pipeline", powers_of_two(min(model.layers, devices))):
            for context in self._choices("context", powers_of_two(most_context)):
                data, remainder = divmod(devices, tensor * pipeline * context)
                if remainder or not data or self.work.batch % data:
                    continue
                # As in `Plan`, data=0 means that the other degrees determine it.
                if (self.fixed.get("data") or data) == data:
                    yield from self._schedules(tensor, pipeline, context, data)

    def _schedules(
        self, tensor: int, pipeline: int, context: int, data: int
    ) -> Iterator[Candidate]:
        """Vary the expert degree, micro-batches, chunks and ZeRO stage for the given degrees."""
        batch, replicas = self.work.batch // data, data * context
        experts = powers_of_two(replicas) if self.model.experts else [1]
        stages = [0, 1, 2, 3] if replicas > 1 else [0]
        chunks = self._choices("virtual_stages", self._virtual_stages(pipeline))
        for expert in self._choices("expert", experts):
            for microbatches in self._choices("microbatches", microbatch_counts(batch)):
                if batch % microbatches:
                    continue
                for virtual in chunks:
                    if virtual > 1 and microbatches % pipeline:
                        continue
                    usual = "interleaved" if virtual > 1 else "1f1b"
                    schedule = self.fixed.get("schedule", usual)
                    for zero in self._choices("zero", stages):
                        # torch's schedules accumulate unsharded gradients, so ZeRO-2 would have no
                        # effect.
                        if zero == 2 and pipeline > 1 and "zero" not in self.fixed:
                            continue
                        yield Candidate(
                            tensor=tensor,
                            pipeline=pipeline,
                            context=context,
                            data=data,
                            expert=expert,
                            microbatches=microbatches,
                            virtual_stages=virtual,
                            schedule=schedule,
                            zero=zero,
                        )

    def _virtual_stages(self, pipeline: int) -> list[int]:
        """Return the numbers of chunks per stage; Megatron interleaves only equal chunks."""
        layers = self.model.layers
        interleaved = [v for v in (2, 4, 8) if pipeline > 1 and even(layers, pipeline * v)]
        return [1, *interleaved]

    def _tokens(self, candidate: Candidate) -> float:
        """Return the tokens of a micro-batch on one device."""
        sequences = self.work.batch / candidate.data / candidate.microbatches
        return sequences * self.work.seq / candidate.context

    def _gradient_bytes(self, candidate: Candidate, shard: TensorShard, whole: float) -> float:
        return self.gradient_bytes * (
            shard.sharded(candidate) if candidate.shards_gradients else whole
        )

    def _other_state_bytes(self, candidate: Candidate, shard: TensorShard, whole: float) -> float:
        """Return the bytes of weights with their cast copies, and of optimizer state."""
        sharded = shard.sharded(candidate)
        weights = sharded if candidate.zero == 3 else whole
        states = sharded if candidate.zero else whole
        cast = whole if candidate.zero < 3 else 0.0
        return self.weight_bytes * weights + self.optimizer_bytes * states + self.cast_bytes * cast

    def _exposed_seconds(self, candidate: Candidate, whole: float) -> float:
        """Return the seconds of traffic that compute does not hide, and of reading the weights."""
        device, microbatches = self.device, candidate.microbatches
        layers = self.model.layers / candidate.pipeline
        moved = 8 * layers * self._tokens(candidate) * microbatches * self.model.d_model
        seconds = moved / device.node_link.bandwidth if candidate.tensor > 1 else 0.0
        replicas_per_node = device.devices_per_node // candidate.tensor
        if candidate.expert > 1 and self.model.experts:
            inside = candidate.expert <= replicas_per_node
            link = device.node_link if inside else device.network
            seconds += moved * self.model.experts.per_token / link.bandwidth
        if candidate.tensor * candidate.replicas <= device.devices_per_node:
            bandwidth = device.node_link.bandwidth
        else:
            bandwidth = device.network.bandwidth * max(1, replicas_per_node)
        gathered = 4 * whole / bandwidth * candidate.gathers
        seconds += max(0.0, gathered - 2 / 3 * self.compute_seconds)
        # Every micro-batch reads all weights of the device three times.
        return seconds + 3 * microbatches * 2 * whole / (0.8 * device.memory_bandwidth)


def powers_of_two(largest: int) -> list[int]:
    """Return the powers of two from 1 to `largest`."""
    return [1 << exponent for exponent in range(largest.bit_length())]


def microbatch_counts(batch: int) -> list[int]:
    """Return the numbers of micro-batches that consist of 1, 2, 4 or all `batch` sequences."""
    sizes = [size for size in (1, 2, 4, batch) if size <= batch and batch % size == 0]
    return sorted({batch // size for size in sizes})
