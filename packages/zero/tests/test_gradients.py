"""Changes of `.grad`, `.data` and `requires_grad` have the same effect as in one process."""

import copy
import pickle
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import FSDP, ShardedOptimizer, load_checkpoint, save_checkpoint
from zero.fsdp.shard import as_plain_shard
from zero.gradients.shard import as_plain
from zero_training import assert_alike

OTHER_SIZES = [(2, 1), (3, 1), (3, 2), (3, 3)]
# Stage 1 differs from stage 2 where averages overwrite local gradients.
EVERY_STAGE = [1, 2, 3]
STAGES = [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def build_pair(stage, optimizer_cls=torch.optim.AdamW, **options):
    """Return a sharded model and optimizer, and those of one process."""
    options = {"lr": 0.1, **options}
    model, twin = make_model(), make_model()
    theirs = optimizer_cls(twin.parameters(), **options)
    if stage == 3:
        model = FSDP(model)
        return model, optimizer_cls(model.parameters(), **options), twin, theirs
    ours = ShardedOptimizer(
        model.parameters(),
        optimizer_cls,
        shard_gradients=stage == 2,
        bucket_size_mb=100 / 2**20,
        **options,
    )
    return model, ours, twin, theirs


def compute_loss(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return model(inputs).square().mean()


def run_both_backward_passes(model, twin, step, scale=1.0):
    """Run backward on this rank's part of the batch, and in one process on all parts of it."""
    (scale * compute_loss(model, step, dist.get_rank())).backward()
    world = dist.get_world_size()
    for rank in range(world):
        (scale * compute_loss(twin, step, rank) / world).backward()


def multiply_data(parameters):
    for parameter in parameters:
        parameter.grad.data.mul_(0.5)


def multiply(parameters):
    for parameter in parameters:
        parameter.grad *= 3.0


def replace(parameters):
    for parameter in parameters:
        parameter.grad = 2 * (parameter.grad * parameter.grad.abs() + 0.1).clamp(max=0.3)


def clip_by_hand(parameters):
    norm = sum(p.grad.square().sum() for p in parameters) ** 0.5
    for parameter in parameters:
        parameter.grad.mul_(0.1 / norm)


def set_to_zero(parameters):
    for parameter in parameters:
        parameter.grad.zero_()


def clip_copies(parameters):
    for number, parameter in enumerate(parameters):
        parameter.grad = parameter.grad.clone() if number % 2 else parameter.grad.detach() * 1.0
    nn.utils.clip_grad_norm_(parameters, 0.1)


def clip_new_ones(parameters):
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.1 * (1 + number))
    nn.utils.clip_grad_norm_(parameters, 0.1)


def clip_as_forums_do(parameters):
    norm = sum(p.grad.data.norm(2).item() ** 2 for p in parameters) ** 0.5
    norm += sum(p.grad.detach().square().sum().item() for p in parameters) ** 0.5
    for parameter in parameters:
        parameter.grad.data.mul_(0.1 / (norm + 1e-6))


def take_signs(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad.sign() * parameter.grad.abs().sqrt().mean()


def assign_data(parameters):
    for parameter in parameters:
        parameter.grad.data = 0.5 * parameter.grad.data.clamp(-0.01, 0.01)


def divide_by_maxima(parameters):
    gradients = [p.grad for p in parameters]
    maxima = torch._foreach_max(gradients)
    torch._foreach_div_(gradients, [1 + maximum.item() for maximum in maxima])


def drop_some(parameters):
    for parameter in parameters[::2]:
        parameter.grad = None


EDITS = {
    "copies": clip_copies,
    "new": clip_new_ones,
    "forums": clip_as_forums_do,
    "sign": take_signs,
    "drop": drop_some,
    "data": multiply_data,
    "assigned data": assign_data,
    "maxima": divide_by_maxima,
    "replace": replace,
    "replace, clip": lambda p: (replace(p), nn.utils.clip_grad_norm_(p, 0.1)),
    "in place": multiply,
    "floor": lambda p: [q.grad.copy_(q.grad // 0.01 * 0.01) for q in p],
    "foreach value": lambda p: torch._foreach_addcmul_(*[[q.grad for q in p]] * 3, 0.5),
    "foreach maximum": lambda p: torch._foreach_maximum_(
        [q.grad for q in p], torch._foreach_neg([q.grad for q in p])
    ),
    "clip 2": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "clip 1": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=1.0),
    "clip inf": lambda p: nn.utils.clip_grad_norm_(p, 0.01, norm_type=float("inf")),
    "clip foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "clip value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
    "finite": lambda p: [
        q.grad.div_(2.0 if q.grad.isfinite().all() and q.grad.max() >= q.grad.min() else 1.0)
        for q in p
    ],
    "clip by hand": clip_by_hand,
    "zero": set_to_zero,
}


def edit(stage):
    """Change gradients between backward and step by each function of EDITS."""
    model, ours, twin, theirs = build_pair(stage)
    for step, (name, change) in enumerate(EDITS.items()):
        run_both_backward_passes(model, twin, step)
        for module, optimizer in ((model, ours), (twin, theirs)):
            change(list(module.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, twin, case=name)
    return True


@pytest.mark.parametrize(
    ("world", "stage"),
    [
        (2, 2),
        (2, 3),
        *[pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in OTHER_SIZES],
    ],
)
def test_gradients_changed_by_any_means_step_as_in_one_process(world, stage):
    assert all(run_on_shared_ranks(edit, world, stage))


def scale_by_weight_norms(parameters):
    for parameter in parameters:
        norm, average = parameter.detach().norm(), parameter.detach().mean()
        parameter.grad.mul_((norm / (1 + parameter.grad.norm())).clamp(max=1.5) + average)


def rescale(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.5 / (1 + parameter.norm(1) + parameter.data.abs().max()))


def assign(parameters):
    for parameter in parameters:
        parameter.data = parameter.data * 0.9


def compute_penalties(parameters):
    total = sum(p.norm() + p.abs().mean() + (1 + p.pow(2).sum()).sqrt() for p in parameters)
    total = total + sum(torch._foreach_norm(parameters, 3))
    return 0.1 * (total + sum(p.exp().amax() for p in parameters))


PARAMETER_READS = {
    "norms": (scale_by_weight_norms, None),
    "rescale": (None, rescale),
    "data": (None, assign),
}


def read_parameters():
    """Read parameters between steps and in the loss, where norms include all elements."""
    model, ours, twin, theirs = build_pair(3)
    reads = {**PARAMETER_READS, "loss": (None, None)}
    for step, (name, (before, after)) in enumerate(reads.items()):
        run_both_backward_passes(model, twin, step)
        if name == "loss":
            for module in (model, twin):
                compute_penalties(list(module.parameters())).backward()
        for module, optimizer in ((model, ours), (twin, theirs)):
            if before is not None:
                before(list(module.parameters()))
            optimizer.step()
            if after is not None:
                after(list(module.parameters()))
            optimizer.zero_grad()
        assert_alike(model, twin, case=name)
    return True


def penalize_by_batch():
    """Train with penalties whose weight depends on this rank's batch, and accumulate gradients."""
    model, twin = make_model(), make_model()
    model = FSDP(model)
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, twin))

    def loss(module, step, rank):
        data_loss = compute_loss(module, step, rank)
        return data_loss + (1 + rank) * compute_penalties(list(module.parameters()))

    world = dist.get_world_size()
    for step in range(2):
        for number in (2 * step, 2 * step + 1):
            with nullcontext() if number % 2 else model.no_sync():
                loss(model, number, dist.get_rank()).backward()
            for rank in range(world):
                (loss(twin, number, rank) / world).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, twin)
    return True


def test_gradients_of_penalties_are_averaged_over_ranks():
    assert all(run_on_shared_ranks(penalize_by_batch, 2))


def test_parameters_read_outside_forward_count_all_elements():
    assert all(run_on_shared_ranks(read_parameters, 2))


def read_whole_shapes():
    model, _, twin, _ = build_pair(3)
    weight, whole = next(iter(model.parameters())), next(iter(twin.parameters()))
    refused = {
        "product": lambda p: p.t() @ p,
        "row": lambda p: p[1],
        "row norms": lambda p: p.norm(dim=1),
        "assignment": lambda p: p.data.__setitem__(1, 0.0),
        "random": lambda p: nn.init.uniform_(p),
        "flat": nn.utils.parameters_to_vector,
        "deviation": lambda p: p.std(),
    }
    for name, read in refused.items():
        with pytest.raises(RuntimeError, match="full_tensor"):
            read(weight if name != "flat" else [weight])
    full = weight.full_tensor()
    torch.testing.assert_close(full, whole)
    for values in (full, whole):
        (values.t() @ values).square().sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), whole.grad)
    return True


