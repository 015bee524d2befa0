"""Weights and checkpoints are exchanged with other programs."""

import copy
import itertools
import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from worker_pool import run_ranks, try_ranks

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import (
    FSDP,
    ShardedOptimizer,
    diagnostics,
    load_checkpoint,
    save_checkpoint,
)
from zero.checkpoint.ownership import unwrap
from zero.checkpoint.storage import open_folder

save_file = pytest.importorskip("safetensors.torch", reason="the format's own writer").save_file

DEADLINE = 300.0


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def wrap(model, stage, **options):
    if stage == 3:
        model = FSDP(model)
        return model, torch.optim.AdamW(model.parameters(), **options)
    if stage == 0:
        return model, torch.optim.AdamW(model.parameters(), **options)
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)


def gather_state(model):
    if isinstance(model, FSDP):
        return model.gather_full_params() | dict(model.module.named_buffers())
    return model.state_dict()


def take_step(model, optimizer):
    model(torch.ones(4, 5) + torch.arange(4)[:, None]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def are_same(ours, theirs):
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


FORMS = {
    "nested": lambda m, o, s: {"app": {"model": m, "optim": o}, "step": 5},
    "flat": lambda m, o, s: {"model": m, "optim": o, "step": 5},
    "numbers": lambda m, o, s: {"model": s[0], "optimizer": s[1], "step": 5},
}


#: The stages into which `make test` loads each form.
STAGES = {"nested": (0, 1, 3), "flat": (3,), "numbers": (1,)}


def read_torch_checkpoints():
    """Load each form in which torch's users save, and continue training."""
    folder = case_folder()
    for form, put in FORMS.items():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        take_step(model, optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        states = get_state_dict(model, optimizer, options=options)
        plain = model.state_dict(), optimizer.state_dict()
        dcp.save(put(*states, plain), checkpoint_id=f"{folder}/{form}")
        take_step(model, optimizer)
        for stage in STAGES[form]:
            ours, resumed = wrap(make(1), stage, lr=0.1)
            assert load_checkpoint(f"{folder}/{form}", ours, resumed) == {"step": 5}
            assert resumed.param_groups[0]["lr"] == 0.05
            take_step(ours, resumed)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(gather_state(ours)[name], value)
    return True


def test_checkpoints_that_torch_wrote_are_resumed_at_any_stage():
    assert all(run_on_shared_ranks(read_torch_checkpoints, 2))


class Wrapped(nn.Module):
    """A model whose parameters' names contain the names of parts of a checkpoint."""

    def __init__(self, name, inner):
        super().__init__()
        self.add_module(name, inner)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(next(iter(self.children()))(x))


CONFUSING = {
    "model": lambda seed: Wrapped("model", make(seed)),
    "state": lambda seed: Wrapped("state", make(seed)),
    "optimizer": lambda seed: Wrapped("optimizer", nn.Sequential(Wrapped("state", make(seed)),
                                                                 nn.Linear(2, 3))),
    "param_groups": lambda seed: Wrapped("param_groups", make(seed)),
}  # fmt: skip


SOME = [
    ("model", "nested"),
    ("model", "flat"),
    ("state", "flat"),
    ("optimizer", "numbers"),
    ("optimizer", "flat"),
    ("param_groups", "flat"),
]


def read_confusing_names(combinations, stages):
    """Load a model whose names resemble parts of a checkpoint: every state must be found."""
    folder = case_folder()
    for kind, form in combinations:
        build = CONFUSING[kind]
        put = FORMS[form]
        model = build(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        take_step(model, optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        states = get_state_dict(model, optimizer, options=options)
        plain = model.state_dict(), optimizer.state_dict()
        path = f"{folder}/{kind}-{form}"
        dcp.save(put(*states, plain), checkpoint_id=path)
        take_step(model, optimizer)
        for stage in stages:
            ours, resumed = wrap(build(1), stage, lr=0.1)
            assert load_checkpoint(path, ours, resumed) == {"step": 5}
            take_step(ours, resumed)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(gather_state(ours)[name], value)
    return True


@pytest.mark.parametrize(
    ("combinations", "stages"),
    [
        pytest.param(SOME, (3,), id="some"),
        pytest.param(
            [*itertools.product(CONFUSING, FORMS)],
            (0, 1, 3),
            id="all",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_names_that_resemble_parts_of_a_checkpoint_are_loaded(combinations, stages):
    assert all(run_on_shared_ranks(read_confusing_names, 1, combinations, stages))


def list_averages(optimizer):
    return [optimizer.state[p]["exp_avg"] for g in optimizer.param_groups for p in g["params"]]


def train_numbered_parameters(order=(0, 1, 2), seed=0):
    """Step parameters whose names are numbers, in another order in the optimizer."""
    torch.manual_seed(seed)
    model = nn.ParameterList([nn.Parameter(torch.randn(2, 2)) for _ in range(3)])
    optimizer = torch.optim.AdamW([model[i] for i in order])
    sum((i + 1) * p.sum() for i, p in enumerate(model)).backward()
    optimizer.step()
    return model, optimizer


def read_numbers():
    """Load states by numbers as names, numbers as positions, tied names and listed names."""
    folder = case_folder()
    model, optimizer = train_numbered_parameters((2, 0, 1))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/names")
    # A list that is rebuilt for each entry would make a load quadratic in their number.
    opened = open_folder(Path(folder, "names"))
    assert opened.tensors is opened.tensors
    assert opened.objects is opened.objects
    plain = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(plain, checkpoint_id=f"{folder}/positions")
    save_checkpoint(f"{folder}/ours", model, optimizer)
    for path in ("names", "positions", "ours"):
        ours, resumed = train_numbered_parameters((2, 0, 1), seed=1)
        resumed.state.clear()
        load_checkpoint(f"{folder}/{path}", ours, resumed)
        assert are_same(
            dict(enumerate(list_averages(resumed))), dict(enumerate(list_averages(optimizer)))
        )
    # A group that lists names beside its numbers is matched by the names, in any order.
    model = make()
    optimizer = torch.optim.AdamW(model.named_parameters())
    take_step(model, optimizer)
    plain = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(plain, checkpoint_id=f"{folder}/listed")
    ours = make(1)
    resumed = torch.optim.AdamW(list(ours.parameters())[::-1])
    load_checkpoint(f"{folder}/listed", ours, resumed)
    for a, b in zip(list_averages(optimizer), list_averages(resumed)[::-1], strict=True):
        torch.testing.assert_close(a, b)
    # The names are those of a wrapper.
    wrapper = nn.Module()
    wrapper.module = model
    wrapped = torch.optim.AdamW(wrapper.named_parameters())
    wrapped.load_state_dict(optimizer.state_dict())
    plain = {"model": wrapper.state_dict(), "optim": wrapped.state_dict()}
    dcp.save(plain, checkpoint_id=f"{folder}/wrapped")
    resumed = torch.optim.AdamW(ours.parameters())
    load_checkpoint(f"{folder}/wrapped", ours, resumed)
    for a, b in zip(list_averages(optimizer), list_averages(resumed), strict=True):
        torch.testing.assert_close(a, b)
    # The state of a tied tensor under its second name.
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    average = torch.randn(3, 3)
    state = {"step": torch.tensor(1.0), "exp_avg": average, "exp_avg_sq": average.square()}
    optim = {"state": {"1.weight": state}, "param_groups": [{"params": ["1.weight"], "lr": 0.5}]}
    dcp.save({"model": tied.state_dict(), "optim": optim}, checkpoint_id=f"{folder}/tied")
    resumed = torch.optim.AdamW(tied.parameters())
    load_checkpoint(f"{folder}/tied", tied, resumed)
    assert torch.equal(list_averages(resumed)[0], average)
    assert resumed.param_groups[0]["lr"] == 0.5
    return True


def test_states_are_matched_by_names_numbers_and_tied_names():
    assert all(run_on_shared_ranks(read_numbers, 1))


def refuse_uncertain_states():
    """Check that state which cannot be matched with certainty is refused."""
    folder = case_folder()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    take_step(model, optimizer)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))

    def load(content, name, **options):
        dcp.save(content, checkpoint_id=f"{folder}/{name}")
        ours, resumed = wrap(make(1), 1, lr=0.1)
        load_checkpoint(f"{folder}/{name}", ours)
        load_checkpoint(f"{folder}/{name}", ours, resumed, **options)
        return resumed

    with pytest.raises(RuntimeError, match=r"has 2 optimizers, under 'more\.', 'optim\.'"):
        load({**states, "more": states["optim"]}, "two")
    strange = {f"other.{name}": value for name, value in states["optim"]["state"].items()}
    mixed = {**states["optim"], "state": {**states["optim"]["state"], **strange}}
    with pytest.raises(RuntimeError, match=r"got .*other\..* and 17 more: load into"):
        load({**states, "optim": mixed}, "foreign")
    with pytest.warns(UserWarning, match="state of parameters not in the model"):
        load({**states, "optim": mixed}, "left-out", strict=False)
    two = torch.optim.AdamW([{"params": list(model.parameters())[:2]},
                             {"params": list(model.parameters())[2:], "lr": 0.5}])  # fmt: skip
    take_step(model, two)
    flat = get_state_dict(model, two, options=StateDictOptions(flatten_optimizer_state_dict=True))
    with pytest.raises(RuntimeError, match="different options in the checkpoint"):
        load(dict(zip(("model", "optim"), flat, strict=True)), "grouped")
    return True


def load_into_other_groups():
    """Load one group into two groups, which have equal options but share no tensor."""
    folder = case_folder()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), foreach=False)
    take_step(model, optimizer)
    save_checkpoint(folder, model, optimizer)
    parameters = list(model.parameters())
    groups = [{"params": parameters[2:]}, {"params": parameters[:2]}]
    resumed = torch.optim.AdamW(groups, lr=1.0)
    load_checkpoint(folder, model, resumed)
    rates = [group["lr"] for group in resumed.param_groups]
    assert rates[0] is not rates[1]
    assert rates == [torch.tensor(0.05)] * 2
    for parameter in parameters:
        expected = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(resumed.state[parameter]["exp_avg"], expected)
    return True


def test_groups_with_equal_options_can_be_divided():
    assert all(run_on_shared_ranks(load_into_other_groups, 1))


def test_states_that_cannot_be_matched_are_refused():
    assert all(run_on_shared_ranks(refuse_uncertain_states, 1))


def load_one_of_two_models():
    """Load a file in which two prefixes fit by `prefix=`, and one with a single prefix."""
    folder = case_folder()
    state = make().state_dict()
    dcp.save({"ema": state, "live": make(1).state_dict()}, checkpoint_id=f"{folder}/two")
    dcp.save({"app": {"net": make(1).state_dict()}}, checkpoint_id=f"{folder}/usual")
    model = make(2)
    with pytest.raises(RuntimeError, match=r"got 'ema\.' and 'live\.': pass prefix="):
        load_checkpoint(f"{folder}/two", model)
    load_checkpoint(f"{folder}/two", model, prefix="ema.")
    assert are_same(model.state_dict(), state)
    load_checkpoint(f"{folder}/usual", model)
    assert are_same(model.state_dict(), make(1).state_dict())
    longer = nn.Sequential(*make(2), nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"3\.bias and 1 more is in the model, not in the che"):
        load_checkpoint(f"{folder}/usual", longer)
    shorter = make(2)[:2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint(f"{folder}/usual", longer, strict=False)
        load_checkpoint(f"{folder}/usual", shorter, strict=False)
    assert [str(w.message) for w in caught if "in the" in str(w.message)] == [
        "3.bias, 3.weight: in the model, not in the checkpoint",
        "2.bias, 2.weight: in the checkpoint only",
    ]
    assert are_same(longer.state_dict(), make(1).state_dict())
    with pytest.raises(RuntimeError, match="has no optimizer"):
        load_checkpoint(f"{folder}/usual", *wrap(make(), 1, lr=0.1))
    save_checkpoint(f"{folder}/model", make(1))
    Path(folder, "weights").mkdir()
    save_file(make(1).state_dict(), f"{folder}/weights/model.safetensors")
    for name in ("usual", "model", "weights"):
        model, optimizer = wrap(make(2), 1, lr=0.1)
        take_step(model, optimizer)
        steps = [state["step"].clone() for state in optimizer.inner.state.values()]
        with pytest.warns(UserWarning, match="has no optimizer, so its state is unchanged"):
            load_checkpoint(f"{folder}/{name}", model, optimizer, strict=False)
        assert are_same(gather_state(model), make(1).state_dict())
        assert [state["step"] for state in optimizer.inner.state.values()] == steps
    return True


def test_prefixes_are_found_and_mismatches_are_reported():
    assert all(run_on_shared_ranks(load_one_of_two_models, 1))


def choose_between_prefixes():
    """Load a file in which several prefixes fit, only if a single one can be meant."""
    folder = case_folder()

    def without(state, *names):
        return {name: value for name, value in state.items() if name not in names}

    def load(content, model, **options):
        path = f"{folder}/{len(os.listdir(folder))}"
        dcp.save(content, checkpoint_id=path)
        load_checkpoint(path, model, **options)
        return model

    first, second = make(1).state_dict(), make(2).state_dict()
    nested = {f"ema.{name}": value for name, value in first.items()}
    uncertain = [
        ({"ema": first, "model": second}, {}),
        ({"ema": first, "model": without(second, "2.bias")}, {}),
        ({"model": {**without(second, "2.bias"), **nested}}, {}),
        (
            {"ema": without(first, "2.bias"), "live": without(second, "2.bias", "2.weight")},
            {"strict": False},
        ),
    ]
    for content, options in uncertain:
        with pytest.raises(RuntimeError, match=r"expected one prefix .*: pass prefix="):
            load(content, make(), **options)
    # A part of the model has the same names as the model.
    outer = Wrapped("0", nn.Sequential(nn.Linear(5, 3)))
    whole = load({"net": outer.state_dict()}, Wrapped("0", nn.Sequential(nn.Linear(5, 3))))
    assert are_same(whole.state_dict(), outer.state_dict())
    both = Wrapped("head", nn.Identity())
    both.register_parameter("weight", nn.Parameter(torch.zeros(2, 3)))
    with pytest.raises(RuntimeError, match="pass prefix="):
        load({"head.weight": torch.ones(2, 3)}, both, strict=False)
    return True


def test_a_prefix_is_inferred_only_if_no_other_can_be_meant():
    assert all(run_on_shared_ranks(choose_between_prefixes, 1))


def load_torch_files():
    """Files of torch.save are refused with the call that loads them, which works at stage 3."""
    folder = case_folder()
    file = Path(folder, "weights.pt")
    torch.save(make().state_dict(), file)
    # The cache of Hugging Face has links to files whose names have no suffix.
    snapshot = Path(folder, "snapshot")
    snapshot.mkdir()
    link = snapshot / "pytorch_model.bin"
    link.symlink_to(file.rename(Path(folder, "blob")))
    for path in (snapshot, link):
        with pytest.raises(RuntimeError, match=r"module\.load_state_dict\(torch\.load"):
            load_checkpoint(path, make(1))
    model = FSDP(make(1))
    model.module.load_state_dict(torch.load(link, mmap=True))
    return are_same(gather_state(model), make().state_dict())


def load_shards_of_hugging_face_files():
    """Load the files of torch's writer for Hugging Face, which must be consolidated."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    folder = case_folder()
    # torch's consolidation fails for integers, such as the buffers of a batch norm (torch 2.15).
    model = FSDP(nn.Linear(5, 4))
    expected = gather_state(model)
    for name, consolidates in (("shards", False), ("whole", True)):
        writer = HuggingFaceStorageWriter(
            f"{folder}/{name}", save_distributed=True, enable_consolidation=consolidates
        )
        dcp.save(model.state_dict(), storage_writer=writer)
        dist.barrier()
    with pytest.raises(RuntimeError, match=r"got a shard of .* enable_consolidation=True"):
        load_checkpoint(f"{folder}/shards", FSDP(nn.Linear(5, 4)))
    restored = FSDP(nn.Linear(5, 4))
    load_checkpoint(f"{folder}/whole", restored)
    return are_same(gather_state(restored), expected)


def test_shards_of_hugging_face_files_are_refused_until_they_are_consolidated():
    assert all(run_on_shared_ranks(load_shards_of_hugging_face_files, 2))


def load_scaled_weights():
    """Load weights in float8, which are refused if the file has scales for them."""
    folder = case_folder()
    tensors = make().state_dict()
    tensors["0.weight"] = tensors["0.weight"].to(torch.float8_e4m3fn)
    if dist.get_rank() == 0:
        save_file(tensors, f"{folder}/cast.safetensors")
        save_file(tensors | {"0.weight_scale_inv": torch.ones(1)}, f"{folder}/scaled.safetensors")
    dist.barrier()
    model = FSDP(make(1))
    before = gather_state(model)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"scales in 0.weight_scale_inv: convert"):
            load_checkpoint(f"{folder}/scaled.safetensors", model, strict=strict)
    assert are_same(gather_state(model), before)
    load_checkpoint(f"{folder}/cast.safetensors", model)
    return are_same(gather_state(model), tensors | {"0.weight": tensors["0.weight"].float()})


def test_float8_weights_with_scales_are_refused():
    assert all(run_on_shared_ranks(load_scaled_weights, 2))


def test_torchs_files_of_weights_are_refused():
    assert all(run_on_shared_ranks(load_torch_files, 1))


def read_back(stage):
    """Load safetensors at a stage; a sharded model starts on the meta device."""
    folder = case_folder()
    if dist.get_rank() == 0:
        write_two_files(Path(folder))
    dist.barrier()
    if stage == 3:
        with torch.device("meta"):
            model = make()
        model = FSDP(model, device="cpu")
    else:
        model = make(1)
    load_checkpoint(folder, model)
    by_index = make(1)
    load_checkpoint(Path(folder, "model.safetensors.index.json"), by_index)
    expected = make().state_dict()
    return are_same(gather_state(model), expected) and are_same(by_index.state_dict(), expected)


def write_two_files(folder):
    """Write the weights of `make()` into two safetensors files with an index."""
    state = make().state_dict()
    names = list(state)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 2)])
def test_safetensors_are_read_at_any_stage_and_world(stage, world):
    assert all(run_on_shared_ranks(read_back, world, stage))


def damage():
    """Damage a safetensors file; return the errors for truncated and overwritten contents.

    The format has no checksums, so only sizes, offsets and the header reveal damage.
    """
    path = case_folder()
    file = Path(path) / "model.safetensors"
    save_file(make().state_dict(), file)
    messages = []
    good = file.read_bytes()
    for bad in (good[:-1], good[:20], b"", b"\xff" * 64):
        file.write_bytes(bad)
        with pytest.raises(RuntimeError) as error:
            load_checkpoint(path, make(1))
        messages.append(str(error.value))
    size = int.from_bytes(good[:8], "little")
    offsets = json.loads(good[8 : 8 + size])["0.weight"]["data_offsets"]
    moved = [str([offset - 4 for offset in offsets]), str([offset + 4 for offset in offsets])]
    for change in moved:
        old = str(offsets).replace(" ", "").encode()
        text = good[8 : 8 + size].replace(old, change.replace(" ", "").encode())
        file.write_bytes(len(text).to_bytes(8, "little") + text + good[8 + size :] + b"\0" * 8)
        with pytest.raises(RuntimeError, match=r"model\.safetensors is damaged"):
            load_checkpoint(path, make(1))
    file.write_bytes(good + b"\0")
    with pytest.raises(RuntimeError, match=r"model\.safetensors is damaged"):
        load_checkpoint(path, make(1))
    file.write_bytes(good)
    load_checkpoint(path, make(1))
    second = Path(path) / "other.safetensors"
    second.write_bytes(good)
    with pytest.raises(RuntimeError, match=r"is in two files of .*: keep one"):
        load_checkpoint(path, make(1))
    second.unlink()
    index = {"weight_map": {"0.weight": "other.safetensors"}}
    (Path(path) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=r"other\.safetensors is missing"):
        load_checkpoint(path, make(1))
    return messages


def test_damaged_safetensors_are_named():
    for message in run_on_shared_ranks(damage, 1)[0]:
        assert "model.safetensors is damaged" in message


def load_as_bfloat16():
    file = Path(case_folder(), "half.safetensors")
    if dist.get_rank() == 0:
        save_file(make().bfloat16().state_dict(), file)
    dist.barrier()
    other = FSDP(make(1))
    load_checkpoint(file, other)
    return all(
        torch.equal(value, make().state_dict()[name].bfloat16().float())
        for name, value in other.gather_full_params().items()
    )


def test_half_precision_is_loaded_in_the_models_dtype():
    assert all(run_on_shared_ranks(load_as_bfloat16, 2))


def refuse_other_formats():
    """Load folders with the files of DeepSpeed's and Megatron's checkpoints."""
    folder = case_folder()
    step = Path(folder, "deepspeed", "global_step10")
    megatron = Path(folder, "megatron")
    if dist.get_rank() == 0:
        step.mkdir(parents=True)
        torch.save({"module": make().state_dict()}, step / "mp_rank_00_model_states.pt")
        partition = {"optimizer_state_dict": {"fp32_flat_groups": [torch.zeros(8)]}}
        torch.save(partition, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        (step.parent / "latest").write_text("global_step10")
        dcp.save({"model.decoder.weight": torch.zeros(2)}, checkpoint_id=megatron, no_dist=True)
        torch.save({"iteration": 10}, megatron / "common.pt")
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (megatron / "metadata.json").write_text(json.dumps(backend))
    dist.barrier()
    for path, tool in (
        (step, "zero_to_fp32"),
        (step.parent, "zero_to_fp32"),
        (megatron, "convert"),
    ):
        with pytest.raises(RuntimeError, match=rf"{tool}\.py"):
            load_checkpoint(path, make())
    return True


def test_checkpoints_of_deepspeed_and_megatron_are_refused_with_the_tool_that_converts():
    assert all(run_on_shared_ranks(refuse_other_formats, 2))


class Buffers(nn.Module):
    """A layer, and a buffer of each dtype of the format."""

    def __init__(self, fill=0):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        dtypes = {*sys.modules["safetensors.torch"]._TYPES.values(), torch.float8_e8m0fnu}
        for dtype in sorted(dtypes, key=str):
            values = torch.full((4 * dtype.itemsize,), fill, dtype=torch.uint8)
            self.register_buffer(f"buffer_{dtype}".replace(".", "_"), values.view(dtype))


def exchange_every_dtype():
    """Exchange tensors of every dtype with the format's reference implementation."""
    folder = case_folder()
    import safetensors.torch

    theirs = Buffers(fill=1)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(theirs.state_dict(), f"{folder}/theirs.safetensors")
        packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        safetensors.torch.save_file({"weight": packed}, f"{folder}/packed.safetensors")
    dist.barrier()
    ours = Buffers()
    load_checkpoint(f"{folder}/theirs.safetensors", ours)
    for name, value in theirs.state_dict().items():
        other = ours.state_dict()[name]
        assert other.dtype == value.dtype, name
        assert torch.equal(other.view(torch.uint8), value.view(torch.uint8)), name
    with pytest.raises(RuntimeError, match=r"whole bytes per element, got .*float4.* for weight"):
        load_checkpoint(f"{folder}/packed.safetensors", nn.Linear(4, 1))
    counts = nn.Module()
    counts.register_buffer("count", torch.zeros(2, dtype=torch.int8))
    if dist.get_rank() == 0:
        safetensors.torch.save_file({"count": torch.tensor([300, 1])}, f"{folder}/wide.safetensors")
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"torch.int64\) in the checkpoint"):
        load_checkpoint(f"{folder}/wide.safetensors", counts)
    rotated = {name: value * 1j for name, value in nn.Linear(3, 3).state_dict().items()}
    if dist.get_rank() == 0:
        safetensors.torch.save_file(rotated, f"{folder}/complex.safetensors")
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"torch.complex64\) in the checkpoint"):
        load_checkpoint(f"{folder}/complex.safetensors", nn.Linear(3, 3))
    return True


def test_every_dtype_of_safetensors_is_loaded_or_refused():
    pytest.importorskip("safetensors")
    assert all(run_on_shared_ranks(exchange_every_dtype, 2))


def measure_loading_peak(path, features):
    """Return the peak of memory while weights are loaded, above the memory before."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(features, features, bias=False) for _ in range(8)])
    model = FSDP(model, device="cpu", initialize=lambda module: None)
    Path("/proc/self/clear_refs").write_text("5")
    load_checkpoint(path, model)
    fields = dict(
        line.split(":")
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return (int(fields["VmHWM"].split()[0]) - int(fields["VmRSS"].split()[0])) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of this process")
def test_loading_needs_no_more_than_a_shard_and_a_tensor(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors' own writer")
    features = 1024
    tensors = {f"{i}.weight": torch.randn(features, features).half() for i in range(8)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    for more in run_ranks(measure_loading_peak, 2, str(tmp_path), features, timeout=DEADLINE):
        assert more <= features**2 * 4 + (1 << 24)


def load_hugging_face_file(path):
    transformers = pytest.importorskip("transformers", reason="transformers' own checkpoints")
    config = transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=51,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    if dist.get_rank() == 0:
        model.save_pretrained(f"{path}/theirs", max_shard_size="10KB")
    dist.barrier()
    ours = FSDP(transformers.LlamaForCausalLM(config))
    load_checkpoint(f"{path}/theirs", ours)
    whole = ours.gather_full_params()
    if dist.get_rank() == 0:
        ours.module.save_pretrained(f"{path}/ours", state_dict=whole)
        reloaded = transformers.LlamaForCausalLM.from_pretrained(f"{path}/ours")
        assert are_same(reloaded.state_dict(), model.state_dict())
    return True


@pytest.mark.exhaustive
def test_transformers_checkpoints_are_loaded_and_saved(tmp_path):
    assert all(run_ranks(load_hugging_face_file, 2, str(tmp_path), timeout=DEADLINE))


def die_after_the_rename(path):
    import zero.checkpoint.draft as draft

    model = make()
    # No other survivor sends a report that could be waited for.
    diagnostics.GRACE_SECONDS = 0.1
    if dist.get_rank() == 0:
        rename = draft.replace_folder
        draft.replace_folder = lambda *where: (rename(*where), os._exit(3))
    save_checkpoint(path, model)


def test_survivors_of_a_death_after_the_rename_report_the_save(tmp_path):
    outcomes = try_ranks(die_after_the_rename, 2, str(tmp_path / "last"), timeout=DEADLINE)
    assert "last was saved, but then:" in str(outcomes[1].error)
    assert run_ranks(load_it, 1, str(tmp_path / "last"), timeout=DEADLINE) == [True]


def load_it(path):
    model = make(1)
    load_checkpoint(path, model)
    return are_same(model.state_dict(), make().state_dict())


class Counter(nn.Module):
    """A module with a state that is neither a parameter nor a buffer."""

    def __init__(self, state):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.state = state

    def get_extra_state(self):
        return copy.deepcopy(self.state)

    def set_extra_state(self, state):
        self.state = state


def build_counters(*states):
    model = nn.Sequential(*map(Counter, states))
    model[0] = torch.compile(model[0], backend="eager")
    return model


def exchange_module_states():
    """Save and load states of modules: tensors, NaN, and nested values, under compiled names."""
    saved = [torch.tensor([3.0, torch.nan]), {"steps": 7, "scales": [torch.ones(2), 0.5]}, 5]
    path = case_folder()
    model = build_counters(*saved)
    model[2].layer.weight = model[1].layer.weight
    model[1].layer.weight.data[0, 0] = torch.nan
    save_checkpoint(f"{path}/own", model)
    state = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=f"{path}/torch")
    tensors = build_counters(torch.zeros(2))
    save_file({"0._extra_state": saved[0], "0.layer.weight": torch.ones(2, 2)}, f"{path}/file")
    with pytest.warns(UserWarning, match=r"0\.layer\.bias: in the model, not in the checkpoint"):
        load_checkpoint(f"{path}/file", tensors, strict=False)
    assert repr(tensors[0].state) == repr(saved[0])
    other = FSDP(build_counters(torch.zeros(2), {}, 0))
    assert not load_checkpoint(f"{path}/own", other)
    assert repr([module.state for module in unwrap(other)]) == repr(saved)
    with pytest.raises(RuntimeError, match=r"0\._extra_state and . more is in the checkpoint"):
        load_checkpoint(f"{path}/own", nn.Sequential(*(Plain() for _ in range(3))))
    # Only states that are tensors are loaded from folders of other programs.
    with pytest.raises(RuntimeError, match=r"1\._extra_state and . more is in the model, not in"):
        load_checkpoint(f"{path}/torch", build_counters(0, 0, 0))
    save_checkpoint(f"{path}/none", nn.Sequential(Plain()))
    with pytest.raises(RuntimeError, match=r"0\._extra_state is in the model, not in the"):
        load_checkpoint(f"{path}/none", build_counters(0))
    return True


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_states_of_modules_are_exchanged_or_reported_as_missing():
    assert all(run_on_shared_ranks(exchange_module_states, 2))


def save_strided_tensors():
    """Save and load parameters and buffers that are not contiguous."""
    path = case_folder()
    models = []
    for seed in range(2):
        model = make(seed)
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        model.register_buffer("table", torch.full((4, 3), float(seed)).t())
        models.append(model)
    save_checkpoint(path, models[0])
    load_checkpoint(path, models[1])
    return are_same(models[1].state_dict(), models[0].state_dict())


def test_non_contiguous_tensors_are_saved_and_loaded():
    assert all(run_on_shared_ranks(save_strided_tensors, 1))
