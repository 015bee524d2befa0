"""Random programs, sharded and in one process in float64: equal, or refused with the cause.

A program is drawn from its number: a model, an optimizer, a stage, a number of ranks, and what a
training loop does with them. Every rank runs it sharded, on its part of each batch, and unsharded,
on all parts. Many save on the way and resume at another stage on another number of ranks. Every
twentieth program trains a small model of a family of transformers.
"""

import copy
import gc
import random
import re
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from worker_pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import transformers_families
from zero import FSDP, ShardedOptimizer, load_checkpoint, save_checkpoint

WORLD = 3
#: These programs have each stage on two and on three ranks, and each kind of block, loss scaler and
#: clipping.
SAMPLE = (34, 52, 57, 97, 107, 114, 240, 275)
ALL, AT_ONCE = 10_000, 500
#: The number of programs per program that trains a model of a family of transformers.
PUBLISHED_EVERY = 20
GROUPS = {}
OPTIMIZERS = {
    "SGD": [{"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "nesterov": True}],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{}, {"foreach": True}, {"maximize": True}],
    "Adamax": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "Adagrad": [{}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
    "ASGD": [{}],
    "Adafactor": [{}],
    "Muon": [{}],
}


class Model(nn.Module):
    """A model of a few blocks that `draw` chooses."""

    def __init__(self, draw, name, turning):
        super().__init__()
        # Muon requires matrices, and Adafactor requires tensors with elements.
        matrices_only, empty = name == "Muon", name != "Adafactor"
        self.width = draw.choice([4, 5, 6])
        self.kinds = [
            draw.choice(["linear", "norm", "attention", "free", "scale", "read", "batchnorm"])
            for _ in range(draw.randint(1, 3))
        ]
        if matrices_only:
            self.kinds = [draw.choice(["linear", "free"]) for _ in self.kinds]
        bias = not matrices_only
        self.embed = nn.Embedding(7, self.width)
        self.blocks = nn.ModuleList()
        for kind in self.kinds:
            self.blocks.append(
                {
                    "linear": lambda: nn.Linear(self.width, self.width, bias=bias),
                    "norm": lambda: nn.LayerNorm(self.width),
                    "attention": lambda: nn.MultiheadAttention(
                        # Gradients of keys' biases are rounding errors, which Adam amplifies.
                        self.width,
                        1,
                        bias=False,
                        batch_first=True,
                    ),
                    "free": lambda: nn.Linear(self.width, self.width + 3, bias=False),
                    "scale": lambda: Scale(empty),
                    "read": lambda: nn.Linear(self.width, self.width, bias=bias),
                    "batchnorm": lambda: nn.BatchNorm1d(self.width, track_running_stats=False),
                }[kind]()
            )
        # Some steps or some ranks do not use this layer.
        self.spare = nn.Linear(self.width, self.width, bias=bias)
        self.head = nn.Linear(self.width, 7, bias=False)
        if draw.random() < 0.4:
            self.head.weight = self.embed.weight
        self.recompute = draw.random() < 0.3
        self.read_head = draw.random() < 0.3
        self.codes = None
        if draw.random() < 0.3:
            # Muon requires two dimensions.
            codes = torch.arange(6).view(2, 3) % 2
            kind = draw.choice([torch.bool, torch.uint8, torch.int16, torch.int64])
            self.codes = nn.Parameter(codes.to(kind), requires_grad=False)
        self.turn = Turn(self.width) if turning and draw.random() < 0.4 else None

    def forward(self, tokens, use_spare=False):
        x = self.embed(tokens)
        if self.codes is not None:
            x = x + 0.1 * self.codes.to(x.dtype).sum()
        if self.turn is not None:
            x = x + self.turn(x)
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            if self.recompute and torch.is_grad_enabled():
                x = x + checkpoint(self.apply_block, kind, block, x, use_reentrant=False)
            else:
                x = x + self.apply_block(kind, block, x)
        if use_spare:
            x = x + torch.tanh(self.spare(x))
        if self.read_head:
            return F.linear(x, self.head.weight)
        return self.head(x)

    def apply_block(self, kind, block, x):
        if kind == "attention":
            return block(x, x, x, need_weights=False)[0]
        if kind == "read":
            return torch.tanh(F.linear(x, block.weight))
        if kind == "free":
            return torch.tanh(block(x))[..., : self.width]
        if kind == "batchnorm":
            return block(x.mT).mT
        return torch.tanh(block(x))


class Scale(nn.Module):
    """A module with a scalar and a tensor without elements."""

    def __init__(self, empty):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0)) if empty else torch.zeros(0)

    def forward(self, x):
        return x * self.by + self.nothing.sum()


class Turn(nn.Module):
    """A module with a complex matrix."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex128))

    def forward(self, x):
        turned = x.to(torch.complex128) @ self.weight
        return torch.tanh(turned.real + turned.imag)


class Published(nn.Module):
    """A small model of a family of transformers, and a layer that some steps skip."""

    def __init__(self, name):
        super().__init__()
        self.kinds = [name]
        self.model = transformers_families.build(name)
        self.spare = nn.Linear(40, 40, bias=False)

    def forward(self, tokens, use_spare=False):
        masks = {"attention_mask": torch.ones_like(tokens)}
        if "t5" in self.kinds:
            masks["decoder_input_ids"] = tokens
        logits = self.model(input_ids=tokens, **masks).logits
        return logits + self.spare(logits) if use_spare else logits


#: Families whose default attention supports float64 on a CPU.
FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "gemma",
    "gemma2",
    "gptj",
    "mpt",
    "stablelm",
    "t5",
)


class Program:
    """A random program, which trains sharded and in one process and compares every step."""

    def __init__(self, number, folder, family=None):
        self.draw = random.Random(number)
        self.number, self.folder = number, folder
        self.family = family
        self.log = []
        self.hooked = False
        draw = self.draw
        self.name = draw.choice(list(OPTIMIZERS))
        self.options = {"lr": 0.05, **draw.choice(OPTIMIZERS[self.name])}
        self.ranks = draw.randint(1, WORLD)
        self.stage = self.draw_stage()
        self.grouped = draw.random() < 0.4
        self.clip = draw.choice([None, None, "torch", "ours", "value", "inf", "by hand"])
        self.scaling = draw.choice([None, None, "amp", "sharded"])
        self.seed = draw.randrange(1 << 30)
        if family:
            # These models compute norms in float32, and other optimizers amplify rounding errors.
            self.name = "SGD"
            self.options = {"lr": 0.05, **draw.choice(OPTIMIZERS["SGD"])}

    def draw_stage(self):
        return self.draw.choice([1, 2, 3])

    def run(self):
        self.group = self.new_group()
        torch.manual_seed(self.seed)
        self.twin = self.build()
        self.theirs = self.optimizer(self.twin)
        self.wrap(copy.deepcopy(self.twin))
        self.scalers = self.make_scaler(), self.make_scaler(plain=True)
        for step in range(self.draw.randint(2, 4)):
            self.step(step)
            self.compare(step)
            if self.draw.random() < 0.3:
                self.resume(step)
                self.compare(step)

    def build(self):
        if self.family:
            return Published(self.family).double()
        # Some optimizers, scalers and clipping of values do not support complex numbers.
        turning = (
            self.name not in ("Muon", "Adafactor")
            and self.scaling is None
            and self.clip in (None, "torch", "ours", "inf")
        )
        return Model(random.Random(self.seed), self.name, turning).double()

    def new_group(self):
        # All programs share one group per number of ranks.
        if self.ranks not in GROUPS:
            GROUPS[self.ranks] = dist.new_group(list(range(self.ranks)))
        return GROUPS[self.ranks]

    @property
    def has_part(self):
        return dist.get_rank() < self.ranks

    def groups(self, module):
        named = [(n.removeprefix("module."), p) for n, p in module.named_parameters()]
        if not self.grouped:
            return [p for _, p in named]
        some = [p for n, p in named if "blocks" in n]
        return [
            {"params": [p for n, p in named if "blocks" not in n], "weight_decay": 0.05},
            *([{"params": some, "lr": 0.02}] if some else []),
        ]

    def optimizer(self, module):
        return getattr(torch.optim, self.name)(self.groups(module), **self.options)

    def wrap(self, model):
        if not self.has_part:
            self.model = self.ours = None
            return
        if self.stage == 3:
            shard = "blocks"
            if not self.family:
                # Layers that the model reads without calling them belong to the root.
                called = {f"blocks.{i}" for i, kind in enumerate(model.kinds) if kind != "read"}
                if self.draw_same() < 0.7:
                    called.add("spare")

                def shard(name, _):
                    return name in called

            self.model = FSDP(model, group=self.group, shard=shard)
            self.ours = self.optimizer(self.model)
            return
        self.model = model
        self.ours = ShardedOptimizer(
            self.groups(model),
            getattr(torch.optim, self.name),
            group=self.group,
            shard_gradients=self.stage == 2,
            bucket_size_mb=[100 / 2**20, 400 / 2**20, 25][self.number % 3],
            **self.options,
        )

    def draw_same(self):
        """Draw a number that is equal on all ranks, including ranks that do not run the program."""
        return random.Random(self.seed + self.stage).random()

    def make_scaler(self, plain=False):
        if self.scaling is None or not (self.has_part or plain):
            return None
        options = {"init_scale": 256.0, "growth_interval": 2}
        if self.scaling == "sharded" and not plain:
            return ShardedGradScaler("cpu", process_group=self.group, **options)
        return torch.amp.GradScaler("cpu", **options)

    def both(self):
        ours = [(self.model, self.ours)] if self.has_part else []
        return [*ours, (self.twin, self.theirs)]

    def parameters(self, module):
        return {n.removeprefix("module."): p for n, p in module.named_parameters()}

    def loss(self, model, step, micro, rank, spare):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank + self.seed)
        tokens, targets = (torch.randint(7, (2, 3), generator=generator) for _ in range(2))
        loss = F.cross_entropy(model(tokens, use_spare=spare).flatten(0, 1), targets.flatten())
        return loss if self.draw_overflow(step) != rank else loss * float("inf")

    def draw_overflow(self, step):
        """Draw the rank whose gradients overflow in this step, or None."""
        if self.scaling is None:
            return None
        return random.Random(self.seed + step).choice([None, None, None, *range(self.ranks)])

    def step(self, step):
        draw = self.draw
        self.change_what_trains()
        micros = draw.randint(1, 3)
        synced = [draw.random() < 0.4 for _ in range(micros - 1)] + [True]
        spares = [[draw.random() < 0.5 for _ in range(WORLD)] for _ in range(micros)]
        if self.stage == 3:
            # Every FSDP needs the same layers on every rank.
            spares = [[row[0]] * WORLD for row in spares]
        together = draw.random() < 0.3
        abandoned = draw.choice(["optimizer", "model"]) if draw.random() < 0.1 else None
        if abandoned:
            self.abandon_backward(step, abandoned)
        if self.has_part:
            self.run_sharded_backwards(step, synced, spares, together)
        scale = self.scale_of(self.scalers[1])
        for micro in range(micros):
            for rank in range(self.ranks):
                loss = self.loss(self.twin, step, micro, rank, spares[micro][rank])
                scale(loss / self.ranks).backward()
        is_skipped = draw.random() < 0.1
        zero = draw.choice(["optimizer", "model", "zeros", "keep"])
        edit = draw.choice([None, None, "data", "in place", "none"])
        used = [row[: self.ranks] for row in spares]
        self.log.append((step, synced, used, together, is_skipped, zero, edit))
        for module, optimizer in self.both():
            if is_skipped:
                module.zero_grad()
                continue
            self.finish(module, optimizer, edit)
            clear_gradients(module, optimizer, zero)

    def abandon_backward(self, step, cleared):
        """Run a backward pass without synchronization, and clear its gradients."""
        self.log.append(("abandoned", cleared))
        for module, optimizer in self.both():
            context = nullcontext()
            if module is self.model:
                context = (module if self.stage == 3 else optimizer).no_sync()
            with context:
                self.loss(module, step, 8, dist.get_rank(), False).backward()
            (optimizer if cleared == "optimizer" else module).zero_grad()

    def run_sharded_backwards(self, step, synced, spares, together):
        """Run this rank's backward passes of a step; `together` adds the losses of several."""
        holder = self.model if self.stage == 3 else self.ours
        rank, scale = dist.get_rank(), self.scale_of(self.scalers[0])
        pending = 0.0
        for micro, sync in enumerate(synced):
            with nullcontext() if sync else holder.no_sync():
                loss = self.loss(self.model, step, micro, rank, spares[micro][rank])
                if together and sync and micro + 1 < len(synced):
                    pending = pending + loss
                else:
                    scale(loss + pending).backward()
                    pending = 0.0
        if draw_evaluation(self.seed, step):
            with torch.no_grad():
                self.loss(self.model, step, 7, rank, True)

    def scale_of(self, scaler):
        return (lambda loss: loss) if scaler is None else scaler.scale

    def finish(self, module, optimizer, edit):
        ours = module is self.model
        scaler = self.scalers[0 if ours else 1]
        parameters = self.parameters(module)
        if scaler is not None:
            scaler.unscale_(optimizer)
        edit_gradients(parameters, edit)
        # Every rank computes the norms of the same parameters, also of those with an empty shard.
        filled = {n for n, p in self.twin.named_parameters() if p.numel()}
        values = [p for n, p in parameters.items() if p.grad is not None and n in filled]
        if self.clip == "ours" and ours and self.stage < 3:
            optimizer.clip_grad_norm_(0.3)
        else:
            clip_gradients(values, self.clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def change_what_trains(self):
        draw = self.draw
        action = draw.choice([None, None, None, "freeze", "data", "move", "rate", "hook"])
        names = sorted(n for n, _ in self.twin.named_parameters() if n != "codes")
        chosen = {n for n in names if draw.random() < 0.5}
        self.log.append((action, sorted(chosen) if action == "freeze" else ""))
        for module, optimizer in self.both():
            parameters = self.parameters(module)
            if action == "rate":
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            for name in names:
                self.change_parameter(action, parameters[name], name in chosen, name)
        self.hooked = self.hooked or action == "hook"

    def change_parameter(self, action, parameter, is_chosen, name):
        if action == "freeze":
            parameter.requires_grad_(is_chosen or "embed" in name or "wte" in name)
        elif action == "data":
            parameter.data.mul_(0.9)
        elif action == "move":
            parameter.data = parameter.data.clone()
        elif action == "hook" and not self.hooked and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: None)

    def resume(self, step):
        """Save, and continue at another stage on another number of ranks."""
        path = f"{self.folder}/{self.number}-{step}"
        if self.has_part:
            save_checkpoint(path, self.model, self.ours, extra={"step": step}, group=self.group)
            for parameter in self.model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.data.add_(1.0)
                else:
                    parameter.data.zero_()
        dist.barrier()
        scale = self.scalers[1].state_dict() if self.scaling else None
        self.ranks, self.stage = self.draw.randint(1, WORLD), self.draw_stage()
        self.log.append(("resume", self.ranks, self.stage))
        self.group = self.new_group()
        torch.manual_seed(1)
        model = self.build()
        wanted = {n: p.requires_grad for n, p in self.twin.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted[name])
        self.wrap(model)
        if self.has_part:
            loaded = load_checkpoint(path, self.model, self.ours, group=self.group)
            assert loaded == {"step": step}
            rates = [group["lr"] for group in self.theirs.param_groups]
            assert [group["lr"] for group in self.ours.param_groups] == rates
        self.theirs.zero_grad()
        self.scalers = self.make_scaler(), self.make_scaler(plain=True)
        for scaler in self.scalers:
            if scaler is not None:
                scaler.load_state_dict(scale)
        self.hooked = True

    def looseness(self):
        """Return the factor by which the tolerance is larger for models of Hugging Face.

        These models compute norms, softmax and losses in float32 even if their weights are float64.
        In one process, three times the gradients of a third of the loss differ from the gradients
        of the loss by up to 2.3e-7 of the largest element, and momentum accumulates the
        differences.
        """
        return 100.0 if self.family else 1.0

    def compare(self, step):
        problem = ""
        if self.has_part:
            whole = self.parameters(self.model)
            if self.stage == 3:
                whole = self.model.gather_full_params()
            for name, value in self.twin.named_parameters():
                # Every other dtype can be cast to this one.
                ours, theirs = (v.detach().to(torch.complex128) for v in (whole[name], value))
                apart = (ours - theirs).abs() > self.looseness() * (1e-9 + 1e-7 * theirs.abs())
                if bool(apart.any()):
                    problem += f"step {step}, {name}: {whole[name].data} is not {value.data}; "
        everyone = [None] * WORLD
        dist.all_gather_object(everyone, problem)
        # All ranks fail together, so that no rank waits for another.
        assert not any(everyone), everyone


def clear_gradients(module, optimizer, zero):
    if zero == "optimizer":
        optimizer.zero_grad()
    elif zero == "model":
        module.zero_grad()
    elif zero == "zeros":
        optimizer.zero_grad(set_to_none=False)


def edit_gradients(parameters, edit):
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        if edit == "data":
            parameter.grad.data.mul_(0.5)
        elif edit == "in place":
            parameter.grad *= 2.0
        elif edit == "none" and "blocks" in name:
            parameter.grad = None


def clip_gradients(parameters, clip):
    if clip in ("torch", "ours"):
        nn.utils.clip_grad_norm_(parameters, 0.3)
    elif clip == "value":
        nn.utils.clip_grad_value_(parameters, 0.02)
    elif clip == "inf":
        nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=float("inf"))
    elif clip == "by hand":
        norm = sum(p.grad.pow(2).sum() for p in parameters) ** 0.5
        for parameter in parameters:
            parameter.grad.mul_(0.3 / (norm + 0.3))


