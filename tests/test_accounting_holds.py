"""The predictions of accounting agree with measurements of the other packages' code."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import accounting
import ddp
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zero
from accounting.memory.live import make_state, training_step_memory
from llmsys_suite.config import RunConfig
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.model import Decoder, ModelConfig, plain_attention
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.splits import split_model as splits
from llmsys_suite.stages.plan import describe_model, measure_peak_bytes, predict
from llmsys_suite.text.data import load_corpus
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from worker_pool import run_ranks

ROWS, CONTEXT = 8, 32
SHAPE = ModelConfig(d_model=32, d_ff=96, num_layers=4, num_heads=4, context=CONTEXT)
MODEL = accounting.Transformer(layers=4, d_model=32, heads=4, d_ff=96, vocab_size=256)
SINGLE_PRECISION = {"weights": "fp32", "gradients": "fp32", "activations": "fp32"}


@pytest.mark.parametrize(
    "size",
    [
        "tiny",
        *(
            pytest.param(size, marks=pytest.mark.exhaustive)
            for size in ("small", "medium", "large", "xl", "2.7B", "10B")
        ),
    ],
)
def test_parameters_and_flops_of_every_size_equal_torch_counts(size):
    config = RunConfig(size=size, rows=2, context=64)
    predicted = predict(config)
    with torch.device("meta"):
        # Plain attention, because a counter may not see into a fused kernel.
        model = Decoder(ModelConfig.from_size(size, context=64), plain_attention)
        tokens = torch.zeros(2, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.compute_loss(tokens, tokens).backward()
    assert predicted.parameters == sum(p.numel() for p in model.parameters())
    assert predicted.step_flops_full == counter.get_total_flops()


def measure_second_step_peak(config, attention, device, *, checkpointed, foreach=False):
    """Return the peak of live bytes in an AdamW step whose optimizer state exists already."""
    shape = replace(
        ModelConfig.from_size(config.size, context=config.context), checkpoint=checkpointed
    )
    with torch.device(device):
        model = Decoder(shape, attention)
        tokens = torch.zeros(config.rows, config.context, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    make_state(optimizer)
    return training_step_memory(
        model, lambda: model.compute_loss(tokens, tokens), optimizer
    ).peak_bytes


def predict_peak(config, *, checkpointed, **options):
    return accounting.peak_memory(
        describe_model(config),
        accounting.Plan(recompute="full" if checkpointed else "none"),
        batch=config.rows,
        seq=config.context,
        fused_norm=False,
        **options,
    ).total


@pytest.mark.parametrize(
    ("size", "rows", "context", "checkpointed"),
    [
        ("tiny", 2, 1024, False),
        ("tiny", 2, 1024, True),
        pytest.param("small", 4, 256, False, marks=pytest.mark.exhaustive),
        pytest.param("small", 4, 256, True, marks=pytest.mark.exhaustive),
        pytest.param("medium", 1, 64, False, marks=pytest.mark.exhaustive),
        pytest.param("large", 4, 256, True, marks=pytest.mark.exhaustive),
        pytest.param("2.7B", 1, 64, True, marks=pytest.mark.exhaustive),
        pytest.param("xl", 2, 1024, False, marks=pytest.mark.exhaustive),
        pytest.param("10B", 2, 1024, False, marks=pytest.mark.exhaustive),
    ],
)
def test_peak_memory_of_every_size_is_predicted_within_5_percent(size, rows, context, checkpointed):
    # The meta device allocates nothing, so that any size can be counted anywhere.
    config = RunConfig(size=size, rows=rows, context=context)
    measured = measure_second_step_peak(config, plain_attention, "meta", checkpointed=checkpointed)
    predicted = predict_peak(config, flash=False, foreach=False, checkpointed=checkpointed)
    assert predicted == pytest.approx(measured, rel=0.05)


#: Rows, context, flash, checkpointed and foreach. Each pair of options occurs in the usual tests.
CASES = list(product([(4, 256), (1, 32), (2, 128)], *[[False, True]] * 3))
PAIRWISE = {(flash, checkpointed, flash ^ checkpointed) for _, flash, checkpointed, _ in CASES}


@pytest.mark.parametrize(
    ("rows", "context", "flash", "checkpointed", "foreach"),
    [
        pytest.param(*shape, *options, marks=() if is_usual else pytest.mark.exhaustive)
        for shape, *options in CASES
        for is_usual in [shape == (2, 128) and tuple(options) in PAIRWISE]
    ],
)
def test_peak_memory_on_the_cpu_is_predicted_within_10_percent(
    rows, context, flash, checkpointed, foreach
):
    config = RunConfig(rows=rows, context=context)
    attention = F.scaled_dot_product_attention if flash else plain_attention
    options = {"checkpointed": checkpointed, "foreach": foreach}
    measured = measure_second_step_peak(config, attention, "cpu", **options)
    assert predict_peak(config, flash=flash, **options) == pytest.approx(measured, rel=0.10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", ["tiny", "small", "medium"])
def test_peak_memory_on_a_gpu_is_predicted_within_5_percent(size):
    config = RunConfig(size=size, rows=8, context=512, device="cuda", world=1)
    measured = measure_peak_bytes(make_run(config))
    assert predict(config).training_peak_bytes == pytest.approx(measured, rel=0.05)


#: The world sizes of the measurements of bytes.
WORLDS = [2, pytest.param(4, marks=pytest.mark.exhaustive)]


def get_measured_bytes(kind, world):
    """Return the measured bytes of each rank."""
    return [of_rank[kind] for of_rank in measure_all_bytes(world)]


@cache
def measure_all_bytes(world):
    """Return all measurements of each rank, which start ranks only once."""
    return run_ranks(measure_rank_bytes, world)


def measure_rank_bytes():
    return {
        "ddp": count_ddp_bytes(),
        "zero": count_sharded_optimizer_bytes(),
        "tensor": count_tensor_parallel_bytes(),
        "pipeline": count_pipeline_bytes() if dist.get_world_size() == 2 else None,
    }


def build_decoder():
    torch.manual_seed(0)
    return Decoder(SHAPE)


def draw_tokens():
    return torch.randint(0, 256, (2, CONTEXT))


def count_ddp_bytes():
    model = ddp.DDP(build_decoder(), bucket_size_mb=0.05)
    model.module.compute_loss(draw_tokens(), draw_tokens()).backward()
    model.finish_gradient_synchronization()
    return model.meter.last.gradient_bytes


def count_sharded_optimizer_bytes():
    model = build_decoder()
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    optimizer.communicator.bytes.clear()
    model.compute_loss(draw_tokens(), draw_tokens()).backward()
    optimizer.step()
    return dict(optimizer.communicator.bytes)


@pytest.mark.parametrize("world", WORLDS)
def test_ddp_reduces_the_predicted_gradient_bytes(world):
    predicted = accounting.communication(MODEL, accounting.Plan(data=world), **SINGLE_PRECISION)
    for sent in get_measured_bytes("ddp", world):
        assert sent == predicted["gradients"].payload


@pytest.mark.parametrize("world", WORLDS)
def test_zero_sends_the_predicted_bytes_by_each_collective(world):
    plan = accounting.Plan(data=world, zero=1)
    predicted = accounting.communication(MODEL, plan, **SINGLE_PRECISION)
    by_operation = {c.operation: c.payload for c in predicted}
    for sent in get_measured_bytes("zero", world):
        # The optimizer also reduces flags that mark parameters with a gradient.
        assert {name: sent[name] for name in by_operation} == by_operation


class CountedAllReduce(TorchDispatchMode):
    """Bytes that enter the functional all-reduces of torch.distributed.tensor."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_reduce" in str(func):
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def make_run(config):
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device(config.device)
    return Run(
        config=config,
        rank=rank,
        world=config.world,
        device=device,
        corpus=load_corpus(Path(__file__).parent),
        recorder=Recorder(rank, device),
        progress=Progress(enabled=False),
    )


