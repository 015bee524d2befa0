"""A cache of validated calls, keyed by the signature of their arguments."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_autocast_enabled
from torch._C import _get_tracing_state
from torch.compiler import is_dynamo_compiling

from flashattn2.compilation import is_recorded
from flashattn2.dispatch import KERNEL_BACKENDS, BackendChoice
from flashattn2.spec import AttentionSpec
from flashattn2.validation import PLAIN_TYPES

# Note [Plan cache]
# Validation and the choice of a backend depend only on shapes, dtypes, layouts, devices and
# options.  The result is therefore stored per signature, and a second call skips both.  Compared
# with torch's CPU kernel for a few tokens, every Python statement here takes measurable time: the
# whole call should spend at most 15 us in Python (test_speed.py states the measured times).


class Plan(NamedTuple):
    """The scores and backend of all calls with one signature."""

    spec: AttentionSpec
    choice: BackendChoice
    #: True if torch's CPU kernel computes the whole result, except for sinks.
    is_cpu_kernel: bool


PLANS: dict[Hashable, Plan] = {}
MAX_PLANS = 1024


def look_up_plan(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]
) -> tuple[Hashable | None, Plan | None]:
    """Return the signature of a call and its stored plan.  See Note [Plan cache].

    The signature contains the types of the options, because True, 1 and 1.0 are equal.  It is None
    if the call must not be cached.  Calls are not cached inside a compiled graph (which is
    validated only once), `torch.jit.trace` or `make_fx`, or under autocast.  Calls with tensor
    subclasses, with options that cannot be hashed, or on devices other than CPUs and GPUs are not
    cached either.
    """
    if is_dynamo_compiling() or _get_tracing_state() is not None or is_recorded():
        return None, None
    if not (type(q) in PLAIN_TYPES and type(k) in PLAIN_TYPES and type(v) in PLAIN_TYPES):
        return None, None
    device_state: tuple[Any, ...] | None
    if q.is_cpu and k.is_cpu and v.is_cpu:
        device_type = "cpu"
        device_state = None
    elif q.is_cuda:
        device_type = "cuda"
        device_state = (q.device, k.device, v.device, torch.get_float32_matmul_precision())
    else:
        return None, None
    if is_autocast_enabled(device_type):
        return None, None
    layouts = q.layout, k.layout, v.layout
    dtypes = q.dtype, k.dtype, v.dtype
    types = tuple(map(type, options))
    signature = (q.shape, k.shape, v.shape, dtypes, layouts, device_state, options, types)
    try:
        return signature, PLANS.get(signature)
    except TypeError:
        # An option cannot be hashed, for example a list.
        return None, None


def store_plan(signature: Hashable | None, q: Tensor, plan: Plan) -> None:
    """Store the plan under its signature, if the call has one; clear a full cache first."""
    # Plans of interpreted kernels are not stored: they depend on torch's float32 precision, which a
    # signature on a CPU does not contain.
    if signature is not None and (q.is_cuda or plan.choice.backend not in KERNEL_BACKENDS):
        if len(PLANS) >= MAX_PLANS:
            PLANS.clear()
        PLANS[signature] = plan