def test_reads_of_parameters_that_need_other_ranks_elements_are_refused_or_gathered():
    assert all(run_on_shared_ranks(read_whole_shapes, 2))


def compute_norms(stage):
    model, ours, twin, _ = build_pair(stage)
    assert ours.param_groups
    run_both_backward_passes(model, twin, 0)
    for order in (2.0, 1.0, float("inf"), 3.0):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=order)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 1e9, norm_type=order)
        torch.testing.assert_close(norm, expected)
    by_name = dict(twin.named_parameters())
    shapes = {n: tuple(p.grad.shape) for n, p in by_name.items()}
    for name, parameter in model.named_parameters():
        whole = by_name[name.removeprefix("module.")].grad
        for reduce in ("norm", "sum", "mean", "max", "min"):
            torch.testing.assert_close(
                torch.as_tensor(getattr(parameter.grad, reduce)()).as_subclass(torch.Tensor),
                getattr(whole, reduce)(),
            )
        changed = parameter.grad.clone()
        changed.mul_(changed != changed.max())
        assert changed.max() < whole.max()
        count = (parameter.grad > 0).sum()
        assert count.dtype == torch.int64
        assert count == (whole > 0).sum()
        torch.testing.assert_close(parameter.grad.full_tensor(), whole)
        assert (1e3 * parameter.grad).sum(dtype=torch.int64) == (1e3 * whole).sum(dtype=torch.int64)
        assert torch.mul(parameter.grad, 2, out=changed) is changed
        torch.testing.assert_close(changed.full_tensor(), 2 * whole)
        for function in (torch.neg, torch.amax, torch.linalg.vector_norm):
            # A plain tensor would receive this rank's elements only.
            output = torch.zeros_like(as_plain(parameter.detach()))
            output = output if function is torch.neg else output.new_zeros(())
            with pytest.raises(RuntimeError, match=r"full_tensor|plain tensor of their shape"):
                function(parameter.grad, out=output)
        assert torch.signbit((-torch.zeros_like(parameter.grad)).full_tensor()).all()
        assert torch.equal((parameter.grad > 0).full_tensor(), whole > 0)
        if stage < 3:
            assert tuple(parameter.grad.shape) == shapes[name]
            with pytest.raises(RuntimeError, match="full_tensor"):
                _ = parameter.grad.reshape(-1)[0]
            with pytest.raises(RuntimeError, match="full_tensor"):
                torch.equal(parameter.grad, parameter.grad.clone())
            with pytest.raises(RuntimeError, match=r"assign to \.grad instead"):
                parameter.grad.data = torch.zeros(1)
            with pytest.raises(RuntimeError, match="combines an averaged gradient"):
                parameter.data.add_(parameter.grad, alpha=-0.1)
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_norms_and_sums_of_gradients_are_over_all_ranks(stage):
    assert all(run_on_shared_ranks(compute_norms, 3, stage))


