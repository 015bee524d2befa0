"""Checks that all ranks have gradients of the same parameters, and equal weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ddp.bucket import RANK_FLAGS, Bucket
from ddp.communication import BucketReduction, run_collective
from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.model_agreement import compute_checksum, gather_objects
from ddp.extensions import Extension, Step
from ddp.process_group import ReduceGroup

#: With more ranks, a bfloat16 sum of flags may be rounded, so names are compared instead.
MAX_EXACT_RANKS = 256


class WeightsDiffer(RuntimeError):
    """Error that is raised on every rank if the weights of the ranks are not equal."""


@dataclass(frozen=True)
class GradientReport:
    """The state of one rank, which is compared if the summed flags are not the expected ones."""

    #: Names of parameters without a gradient.
    missing: tuple[str, ...] = ()
    #: True if the parameters were changed in place between the starts of the last two steps.
    has_stepped: bool = False
    #: Checksum of the weights; 0 if it is not needed.
    weights_checksum: int = 0


class GradientAgreement(Extension):
    """The extension that writes the flags of each bucket and evaluates their sums over the ranks.

    See Note [Bucket layout].
    """

    def __init__(
        self,
        group: ReduceGroup,
        failures: FailureAttribution,
        *,
        find_unused_parameters: bool,
    ) -> None:
        #: False to average over the ranks that still have inputs, as in `DDP.join`.
        self.divide_by_initial_world_size = True
        self._group = group
        self._failures = failures
        self._find_unused_parameters = find_unused_parameters
        #: The parameters in the last step, and the sum of their version counters at its start.
        self._step_parameters: Sequence[nn.Parameter] = ()
        self._versions_at_step = 0
        self._has_stepped = False
        #: All trained parameters, and their summed version counters before the last forward pass.
        self._forward_parameters: Sequence[nn.Parameter] = ()
        self._versions_before_forward = 0

    def record_weights(self, weights: Sequence[nn.Parameter]) -> None:
        """Record the version counters of the weights before a forward pass.

        The launch of the last bucket compares the counters again. For example,
        `nn.Embedding(max_norm=...)` changes weights in the forward pass, and an optimizer in a hook
        changes them in the backward pass. Such changes may depend on the batch of the rank.
        """
        self._forward_parameters = weights
        self._versions_before_forward = _sum_versions(weights)

    def on_step_start(self, step: Step) -> None:
        """Detect whether the parameters were changed in place since the last step started."""
        versions = _sum_versions(step.parameters)
        has_same_parameters = step.parameters is self._step_parameters
        self._has_stepped = has_same_parameters and versions != self._versions_at_step
        self._step_parameters = step.parameters
        self._versions_at_step = versions

    def before_bucket_launch(self, step: Step, bucket: Bucket) -> None:
        """Write the flags of the bucket."""
        is_suspect = False
        if bucket.is_last and step.is_participating:
            is_suspect = _sum_versions(self._forward_parameters) != self._versions_before_forward
        bucket.write_flags(
            is_participating=step.is_participating,
            has_stepped=self._has_stepped,
            is_suspect=is_suspect,
        )

    def on_step_end(self, step: Step, reductions: Sequence[BucketReduction]) -> None:
        """Store in `step.unused` the indices of parameters for which no rank has a gradient.

        Inside `join()`, the method also rescales the gradients if the mean is over the ranks with
        inputs. Raises the errors of `check_same_gradients` on every rank.
        """
        buckets = step.buckets
        if not step.reduces_flags:
            self._sum_flags(buckets)
        world_size = self._group.world_size
        all_flags_usual = all(
            bucket.has_usual_flags(world_size, has_stepped=self._has_stepped) for bucket in buckets
        )
        if not buckets or (step.is_participating and all_flags_usual):
            return
        flags = [bucket.flags.tolist() for bucket in buckets]
        num_active, num_stepped, _ = flags[0][:RANK_FLAGS]
        if num_active < world_size and not self.divide_by_initial_world_size:
            for bucket in buckets:
                bucket.gradients.mul_(world_size / num_active)
        missing: dict[int, float] = {}
        for bucket, bucket_flags in zip(buckets, flags, strict=True):
            for index, flag in zip(bucket.indices, bucket_flags[RANK_FLAGS:], strict=True):
                if flag:
                    missing[index] = flag
        missing_on_some = {index for index, flag in missing.items() if flag != num_active}
        is_inexact = world_size > MAX_EXACT_RANKS and bool(missing)
        # Ranks may also have different weights if only some of them took an optimizer step.
        is_suspect = any(bucket_flags[2] for bucket_flags in flags)
        is_suspect |= num_stepped not in (0, num_active)
        is_refused = bool(missing_on_some) and not self._find_unused_parameters
        if is_inexact or is_suspect or is_refused:
            step.unused |= self._compare_reports(step, with_weights=is_suspect)
        else:
            step.unused |= missing.keys() - missing_on_some

    def reset_versions(self) -> None:
        """Skip the comparison in the next step, because weights were copied from another rank."""
        self._step_parameters = ()

    def _sum_flags(self, buckets: Sequence[Bucket]) -> None:
        if not buckets:
            return
        flags = torch.cat([bucket.flags.float() for bucket in buckets])
        all_reduce = partial(dist.all_reduce, group=self._group.process_group)
        run_collective(all_reduce, flags, "the sum of the flags", self._failures.attribute_errors)
        sizes = [len(bucket.flags) for bucket in buckets]
        for bucket, summed in zip(buckets, flags.split(sizes), strict=True):
            bucket.flags.copy_(summed)

    def _compare_reports(self, step: Step, *, with_weights: bool) -> set[int]:
        report = None
        if step.is_participating:
            report = self._make_report(step.buckets, with_weights=with_weights)
        try:
            unused_names = check_same_gradients(
                report,
                self._group.process_group,
                find_unused_parameters=self._find_unused_parameters,
            )
        except WeightsDiffer as error:
            # The flags of the next step would agree although the weights still differ.
            self._failures.report_failure(str(error))
            raise
        unused = set()
        for bucket in step.buckets:
            for index, name in zip(bucket.indices, bucket.names, strict=True):
                if name in unused_names:
                    unused.add(index)
        return unused

    def _make_report(self, buckets: Sequence[Bucket], *, with_weights: bool) -> GradientReport:
        missing = []
        for bucket in buckets:
            missing += [(bucket.indices[slot], bucket.names[slot]) for slot in bucket.missing]
        weights = self._forward_parameters or self._step_parameters
        return GradientReport(
            tuple(name for _, name in sorted(missing)),
            self._has_stepped,
            compute_checksum(weights) if with_weights else 0,
        )


def check_same_gradients(
    report: GradientReport | None, group: dist.ProcessGroup, *, find_unused_parameters: bool
) -> set[str]:
    """Compare the reports of all ranks; return the names of parameters that no rank used.

    This is a collective. A rank that has run out of inputs passes None. Raises `RuntimeError` on
    every rank if the weights differ. Also raises it if a parameter has a gradient on some ranks
    only and `find_unused_parameters` is False.
    """
    reports: dict[int, GradientReport] = {}
    for rank, gathered in enumerate(gather_objects(report, group)):
        if gathered is not None:
            reports[rank] = gathered
    _check_weights(reports)
    unused = set.intersection(*(set(other.missing) for other in reports.values()))
    if not find_unused_parameters:
        _check_missing(reports, unused)
    return unused


def _check_weights(reports: dict[int, GradientReport]) -> None:
    # If the weights are equal, a rank changed its weights temporarily and restored them, or all
    # ranks made the same change. All checksums are 0 if weights are not compared.
    if len({report.weights_checksum for report in reports.values()}) == 1:
        return
    stepped = [rank for rank, report in reports.items() if report.has_stepped]
    if len(stepped) in (0, len(reports)):
        raise WeightsDiffer(
            "the weights differ across ranks, because the forward or the backward pass changed "
            "them, as nn.Embedding(max_norm=...) or an optimizer in a gradient hook does; change "
            "weights after backward(), in the same way on every rank"
        )
    not_stepped = [rank for rank in reports if rank not in stepped]
    raise WeightsDiffer(
        f"the weights were changed between this backward pass and the previous one on ranks "
        f"{stepped}, but not on ranks {not_stepped}: some ranks ran one backward pass or one "
        "optimizer step more than other ranks; run the same number on every rank, or use join()"
    )


def _check_missing(reports: dict[int, GradientReport], unused: set[str]) -> None:
    for rank, report in reports.items():
        missing_on_some = [missing for missing in report.missing if missing not in unused]
        if not missing_on_some:
            continue
        name = missing_on_some[0]
        other = next(r for r, other_report in reports.items() if name not in other_report.missing)
        raise RuntimeError(
            f"{_shorten(missing_on_some)} got no gradient on rank {rank}, but did on rank {other}; "
            "use all parameters on every rank, or count a missing gradient as zero with "
            "DDP(..., find_unused_parameters=True)"
        )


def check_unused(parameters: Mapping[str, nn.Parameter], trained: Sequence[str], rank: int) -> None:
    """Raise `RuntimeError`, with the message of torch's DDP, if one of `parameters` is not frozen.

    `parameters` contains the parameters that no rank used in the last step, and `trained` contains
    the names of all trained parameters. The caller may have frozen parameters since that step.
    """
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not names:
        return
    cause = f"did not receive grad for rank {rank}: "
    indices = [str(trained.index(name)) for name in names]
    raise RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one: "
        "its loss did not depend on every parameter, on any rank. Make sure that all "
        "`forward` function outputs participate in calculating loss; freeze parameters that "
        "are not trained; or allow unused parameters by passing the keyword argument "
        "`find_unused_parameters=True`. (To see names, it is not "
        "necessary to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
        "DETAIL.) "
        f"Parameters which {cause}{', '.join(names)}. Parameter indices which "
        f"{cause}{' '.join(indices)}"
    )


def _sum_versions(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter._version for parameter in parameters)


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