def make_small_run():
    return make_run(RunConfig(rows=ROWS, context=CONTEXT, world=dist.get_world_size()))


def draw_whole_batch(run):
    return run.corpus.draw_batch(rows=ROWS, context=CONTEXT, seed=0, step=0)


def count_tensor_parallel_bytes():
    run = make_small_run()
    model = splits.SplitModel(run, SHAPE, splits.Layout(tensor=run.world))
    with CountedAllReduce() as counted:
        model.forward_backward(*draw_whole_batch(run))
    return counted.bytes


@pytest.mark.parametrize("world", WORLDS)
def test_tensor_parallel_reduces_the_predicted_bytes(world):
    # The suite replicates the embedding and the output head on every rank.
    blocks = replace(MODEL, vocab_size=0)
    predicted = accounting.communication(
        blocks, accounting.Plan(tensor=world), batch=ROWS, seq=CONTEXT, **SINGLE_PRECISION
    )
    for sent in get_measured_bytes("tensor", world):
        assert sent == predicted.payload.total


def count_pipeline_bytes():
    run = make_small_run()
    model = splits.SplitModel(run, SHAPE, splits.Layout(pipeline=run.world, schedule="GPipe"))
    batch = draw_whole_batch(run)
    model.forward_backward(*batch)
    sent = {"forward": 0, "backward": 0}

    def count(direction, send_operations):
        def counted(microbatch):
            operations = send_operations(microbatch)
            sent[direction] += sum(operation.tensor.nbytes for operation in operations)
            return operations

        return counted

    stage = model.schedule._stage
    stage.get_fwd_send_ops = count("forward", stage.get_fwd_send_ops)
    stage.get_bwd_send_ops = count("backward", stage.get_bwd_send_ops)
    model.forward_backward(*batch)
    return sent


def test_a_pipeline_sends_the_predicted_bytes_over_each_boundary_in_each_direction():
    plan = accounting.Plan(pipeline=2, microbatches=4, schedule="gpipe")
    sent = {"batch": ROWS, "seq": CONTEXT, **SINGLE_PRECISION}
    stages = [accounting.communication(MODEL, plan, stage=stage, **sent) for stage in (0, 1)]
    first, last = get_measured_bytes("pipeline", 2)
    forward = stages[0]["activations to the next stage"].payload
    assert first == {"forward": forward, "backward": 0}
    assert last == {"forward": 0, "backward": stages[1]["gradients to the previous stage"].payload}