def change_before_backward(stage):
    """Change parameters whose earlier values a graph has saved; one process refuses this too."""
    folder = case_folder()
    model, ours, twin, theirs = build_pair(stage)
    save_checkpoint(folder, model, ours)
    refuse_backward_after_changes(twin, theirs, folder)
    refuse_backward_after_changes(model, ours, folder)
    # The graph may need a parameter that was not stepped.
    some = torch.optim.SGD([p for n, p in model.named_parameters() if n.endswith("3.bias")], lr=1)
    if stage == 3:
        loss = compute_loss(model, 0, 0)
        compute_loss(model, 1, 0).backward()
        some.step()
        loss.backward()
    return True


def refuse_backward_after_changes(model, optimizer, folder):
    module = getattr(model, "module", model)
    state = {k: v.clone() for k, v in make_model().state_dict().items()}

    def step():
        compute_loss(model, 1, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    changes = [step, lambda: module.load_state_dict(state), lambda: load_checkpoint(folder, model)]
    for change in changes:
        loss = compute_loss(model, 0, dist.get_rank())
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
def test_a_backward_through_changed_parameters_is_refused(stage):
    assert all(run_on_shared_ranks(change_before_backward, 2, stage))


def clip_over_two_groups(stage):
    """Clip, in one call, gradients that are sharded over all ranks and over some of them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    part = groups[dist.get_rank() // 2]
    whole, inner = make_model(), make_model()
    optimizers = []
    if stage == 3:
        whole, inner = FSDP(whole), FSDP(inner, group=part)
    else:
        for module, group in ((whole, None), (inner, part)):
            options = {"lr": 0.1, "group": group, "shard_gradients": True}
            optimizers.append(ShardedOptimizer(module.parameters(), torch.optim.SGD, **options))
    (compute_loss(whole, 0, dist.get_rank()) + compute_loss(inner, 1, dist.get_rank())).backward()
    parameters = [*inner.parameters(), *whole.parameters()]
    norms = [torch.linalg.vector_norm(p.grad.full_tensor()) for p in parameters]
    total = nn.utils.clip_grad_norm_(parameters, 1e9, foreach=False)
    torch.testing.assert_close(total, torch.linalg.vector_norm(torch.stack(norms)))
    with pytest.raises(RuntimeError, match="over one process group, got several groups"):
        nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    if stage == 3:
        with pytest.raises(RuntimeError, match="over one process group, got several groups"):
            scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))
    return True


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_several_groups_are_clipped_one_by_one(stage):
    assert all(run_on_shared_ranks(clip_over_two_groups, 3, stage))


SCALERS = {"GradScaler": torch.amp.GradScaler, "ShardedGradScaler": ShardedGradScaler}


def train_with_scaler(stage, name):
    """Train with a loss scaler; one step is skipped because rank 1 overflows."""
    model, ours, twin, theirs = build_pair(stage, torch.optim.SGD, lr=0.2, momentum=0.9)
    options = {"init_scale": 1024.0, "growth_interval": 2}
    scaler = SCALERS[name]("cpu", **options)
    reference = torch.amp.GradScaler("cpu", **options)
    for step in range(6):
        bad = step == 2
        loss = compute_loss(model, step, dist.get_rank())
        if bad and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        world = dist.get_world_size()
        for rank in range(world):
            loss = compute_loss(twin, step, rank) / world
            reference.scale(loss * float("inf") if bad and rank == 1 else loss).backward()
        for s, optimizer, module in ((scaler, ours, model), (reference, theirs, twin)):
            if step % 2:
                s.unscale_(optimizer)
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            s.step(optimizer)
            s.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == reference.get_scale(), step
    return assert_alike(model, twin)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "name", ["GradScaler", pytest.param("ShardedGradScaler", marks=pytest.mark.exhaustive)]
)
def test_loss_scalers_of_torch_step_and_skip_as_in_one_process(stage, name):
    assert all(run_on_shared_ranks(train_with_scaler, 2, stage, name))


def give_up(stage):
    """Clear the gradients of a backward pass under no_sync(), and keep those of another pass."""
    model, ours, twin, theirs = build_pair(stage, torch.optim.SGD)
    holder = model if stage == 3 else ours
    for step in range(4):
        for is_kept in (False, True):
            with holder.no_sync():
                compute_loss(model, 10 * step, dist.get_rank()).backward()
            for rank in range(dist.get_world_size()):
                (compute_loss(twin, 10 * step, rank) / dist.get_world_size()).backward()
            if not is_kept:
                for holder_of_grads in (model, twin) if step % 2 else (ours, theirs):
                    holder_of_grads.zero_grad()
        run_both_backward_passes(model, twin, step)
        for optimizer in (ours, theirs):
            optimizer.step()
        assert_alike(model, twin)
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_an_abandoned_step_are_discarded(stage):
    assert all(run_on_shared_ranks(give_up, 2, stage))


def drop(stage):
    """Skip a batch by `model.zero_grad()`, and accumulate another one."""
    model, ours, twin, theirs = build_pair(stage, torch.optim.SGD)
    for step in range(5):
        run_both_backward_passes(model, twin, step)
        for module, optimizer in ((model, ours), (twin, theirs)):
            if step == 1:
                module.zero_grad()
                continue
            optimizer.step()
            if step == 2:
                continue
            if step == 3:
                optimizer.zero_grad(set_to_none=False)
            module.zero_grad()
    assert_alike(model, twin)
    if stage < 3:
        run_both_backward_passes(model, twin, 5)
        if dist.get_rank() == 1:
            model[0].bias.grad = None
        message = r"parameter 1, of shape \(7,\), had its gradient cleared .* on some ranks only"
        with pytest.raises(RuntimeError, match=message):
            ours.step()
        if dist.get_rank() == 1:
            model[0].bias.grad = torch.zeros(7).double()
        with pytest.raises(RuntimeError, match=message):
            ours.step()
    return True


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_cleared_gradients_are_discarded_and_others_accumulate(stage):
    assert all(run_on_shared_ranks(drop, 2, stage))


def accumulate(stage):
    """Run backward passes with and without no_sync in every order, and edit the last gradients."""
    for synced in ((True, True), (False, True), (True, False, True), (False, False)):
        model, ours, twin, theirs = build_pair(stage, torch.optim.SGD)
        for step in range(2):
            for number, sync in enumerate(synced):
                holder = model if stage == 3 else ours
                with nullcontext() if sync else holder.no_sync():
                    loss = compute_loss(model, 10 * step + number, dist.get_rank())
                    # With a graph of the backward pass, gradients are enabled in its hooks.
                    loss.backward(create_graph=number == 0 and stage < 3)
                for rank in range(dist.get_world_size()):
                    loss = compute_loss(twin, 10 * step + number, rank)
                    (loss / dist.get_world_size()).backward()
            if synced[-1]:
                multiply(model.parameters())
                multiply(twin.parameters())
            elif stage == 3:
                # At stage 3 a step does not average gradients, so it must raise.
                for read in (ours.step, partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)):
                    with pytest.raises(
                        RuntimeError, match="run the last backward pass of a step outs"
                    ):
                        read()
                break
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        if synced[-1] or stage < 3:
            assert_alike(model, twin)
    return True


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_backwards_accumulate_in_any_order_of_no_sync(stage):
    assert all(run_on_shared_ranks(accumulate, 2, stage))


def double_gradient(parameter):
    parameter.grad.mul_(2.0)


def register_shard_hooks():
    """Register linear hooks before and after a step, which act as in one process."""
    model, ours, twin, theirs = build_pair(3, torch.optim.SGD)
    seen = []
    for step in range(3):
        if step == 1:
            for module in (model, twin):
                for parameter in module.parameters():
                    parameter.register_post_accumulate_grad_hook(double_gradient)
                    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p))
        run_backward_once(model, twin, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert len(seen) == 2 * 2 * len(list(twin.parameters())), len(seen)
    return assert_alike(model, twin)


def run_backward_once(model, twin, step):
    """Run one backward pass of all parts of a batch, so that hooks run as often as on one rank."""
    compute_loss(model, step, dist.get_rank()).backward()
    world = dist.get_world_size()
    sum(compute_loss(twin, step, rank) / world for rank in range(world)).backward()


def test_post_accumulate_hooks_of_shards_run_whenever_they_were_registered():
    assert all(run_on_shared_ranks(register_shard_hooks, 2))


def register_parameter_hooks(stage):
    """Register hooks before the optimizer is constructed, and one that reads `.grad` after it."""
    model, twin = make_model(), make_model()
    for module in (model, twin):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(double_gradient)
    ours = ShardedOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=stage == 2, lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        run_backward_once(model, twin, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(model, twin)
    model[0].weight.register_post_accumulate_grad_hook(double_gradient)
    with pytest.raises(RuntimeError, match="a hook that is registered before the optimizer is"):
        compute_loss(model, 2, dist.get_rank()).backward()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_hooks_from_before_the_optimizer_run_and_later_reads_are_refused(stage):
    assert all(run_on_shared_ranks(register_parameter_hooks, 2, stage))


def give_other_memory(stage):
    model, ours, twin, theirs = build_pair(stage)
    for step in range(4):
        if step in (1, 3):
            for module in (model, twin):
                for parameter in module.parameters():
                    parameter.data = parameter.data.clone()
                    parameter.data.mul_(0.5)
        run_both_backward_passes(model, twin, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        # A change between forward passes that version counters do not show.
        compute_loss(model, step, 0)
        for module in (model, twin):
            for parameter in module.parameters():
                parameter.data.mul_(1.5)
    return assert_alike(model, twin)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_with_assigned_data_are_trained(stage):
    assert all(run_on_shared_ranks(give_other_memory, 2, stage))


def rearrange_data(stage):
    """Exchange the `.data` of two parameters, and transpose that of a third one."""

    def make():
        # torch transposes matrices from 60 x 60 elements on without a check of overlapping memory.
        layers = [nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)]
        return nn.Sequential(*layers).double()

    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    ours = ShardedOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=stage == 2, lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        torch.manual_seed(step)
        batches = torch.randn(world, 4, 6, dtype=torch.float64)
        model(batches[rank]).square().mean().backward()
        (sum(twin(inputs).square().mean() for inputs in batches) / world).backward()
        for module, optimizer in ((model, ours), (twin, theirs)):
            first, second, third = (module[index].weight for index in (1, 2, 3))
            first.data, second.data = second.data, first.data
            third.data = third.data.t()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in pairs)


@pytest.mark.parametrize("stage", [1, 2])
def test_exchanged_and_transposed_data_are_trained(stage):
    assert all(run_on_shared_ranks(rearrange_data, 2, stage))


def exchange_for_averages(stage):
    """Evaluate with averages of the parameters, which are exchanged by their `.data`."""
    model, ours, twin, theirs = build_pair(stage)
    modules = model, twin
    averages = [[p.detach().clone() for p in module.parameters()] for module in modules]

    def exchange():
        for module, values in zip(modules, averages, strict=True):
            for index, parameter in enumerate(module.parameters()):
                values[index], parameter.data = parameter.data, values[index]

    for step in range(3):
        run_both_backward_passes(model, twin, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for module, values in zip(modules, averages, strict=True):
                for average, parameter in zip(values, module.parameters(), strict=True):
                    average.mul_(0.9).add_(parameter, alpha=0.1)
        exchange()
        with torch.inference_mode():
            torch.testing.assert_close(*[compute_loss(module, step, 0) for module in modules])
        exchange()
    return assert_alike(model, twin)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_exchanged_for_their_averages(stage):
    assert all(run_on_shared_ranks(exchange_for_averages, 2, stage))


def change_data(stage):
    changes = {
        r"float64 on cpu, got .* torch\.float32 on cpu": torch.Tensor.float,
        r"float64 on cpu, got .* torch\.complex64 on cpu": lambda values: values.view(
            torch.complex64
        ),
        r"\) torch\.float64 on cpu, got \(1,.*\) torch\.float64 on cpu": lambda values: values[:1],
    }
    for message, change in changes.items():
        model, ours, _, _ = build_pair(stage)
        for parameter in model.parameters():
            parameter.data = change(as_plain_shard(parameter))
        with pytest.raises(RuntimeError, match="expected .*" + message):
            compute_loss(model, 0, 0) if stage == 3 else ours.step()
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_a_dtype_changed_after_wrapping_is_refused(stage):
    assert all(run_on_shared_ranks(change_data, 2, stage))


def replace_data_by_conjugate(stage):
    """Replace data by its conjugate, which has the same memory, shape and strides."""
    model = nn.Linear(3, 2, dtype=torch.complex64)
    twin = copy.deepcopy(model)
    if stage == 3:
        model = FSDP(model)
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for module in (model, twin):
        for parameter in module.parameters():
            parameter.data = as_plain_shard(parameter).conj()
    if stage != 3:
        optimizer.step()
    inputs = torch.ones(1, 3, dtype=torch.complex64)
    torch.testing.assert_close(model(inputs), twin(inputs))
    if stage != 3:
        assert not any(parameter.is_conj() for parameter in model.parameters())
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_conjugated_data_are_copied_into_the_shards(stage):
    assert all(run_on_shared_ranks(replace_data_by_conjugate, 1, stage))


def freeze(stage):
    """Freeze and unfreeze layers during training, including one that was wrapped frozen."""
    world = dist.get_world_size()
    model, twin = make_model(), make_model()
    for module in (model, twin):
        module[3].requires_grad_(False)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    if stage == 3:
        model = FSDP(model)
        ours = torch.optim.AdamW(model.parameters(), lr=0.1)
        layers = model.module
    else:
        ours = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, shard_gradients=stage == 2, lr=0.1
        )
        layers = model
    for step in range(5):
        for module in (layers, twin):
            module[3].weight.requires_grad_(step in (1, 2, 4))
            module[3].bias.requires_grad_(step > 1)
            module[0].requires_grad_(step != 3)
            module[2].requires_grad_(step != 2)
        compute_loss(model, step, dist.get_rank()).backward()
        sum(compute_loss(twin, step, rank) / world for rank in range(world)).backward()
        for module, optimizer in ((model, ours), (twin, theirs)):
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, twin)
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_freezing_after_wrapping_trains_as_in_one_process(stage):
    assert all(run_on_shared_ranks(freeze, 2, stage))


def refuse_copies():
    model = FSDP(nn.Sequential(nn.Linear(3, 3)))
    for what in (model, model.module):
        with pytest.raises(TypeError, match="copy the module before FSDP"):
            copy.deepcopy(what)
    with pytest.raises(TypeError, match="save_checkpoint"):
        torch.save(model, "/dev/null")
    averaged, _optimizer, *_ = build_pair(2)
    model(torch.ones(1, 3)).sum().backward()
    compute_loss(averaged, 0, 0).backward()
    for module in (model, averaged):
        parameter = next(module.parameters())
        copied = copy.deepcopy(parameter.grad)
        assert type(copied) is type(parameter.grad)
        assert copied.norm() == parameter.grad.norm()
        with pytest.raises(TypeError, match=r"use full_tensor\(\), called by every rank"):
            pickle.dumps(parameter.grad)
    with pytest.raises(TypeError, match=r"use full_tensor\(\), called by every rank"):
        pickle.dumps(list(model.parameters()))
    return True


def test_copies_of_fsdp_are_refused():
    assert all(run_on_shared_ranks(refuse_copies, 1))


class Tied(nn.Module):
    """A model whose head reads the embedding's weight, and a scale reads a layer's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x)) * block.weight.mean()
        return x @ self.embed.weight.T


