"""A checkpoint of any stage at any world size is resumed exactly at any other."""

import sys
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import FSDP, ShardedOptimizer, fully_shard, load_checkpoint, save_checkpoint
from zero.checkpoint.planner import iter_boxes
from zero.optimizer import optimizer_trial
from zero_training import assert_alike, build_pair, compute_mean_square, draw_batch, flip_bits, make
from zero_training import train as train_alike

DEADLINE = 300.0


def prepare_rank():
    # The optimizers of these tests do not change after a few steps.
    optimizer_trial.STEPS = len(optimizer_trial.SCALES)


FULL = StateDictOptions(full_state_dict=True)


class Tiny(nn.Module):
    """Odd shapes, a tied weight, a buffer and a 0-dimensional parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.conv = nn.Conv1d(5, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.conv(self.embed(tokens).mT)).mT
        return self.head(x * self.scale)


def build(stage, seed, name, group):
    torch.manual_seed(seed)
    model = Tiny()
    if stage == 3:
        model = FSDP(model, group=group, shard=(nn.Linear, nn.Embedding, nn.Conv1d))
    optimizer_cls = getattr(torch.optim, name)
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    if stage in (1, 2):
        options = {"lr": 0.01, "shard_gradients": stage == 2, "bucket_size_mb": 64 / 2**20}
        return model, ShardedOptimizer(groups, optimizer_cls, group=group, **options)
    return model, optimizer_cls(groups, lr=0.01)


def train(model, optimizer, steps):
    # Every rank has the whole batch, so the average does not depend on the world size.
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens, targets = (torch.randint(11, (4, 6), generator=generator) for _ in range(2))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


def gather_state(model):
    inner = model.module if isinstance(model, FSDP) else model
    state = {n: b.clone() for n, b in inner.named_buffers()}
    if isinstance(model, FSDP):
        return state | model.gather_full_params()
    return state | {
        n: p.detach().clone() for n, p in inner.named_parameters(remove_duplicate=False)
    }


def run_on(world, function, *arguments):
    """Return the result of a function that runs on the first ranks only; None on other ranks."""
    group = dist.new_group(list(range(world)))
    result = function(*arguments, group) if dist.get_rank() < world else None
    dist.barrier()
    return result


def save_at(path, stage, name, group):
    model, optimizer = build(stage, 0, name, group)
    train(model, optimizer, range(3))
    save_checkpoint(path, model, optimizer, extra={"step": 3}, group=group)
    saved = gather_state(model)
    train(model, optimizer, range(3, 5))
    return saved, gather_state(model)


def load_at(path, stage, name, group):
    model, optimizer = build(stage, 1, name, group)
    extra = load_checkpoint(path, model, optimizer, group=group)
    loaded = gather_state(model)
    train(model, optimizer, range(extra["step"], 5))
    return loaded, gather_state(model)


#: The stage and the number of ranks before and after a checkpoint, and the optimizer.
RESUMED = [
    ((2, 3), (3, 2), "NAdam"),
    ((3, 2), (0, 1), "SGD"),
    ((0, 1), (3, 3), "Adam"),
    ((1, 2), (2, 3), "Adafactor"),
]


def resume(before, after, name):
    path = f"{case_folder()}/checkpoint"
    results = [run_on(before[1], save_at, path, before[0], name)]
    dist.broadcast_object_list(results, 0)
    saved, finished = results[0]
    result = run_on(after[1], load_at, path, after[0], name)
    if result is not None:
        loaded, resumed = result
        for key, value in saved.items():
            assert torch.equal(loaded[key], value), key
        for key, value in finished.items():
            torch.testing.assert_close(resumed[key], value, rtol=1e-6, atol=1e-6)
    return True


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        *RESUMED,
        pytest.param((3, 4), (2, 2), "AdamW", marks=pytest.mark.exhaustive),
        pytest.param((1, 4), (1, 3), "AdamW", marks=pytest.mark.exhaustive),
        pytest.param((2, 3), (3, 4), "NAdam", marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_training_equals_uninterrupted_training(before, after, name):
    assert all(run_on_shared_ranks(resume, 4, before, after, name))


def compute_loss_part(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens, targets = (torch.randint(11, (2, 6), generator=generator) for _ in range(2))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_plain(stage, seed, group=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 11))
    if stage == 3:
        model = FSDP(model, group=group)
    if stage in (0, 3):
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"lr": 0.01, "shard_gradients": stage == 2, "bucket_size_mb": 64 / 2**20}
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, group=group, **options)


def train_without_stopping():
    """Train unsharded: three steps on batches of four parts, then three on batches of three."""
    model, optimizer = build_plain(0, 0)
    for step in range(6):
        world = 4 if step < 3 else 3
        parameters = list(model.parameters())
        parts = [
            torch.autograd.grad(compute_loss_part(model, step, r), parameters) for r in range(world)
        ]
        for parameter, *gradients in zip(parameters, *parts, strict=True):
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total / world
        optimizer.step()
    return gather_state(model)


def train_some_steps(path, stage, resumed, group):
    model, optimizer = build_plain(stage, int(resumed), group)
    first = load_checkpoint(path, model, optimizer, group=group)["step"] if resumed else 0
    for step in range(first, first + 3):
        optimizer.zero_grad()
        compute_loss_part(model, step, dist.get_rank()).backward()
        optimizer.step()
    save_checkpoint(path, model, optimizer, extra={"step": first + 3}, group=group)
    return gather_state(model)


def resume_with_three(stage):
    path = f"{case_folder()}/checkpoint"
    run_on(4, train_some_steps, path, stage, False)
    resumed = run_on(3, train_some_steps, path, stage, True)
    if resumed is not None:
        for name, value in train_without_stopping().items():
            assert torch.equal(resumed[name], value), name
    return True


@pytest.mark.parametrize(
    "stage", [*[pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (1, 2)], 3]
)
def test_resuming_with_three_ranks_after_four_is_bit_equal_to_uninterrupted_training(stage):
    assert all(run_on_shared_ranks(resume_with_three, 4, stage))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_cover_a_run_of_elements_exactly_and_in_order(shape, data):
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    elements = torch.arange(numel).view(shape)
    covered = []
    for offsets, sizes in iter_boxes(shape, start, stop):
        index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        covered += elements[index].flatten().tolist()
    assert covered == list(range(start, stop))
    assert len(list(iter_boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def save_small(path):
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, extra={"step": 1})


def flip(path, every):
    torch.manual_seed(1)
    model = nn.Linear(2, 3)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    counts = flip_bits(path, every, lambda: load_checkpoint(path, model, optimizer))
    assert load_checkpoint(path, model, optimizer) == {"step": 1}
    return counts


def load_flipped_files(folder, every):
    path = str(folder / "checkpoint")
    run_on_shared_ranks(save_small, 2, path, timeout=DEADLINE)
    tried, passed = run_on_shared_ranks(flip, 1, path, every, timeout=1500)[0]
    assert tried > 3000 // every
    assert passed == 0


def test_a_flipped_bit_anywhere_is_refused(tmp_path):
    load_flipped_files(tmp_path, 499)


@pytest.mark.exhaustive
def test_a_flipped_bit_in_every_byte_is_refused(tmp_path):
    load_flipped_files(tmp_path, 1)


class Wrapper(nn.Module):
    """A module with a child called `module` and other weights, unlike FSDP and DDP."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.head = nn.Linear(11, 2)

    def forward(self, tokens):
        return self.head(self.module(tokens))


