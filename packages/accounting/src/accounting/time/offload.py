"""Time of offloading: transfers over the host link, and an optimizer in host memory."""

from accounting.breakdown import Breakdown, product, total
from accounting.hardware import Hardware
from accounting.memory.activations import activations
from accounting.memory.states import device_parameters
from accounting.model.shape import Shape
from accounting.plan import Plan, split
from accounting.precision import bytes_of
from accounting.workload import Workload

#: Host memory bandwidth per device in bytes per second. It is an estimate for two sockets that
#: serve eight devices. A socket has 160 GB/s, 78 % of the peak of eight channels of DDR4-3200.
HOST_BANDWIDTH = 2 * 160e9 / 8


def updated_parameters(model: Shape, plan: Plan) -> int:
    """Return the largest number of parameters that a device updates, over the pipeline stages.

    With ZeRO, a device updates one shard.
    """
    largest = 0
    for stage in {0, plan.pipeline // 2, plan.pipeline - 1}:
        dense, routed = device_parameters(model, plan, stage)
        if plan.zero:
            dense, routed = split(dense, plan.replicas), split(routed, plan.expert_replicas)
        largest = max(largest, dense + routed)
    return largest


def offload_seconds(
    model: Shape, plan: Plan, work: Workload, device: Hardware, *, free: float
) -> Breakdown | None:
    """Return the seconds of offloading that compute does not hide.

    An optimizer on the host waits for the gradients, updates in host memory, and sends the weights
    back (Ren et al. 2021, ZeRO-Offload, without its delayed update). Inputs of blocks are sent
    during the forward and returned during the backward, hidden by up to `free` seconds of compute.
    """
    link, kind = device.host_link, work.kind
    if plan.offload == "optimizer":
        count = updated_parameters(model, plan)
        down, up = bytes_of(kind.gradients), bytes_of(kind.cast_weights or kind.weights)
        moved = 2 * kind.bytes_per_parameter
        seconds_per_byte = 1 / link.bandwidth
        return total(
            "offload",
            "s",
            product(
                "gradients down",
                "s",
                parameters=count,
                bytes=down,
                seconds_per_byte=seconds_per_byte,
            ),
            product("update", "s", parameters=count, bytes=moved, per_byte=1 / HOST_BANDWIDTH),
            product(
                "weights up", "s", parameters=count, bytes=up, seconds_per_byte=seconds_per_byte
            ),
        )
    if plan.offload == "activations":
        saved_bytes = float(activations(model, plan, work).total) * plan.microbatches
        needs = 2 * saved_bytes / link.bandwidth
        what = f"{needs:.4g} s on {link.name}, {min(needs, free):.4g} s of it hidden"
        return product("offload", "s", what, exposed=max(0.0, needs - free))
    return None