def read_without_calling():
    def make_layer():
        return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    words = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    vectors = torch.nn.functional.one_hot(words % 8, 8).double()
    cases = [
        (make_layer, vectors, {"shard": (nn.Linear,)}),
        (make_layer, vectors, {"shard": (nn.Linear, nn.MultiheadAttention)}),
        (make_layer, vectors, {"shard": (nn.TransformerEncoderLayer,)}),
        (lambda: nn.TransformerEncoder(make_layer(), 2), vectors, {}),
    ]
    model = FSDP(Tied().double(), shard=(nn.Embedding,))
    with pytest.raises(RuntimeError, match="select the module that reads it with shard="):
        model(words)
    for make, inputs, options in cases:
        torch.manual_seed(0)
        twin = make().double()
        model = FSDP(copy.deepcopy(twin), **options)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        for _ in range(2):
            model(inputs).square().sum().backward()
            every = [torch.empty_like(inputs) for _ in range(dist.get_world_size())]
            dist.all_gather(every, inputs)
            sum(twin(x).square().sum() / len(every) for x in every).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_alike(model, twin)
            assert all(unit.unsharded_bytes == 0 for unit in model.units)
        if nn.MultiheadAttention in options.get("shard", ()):
            # In evaluation, torch's layer reads the weights of its attention itself.
            with pytest.raises(RuntimeError, match="is read while its module does not run"):
                model.eval()(inputs)
            continue
        torch.testing.assert_close(model.eval()(inputs), twin.eval()(inputs))
    return True