def wrap_as_compiled(module):
    """Return what torch.compile returns, without the time to import a backend."""
    return OptimizedModule(module, lambda forward: forward)


def save_under_every_name():
    """Save compiled, tied and nested models, and load them by every name of a tied tensor."""
    path = case_folder()
    torch.manual_seed(0)
    model = Tiny()
    parts = {"compiled": wrap_as_compiled(Tiny()), "plain": Tiny()}
    for name, saved in parts.items():
        whole_model = nn.Module()
        whole_model.add_module("inner", saved)
        folder_path = f"{path}/{name}"
        save_checkpoint(folder_path, whole_model)
        holder = nn.Module()
        holder.add_module("inner", model)
        load_checkpoint(folder_path, holder)
        expected = {k.replace("_orig_mod.", ""): v for k, v in saved.state_dict().items()}
        for key, value in model.state_dict().items():
            assert torch.equal(value, expected[key]), key
        # torch's reader, which does not know which names are tied, finds each name.
        state = {"model": {f"inner.{k}": torch.zeros_like(v) for k, v in expected.items()}}
        assert "inner.head.weight" in state["model"]
        dcp.load(state, checkpoint_id=folder_path)
        for key, value in expected.items():
            assert torch.equal(state["model"][f"inner.{key}"], value), key
    wrapper = Wrapper(nn.Linear(3, 11))
    save_checkpoint(f"{path}/wrapper", wrapper)
    other = Wrapper(nn.Linear(3, 11))
    load_checkpoint(f"{path}/wrapper", other)
    assert torch.equal(other.head.weight, wrapper.head.weight)
    untied = Tiny()
    untied.head.weight = nn.Parameter(torch.ones(11, 5))
    save_checkpoint(f"{path}/tied", Tiny())
    load_checkpoint(f"{path}/tied", untied)
    assert torch.equal(untied.head.weight, untied.embed.weight)
    untied.head.weight.data.add_(1)
    save_checkpoint(f"{path}/untied", untied)
    with pytest.raises(RuntimeError, match=r"head\.weight and embed\.weight are one tensor in the"):
        load_checkpoint(f"{path}/untied", Tiny())
    return True