def draw_evaluation(seed, step):
    return random.Random(seed + 17 * step).random() < 0.3


# The errors that a program may end with.
REFUSALS = ("after the backward pass on some ranks",)


def run_programs(numbers, folder, with_families):
    # Each new ShardedOptimizer collects garbage, which would visit all objects of torch.
    gc.freeze()
    refused, failures = 0, []
    for number in numbers:
        is_published = with_families and number % PUBLISHED_EVERY == PUBLISHED_EVERY - 1
        family = FAMILIES[number // PUBLISHED_EVERY % len(FAMILIES)] if is_published else None
        program = Program(number, folder, family)
        try:
            program.run()
        except Exception as error:
            if any(re.search(words, str(error)) for words in REFUSALS):
                refused += 1
                continue
            failures.append(
                f"program {number}: {program.name} {program.options} stage {program.stage} on "
                f"{program.ranks} ranks, clip {program.clip}, scaler {program.scaling}; "
                f"{getattr(getattr(program, 'twin', None), 'kinds', '')}; {program.log}\n"
                f"{traceback.format_exc()[-3000:]}"
            )
            if not isinstance(error, AssertionError):
                break
    assert not failures, "\n\n".join(failures)
    return refused


def test_random_programs_equal_one_process(tmp_path):
    # An import of transformers on each rank takes longer than all other programs.
    for refused in run_ranks(run_programs, WORLD, SAMPLE, str(tmp_path), False, timeout=600):
        assert refused <= len(SAMPLE) // 4


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, ALL, AT_ONCE))
def test_every_random_program_equals_one_process(tmp_path, first):
    pytest.importorskip("transformers", reason="models of transformers")
    numbers = range(first, first + AT_ONCE)
    for refused in run_ranks(run_programs, WORLD, numbers, str(tmp_path), True, timeout=7200):
        assert refused <= AT_ONCE // 4