def test_weights_read_without_calling_their_module_need_a_unit_of_the_reader():
    assert all(run_on_shared_ranks(read_without_calling, 2))


def take_averages_of_others():
    """Assign averages of other parameters and of an earlier step to `.grad`."""
    parameters = nn.ParameterList(torch.zeros(4, dtype=torch.float64) for _ in range(3))
    factors = torch.arange(12.0).double().view(3, 4)
    ours = ShardedOptimizer(parameters, torch.optim.SGD, elementwise=False, lr=1.0)

    def run_backward():
        (torch.stack([*parameters]) * factors).sum().backward()

    # Rank 0 has the first and the last parameter.
    run_backward()
    parameters[0].grad = parameters[2].grad
    ours.step()
    for parameter, expected in zip(parameters, (2, 1, 2), strict=True):
        assert torch.equal(parameter, -factors[expected])
    parameters[0].grad = parameters[1].grad
    with pytest.raises(RuntimeError, match="computed from another parameter's gradient"):
        ours.step()
    saved = parameters[1].grad
    ours.zero_grad()
    parameters[1].grad = saved
    with pytest.raises(RuntimeError, match="belongs to an earlier step"):
        ours.step()
    return True


def test_averages_of_other_parameters_are_copied_or_refused():
    assert all(run_on_shared_ranks(take_averages_of_others, 2))