def test_names_are_the_unwrapped_modules_and_tied_tensors_keep_all_names():
    assert all(run_on_shared_ranks(save_under_every_name, 2))


class Scaled(nn.Module):
    """A model whose only child is called `module`, or `model` beside a parameter."""

    def __init__(self, name, model):
        super().__init__()
        self.add_module(name, model)
        if name == "model":
            self.scale = nn.Parameter(torch.ones(3))


def save_in_other_modules():
    """Save and load sharded models within other modules, and modules that are sharded in part."""
    path = case_folder()

    def build(kind, seed):
        torch.manual_seed(seed)
        model = make(seed)
        if kind == "outer":
            return Scaled("model", FSDP(model))
        if kind == "inner":
            return FSDP(Scaled("module", model))
        if kind == "parts":
            fully_shard(model[0])
            fully_shard(model[3])
        return model if kind == "parts" else Scaled("module", model)

    for kind, other in (("outer", "outer"), ("inner", "plain"), ("plain", "inner"), ("parts",) * 2):
        saved, loaded = build(kind, 0), build(other, 1)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (saved, loaded)]
        inputs = draw_batch(0, 0)
        for module in saved.modules():
            if isinstance(module, nn.Sequential):
                module(inputs).square().sum().backward()
        optimizers[0].step()
        save_checkpoint(f"{path}/{kind}", saved, optimizers[0])
        load_checkpoint(f"{path}/{kind}", loaded, optimizers[1])
        for ours, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
            both = [getattr(p, "full_tensor", p.detach)().detach() for p in (ours, theirs)]
            assert torch.equal(*both), kind
    return True


def test_models_within_other_modules_are_saved_and_loaded():
    assert all(run_on_shared_ranks(save_in_other_modules, 2))


def save_compiled_models():
    """Save and load models that torch.compile wraps, one of which is sharded."""
    path = case_folder()
    model, optimizer = build_plain(3, 0)
    save_checkpoint(path, wrap_as_compiled(model), optimizer)
    other, _ = build_plain(0, 1)
    load_checkpoint(path, wrap_as_compiled(other))
    return all(torch.equal(v, other.state_dict()[k]) for k, v in model.gather_full_params().items())


def test_a_compiled_model_is_saved_and_loaded():
    assert all(run_on_shared_ranks(save_compiled_models, 2))


def save_beside_others(folder):
    """Save twice to a folder with other files, through a symbolic link."""
    model, optimizer, *_ = build_pair()
    model(draw_batch(0, dist.get_rank())).sum().backward()
    optimizer.step()
    folder_path = Path(folder)
    for _ in range(2):
        save_checkpoint(folder_path / "runs/now", model)
    load_checkpoint(folder_path / "runs/now", model)
    with pytest.raises(RuntimeError, match="is a file: choose a folder"):
        save_checkpoint(folder_path / "real/notes.txt", model)
    return True


def test_other_programs_files_and_symbolic_links_are_kept(tmp_path):
    folder = tmp_path / "real"
    folder.mkdir()
    (tmp_path / "runs").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "loss.png").write_bytes(b"png")
    (folder / "latest").symlink_to("plots")
    (tmp_path / "runs" / "now").symlink_to("../real")
    assert all(run_on_shared_ranks(save_beside_others, 2, str(tmp_path), timeout=DEADLINE))
    assert (tmp_path / "runs" / "now").is_symlink()
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "plots" / "loss.png").read_bytes() == b"png"
    assert (folder / "latest").readlink() == Path("plots")
    assert {path.name for path in tmp_path.iterdir()} == {"real", "runs"}


