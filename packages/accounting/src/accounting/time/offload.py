"""What offloading takes: over the host's link and back, and an optimizer in the host's memory."""

from accounting.breakdown import Breakdown, product, total
from accounting.hardware import Hardware
from accounting.memory.activations import activations
from accounting.memory.training import device_parameters
from accounting.model.shape import Shape
from accounting.plan import Plan, split
from accounting.precision import bytes_of
from accounting.workload import Workload

HOST_BANDWIDTH = 40e9
"""Bytes a second of a host's memory for each of its devices: an estimate, for two sockets of about
200 GB/s that serve eight."""


def held_parameters(model: Shape, plan: Plan) -> int:
    """Parameters whose update is a device's own: a shard of them under ZeRO."""
    dense, routed = device_parameters(model, plan)
    if plan.zero:
        dense, routed = split(dense, plan.replicas), split(routed, plan.expert_replicas)
    return dense + routed


def offload_seconds(
    model: Shape, plan: Plan, work: Workload, device: Hardware, *, free: float
) -> Breakdown | None:
    """Seconds that show of what goes to the host and comes back.

    An optimizer on the host waits for the gradients, updates where its moments are, and sends the
    weights back (Ren et al. 2021, ZeRO-Offload, without its delayed update). The inputs of blocks
    leave behind the forward and return behind the backward, as far as `free` seconds of arithmetic
    cover it.
    """
    link, kind = device.host_link, work.kind
    if plan.offload == "optimizer":
        count = held_parameters(model, plan)
        down, up = bytes_of(kind.gradients), bytes_of(kind.cast_weights or kind.weights)
        moved = 2 * kind.bytes_per_parameter
        each = 1 / link.bandwidth
        return total(
            "offload",
            "s",
            product("gradients down", "s", parameters=count, bytes=down, seconds_per_byte=each),
            product("update", "s", parameters=count, bytes=moved, per_byte=1 / HOST_BANDWIDTH),
            product("weights up", "s", parameters=count, bytes=up, seconds_per_byte=each),
        )
    if plan.offload == "activations":
        kept = float(activations(model, plan, work).total) * plan.microbatches
        needs = 2 * kept / link.bandwidth
        what = f"{needs:.4g} s on {link.name}, {min(needs, free):.4g} s of it hidden"
        return product("offload", "s", what, exposed=max(0.0, needs - free))
    return None