def change_gradients_in_hooks():
    """Change `.grad` in hooks of a second backward pass, which adds to averages."""
    for value, options in ((None, {"alpha": 0.5}), (1.0, {}), (torch.tensor(2.0), {"alpha": 3})):
        model, twin = make_model(), make_model()
        for module in (model, twin):
            for parameter in module.parameters():

                def add(parameter, value=value, options=options):
                    parameter.grad.add_(parameter.detach() if value is None else value, **options)

                parameter.register_post_accumulate_grad_hook(add)
        ours = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(2):
            compute_loss(model, step, dist.get_rank()).backward()
            # A single backward pass, so that the hooks run as often as on one rank.
            (sum(compute_loss(twin, step, rank) for rank in range(2)) / 2).backward()
        ours.step()
        theirs.step()
        assert_alike(model, twin)
    return True


def test_additions_in_hooks_of_a_second_backward_are_exact():
    assert all(run_on_shared_ranks(change_gradients_in_hooks, 2))


def combine_shapes_and_dtypes():
    """Combine averages with tensors of other shapes and dtypes."""
    shapes = [(2, 3), (3, 2), (4,)]
    parameters = nn.ParameterList(torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
    ours = ShardedOptimizer(parameters, torch.optim.SGD, elementwise=False, lr=1.0)
    sum(parameter.sum() for parameter in parameters).backward()
    first, second, _ = (parameter.grad for parameter in parameters)
    # On one rank, both gradients have the same range of elements.
    with pytest.raises(RuntimeError, match="tensor of other elements"):
        torch.add(first, second)
    with pytest.raises(RuntimeError, match="equal needs all elements"):
        torch.equal(first, second)
    assert (first * torch.ones(1)).dtype == torch.float32
    assert (first * torch.tensor(1.0)).dtype == torch.bfloat16
    for reduce in (torch.sum, torch.amax, torch.linalg.vector_norm):
        with pytest.raises(RuntimeError, match="full_tensor"):
            reduce(first, dim=None if reduce is torch.sum else (), keepdim=True)
    if hasattr(torch, "_foreach_powsum"):
        with pytest.raises(RuntimeError, match="_foreach_powsum is not supported for averaged"):
            torch._foreach_powsum([first], 2)
    with pytest.raises(RuntimeError, match="any needs all elements"):
        torch.any(first > 0, dim=())
    ours.step()
    return True


def test_averages_are_combined_by_torchs_rules_for_shapes_and_dtypes():
    assert all(run_on_shared_ranks(combine_shapes_and_dtypes, 1))


def penalize_by_averages(stage):
    """Compute losses from averaged gradients, in each order in which autograd may add them."""
    rank = dist.get_rank()
    for order in ("loss", "penalty", "separate"):
        model, ours, _, _ = build_pair(stage)
        compute_loss(model, 0, rank).backward()
        weights = [parameter.grad.detach().clone() ** 2 for parameter in model.parameters()]
        ours.zero_grad()
        penalty = 0.0
        loss = compute_loss(model, 1, rank) if order != "penalty" else 0.0
        for weight, parameter in zip(weights, model.parameters(), strict=True):
            penalty = penalty + (weight * (parameter - 1).square()).sum()
        if order == "penalty":
            loss = compute_loss(model, 1, rank)
        with pytest.raises(RuntimeError, match="no averaged gradient in a backward pass"):
            (penalty if order == "separate" else loss + (rank + 1) * penalty).backward()
    model, ours, _, _ = build_pair(stage)
    compute_loss(model, 0, rank).backward()
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.grad
    with ours.no_sync():
        compute_loss(model, 1, rank).backward()
    with pytest.raises(RuntimeError, match="includes a local gradient"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # Some builds of torch cannot report reads of memory that does not exist.
    if hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):
        model, ours, _, _ = build_pair(stage)
        compute_loss(model, 0, rank).backward()
        for parameter in model.parameters():
            assert not parameter.grad.is_shared()
            assert parameter.grad.data_ptr() == parameter.grad.untyped_storage().data_ptr() == 0
            assert not parameter.grad.untyped_storage().is_shared()
            copied = copy.deepcopy(parameter.grad)
            assert copied.full_tensor().equal(parameter.grad.full_tensor())
            parameter.data = parameter.data - parameter.grad
        for use in (lambda: compute_loss(model, 1, rank), ours.step):
            with pytest.raises(RuntimeError, match=r"memory of an averaged gradient.*full_tensor"):
                use()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_losses_of_averages_and_norms_of_local_gradients_are_refused(stage):
    assert all(run_on_shared_ranks(penalize_by_averages, 2, stage))


def misuse_all():
    """Misuse the sharded parameters after a backward pass; return the message of each error."""
    messages = {}
    model, ours, twin, _ = build_pair(3)
    run_both_backward_passes(model, twin, 0)
    for name, (act, _) in MISUSES.items():
        with pytest.raises(RuntimeError) as error:
            act(dict(model.module.named_parameters()), ours)
        messages[name] = str(error.value)
    return messages


def drop_on_one_rank(named, ours):
    if dist.get_rank():
        named["0.weight"].grad = None
    ours.step()


def assign(value):
    return lambda named, ours: setattr(named["0.weight"], "grad", value(named))


MISUSES = {
    "whole": (assign(lambda _: torch.ones(7, 5).double()), "), got shape (7, 5) or the elements"),
    "another's": (assign(lambda n: n["3.weight"].grad), "or the elements of another shard"),
    "row": (lambda n, _: n["0.weight"].grad.__setitem__(0, 0.0), "full_tensor"),
    "view": (lambda n, _: n["0.weight"].grad.view(-1), "full_tensor"),
    "equal": (lambda n, _: n["0.weight"].grad.equal(n["3.weight"].grad), "full_tensor"),
    "largest singular value": (
        lambda n, _: torch.linalg.norm(n["0.weight"].grad, 2),
        "full_tensor",
    ),
    "random": (lambda n, _: torch.randn_like(n["0.weight"].grad), "full_tensor"),
    "median": (lambda n, _: n["0.weight"].grad.median(), "full_tensor"),
    "std": (lambda n, _: n["0.weight"].grad.std(), "full_tensor"),
    "norm of rows": (lambda n, _: n["0.weight"].grad.norm(dim=1), "full_tensor"),
    "sorted": (lambda n, _: n["0.weight"].grad.cumsum(0), "full_tensor"),
    "softmax": (lambda n, _: n["0.weight"].grad.softmax(0), "full_tensor"),
    "vector": (lambda n, _: n["0.weight"].grad.mul(torch.ones(5).double()), "full_tensor"),
    "noise": (
        lambda n, _: n["0.weight"].grad.add_(torch.randn(n["0.weight"].shape).double()),
        "as random numbers of equal seeds are: create it by zeros_like(p)",
    ),
    "noise of parameters": (
        lambda n, _: torch._foreach_add_([n["0.weight"]], [torch.randn(n["0.weight"].shape)]),
        "combines this rank's elements with a plain tensor of their shape",
    ),
    "numpy": (lambda n, _: n["0.weight"].grad.tolist(), "full_tensor"),
    "sum over ranks": (lambda n, _: dist.all_reduce(n["0.weight"].grad), "full_tensor"),
    "broadcast of a gradient": (
        lambda n, _: dist.broadcast(n["0.weight"].grad.data, 0),
        "full_tensor",
    ),
    "broadcast": (lambda n, _: dist.broadcast(n["0.weight"].data, 0), "full_tensor"),
    "gather": (
        lambda n, _: dist.all_gather([torch.empty(2)] * 2, n["0.weight"].detach()),
        "full_tensor",
    ),
    "product": (lambda n, _: n["3.weight"].detach() @ n["0.weight"].detach(), "full_tensor"),
    # The gradients of all other misuses must be on both ranks, so this one is the last.
    "one rank": (drop_on_one_rank, "0.weight has a gradient on some ranks only"),
}


def test_operations_that_need_the_whole_gradient_raise():
    for messages in run_on_shared_ranks(misuse_all, 2):
        for name, (_, message) in MISUSES.items():
            assert message in messages[name]


def register_step_hooks(name):
    """Clip in a hook before each step, and scale parameters by norms in hooks after it."""

    def clip(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    def rescale_after(optimizer, args, kwargs):
        if optimizer in hooked:
            rescale(optimizer.param_groups[0]["params"])

    handle = register_optimizer_step_post_hook(rescale_after)
    model, twin = make_model(), make_model()
    model = FSDP(model)
    hooked = [getattr(torch.optim, name)(m.parameters(), lr=0.1) for m in (model, twin)]
    for optimizer in hooked:
        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(rescale_after)
    for step in range(2):
        run_both_backward_passes(model, twin, step)
        for optimizer in hooked:
            optimizer.step()
            optimizer.zero_grad()
    handle.remove()
    return assert_alike(model, twin)


def register_hooks_of_all_steps():
    """Decay the parameters in a hook after each step of any optimizer."""
    model, ours, twin, theirs = build_pair(1, torch.optim.SGD)
    stepped = []

    def decay(optimizer, args, kwargs):
        stepped.append(optimizer)
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.9)

    handle = register_optimizer_step_post_hook(decay)
    for step in range(2):
        run_both_backward_passes(model, twin, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    handle.remove()
    assert stepped == [ours, theirs] * 2
    return assert_alike(model, twin)


def test_global_hooks_run_once_per_step_at_stage_1():
    assert all(run_on_shared_ranks(register_hooks_of_all_steps, 2))


@pytest.mark.parametrize("name", ["SGD", "Adafactor"])
def test_hooks_of_a_step_see_whole_tensors_at_stage_3(name):
    assert all(run_on_shared_ranks(register_step_hooks, 2, name))


def register_tensor_hooks():
    """Register hooks on shards, which get and may replace the average of each backward pass."""
    model, ours, twin, theirs = build_pair(3, torch.optim.SGD)
    for layers in (model.module, twin):
        for parameter in (*layers[0].parameters(), *layers[3].parameters()):
            parameter.register_hook(lambda gradient: gradient * 0.5)
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for step in range(2):
        # A single backward pass, so that the hooks run as often as on one rank.
        compute_loss(model, step, dist.get_rank()).backward()
        world = dist.get_world_size()
        sum(compute_loss(twin, step, rank) / world for rank in range(world)).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return assert_alike(model, twin)


def test_hooks_on_shards_see_the_average():
    assert all(run_on_shared_ranks(register_tensor_hooks, 2))