def continue_in_another_dtype():
    path = case_folder()
    model, optimizer, *_ = build_pair(3)
    compute_mean_square(model, draw_batch(0, dist.get_rank())).backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer)
    values = model.gather_full_params()
    whole = get_optimizer_state_dict(model.module, optimizer, options=FULL)["state"]
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (1, 3):
            other, other_optimizer, *_ = build_pair(
                stage, build=lambda dtype=dtype: make(1).to(dtype)
            )
            load_checkpoint(path, other, other_optimizer)
            assert_alike(other, cast(values, dtype), rtol=0, atol=0)
            module = other.module if stage == 3 else other
            state = get_optimizer_state_dict(module, other_optimizer, options=FULL)["state"]
            for name, entry in whole.items():
                for key in ("exp_avg", "exp_avg_sq"):
                    assert state[name][key].dtype == dtype
                    assert torch.equal(state[name][key], entry[key].to(dtype))
                assert state[name]["step"] == entry["step"]
            step_as_one_process(other, other_optimizer, values, whole, dtype)
    return True


def step_as_one_process(model, optimizer, values, states, dtype):
    """Step a resumed model, and compare one process that starts from the same values and state."""
    twin = cast(values, dtype)
    theirs = torch.optim.AdamW(twin.named_parameters(), lr=0.1)
    for name, parameter in twin.named_parameters():
        theirs.state[parameter] = {
            key: value.to(dtype) if value.dim() else value.clone()
            for key, value in states[name].items()
        }
    inputs = draw_batch(1, 0).to(dtype)
    for module, stepped in ((model, optimizer), (twin, theirs)):
        compute_mean_square(module, inputs).backward()
        stepped.step()
    # A bfloat16 has eight significant bits.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert_alike(model, twin, rtol=tolerance, atol=tolerance)


def cast(values, dtype):
    module = make().to(dtype)
    module.load_state_dict(values)
    return module


def test_training_continues_in_another_dtype():
    assert all(run_on_shared_ranks(continue_in_another_dtype, 2))


class Averaging(torch.optim.Optimizer):
    """An optimizer with a float32 average of gradients in any dtype."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["average"].lerp_(parameter.grad.float(), 0.1)
                parameter.sub_(state["average"].to(parameter.dtype), alpha=group["lr"])


def resume_state_of_another_dtype():
    """Continue after a load as without it, with float32 state of bfloat16 parameters."""
    path = case_folder()
    for stage, resumed_stage in ((1, 3), (3, 1)):
        folder = f"{path}-{stage}"
        model, optimizer = build_bfloat16(stage)
        train_bfloat16(model, optimizer, range(2))
        save_checkpoint(folder, model, optimizer)
        train_bfloat16(model, optimizer, range(2, 4))
        resumed, resumed_optimizer = build_bfloat16(resumed_stage)
        load_checkpoint(folder, resumed, resumed_optimizer)
        train_bfloat16(resumed, resumed_optimizer, range(2, 4))
        expected = get_full_values(model)
        for name, value in get_full_values(resumed).items():
            assert torch.equal(value, expected[name]), (stage, name)
    return True


def build_bfloat16(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()
    if stage == 1:
        return model, ShardedOptimizer(model.parameters(), Averaging)
    model = FSDP(model)
    return model, Averaging(model.parameters())


def train_bfloat16(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 5, generator=generator).bfloat16()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def get_full_values(model):
    if isinstance(model, FSDP):
        return model.gather_full_params()
    return {name: value.detach() for name, value in model.named_parameters()}


def test_state_of_another_dtype_than_its_parameter_is_resumed_exactly():
    assert all(run_on_shared_ranks(resume_state_of_another_dtype, 2))


def save_before_the_first_step():
    """Save and load state that an optimizer creates when it is constructed."""
    path = case_folder()
    for stage in (1, 3):
        folder = f"{path}-{stage}"
        model, optimizer, *_ = build_pair(stage, "Adagrad", initial_accumulator_value=0.5)
        save_checkpoint(folder, model, optimizer)
        resumed, ours, twin, theirs = build_pair(stage, "Adagrad")
        load_checkpoint(folder, resumed, ours)
        theirs = torch.optim.Adagrad(twin.parameters(), lr=0.1, initial_accumulator_value=0.5)
        train_alike(resumed, ours, twin, theirs, compute_mean_square, steps=2)
    return True


def test_state_that_an_optimizer_creates_in_its_constructor_is_saved():
    assert all(run_on_shared_ranks(save_before_the_first_step, 2))
