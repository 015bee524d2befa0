"""Layers are calibrated one after another, in the memory of one block."""

import copy

import pytest
import torch
from tinyml import gptq, size_of
from tinyml.calibration.replay import visit_layers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def compute_by_definition(model, batches, layers, change):
    """Return H of each layer, from full runs of a model in which all layers before are changed.

    A layer's statistics are those of its first call in each batch.
    """
    model = copy.deepcopy(model)
    moments, order = {}, []

    def hook_for(name):
        def hook(_, inputs, options):
            x = (*inputs, *options.values())[0]
            if name not in calls:
                calls[name] = x.detach().clone().reshape(-1, x.shape[-1]).double()

        return hook

    for name in layers:
        model.get_submodule(name).register_forward_pre_hook(hook_for(name), with_kwargs=True)
    while len(order) < len(layers):
        seen = {}
        for batch in batches:
            calls = {}
            with torch.no_grad():
                model(batch)
            for name, x in calls.items():
                seen.setdefault(name, []).append(x.t() @ x)
        name = next((name for name in layers if name in seen and name not in order), None)
        if name is None:
            break
        moments[name] = sum(seen[name])
        order.append(name)
        change(model.get_submodule(name))
    return moments, order


def double_weights(layer):
    with torch.no_grad():
        layer.weight.mul_(1.5)


def compare_statistics(model, batches):
    """Compare the statistics of every layer with those of full runs."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    expected, order = compute_by_definition(model, batches, layers, double_weights)
    visited = {}

    def visit(name, moment):
        visited[name] = moment.clone()
        double_weights(layers[name])

    visit_layers(model, batches, layers, visit)
    assert list(visited) == order
    for name, moment in expected.items():
        torch.testing.assert_close(visited[name], moment, rtol=1e-9, atol=1e-9, msg=name)
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in model.modules())


def test_batches_that_can_be_read_once_are_read_once():
    torch.manual_seed(0)
    model = Blocks()
    batches = [torch.randn(2, 5, 6) for _ in range(3)]
    expected = gptq(model, batches)
    shuffled = torch.utils.data.DataLoader(torch.cat(batches), 2)
    for once in (iter(batches), shuffled):
        assert torch.equal(gptq(model, once)(batches[0]), expected(batches[0]))
    with pytest.raises(ValueError, match="a list with at least one batch"):
        gptq(model, {"x": batches[0]})


class Block(nn.Module):
    def __init__(self, width, shared=None):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)
        )

    def forward(self, x, scale=1.0):
        x = x + torch.tanh(self.q(x) * self.k(x)) * scale
        x += self.mlp(x)  # in place, on its own tensor
        return (x,)


class BlockWithEffects(Block):
    def forward(self, x, outputs):
        (self.last,) = super().forward(x)
        outputs.append(torch.tanh(self.last))
        x.mul_(0.5).add_(self.last)


class Blocks(nn.Module):
    """Blocks with code between them that depends on the number of the block and on the input."""

    def __init__(self, width=6, count=3):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(count)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        scale = x.mean()
        hidden = self.first(x)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, scale=scale * number)[0]
        return self.head(hidden)


class Skips(Blocks):
    """The outputs of earlier blocks are read again at the end, as in a U-Net."""

    def forward(self, x):
        outputs = [self.first(x)]
        for block in self.blocks:
            outputs.append(block(outputs[-1])[0])
        return self.head(outputs[-1] + outputs[1])


class Effects(Blocks):
    """Blocks have other results than their outputs: two arguments, and an attribute."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([BlockWithEffects(6) for _ in range(3)])

    def forward(self, x):
        hidden, outputs = self.first(x), []
        for block in self.blocks:
            block(hidden, outputs)
        return self.head(hidden + sum(outputs) + sum(block.last for block in self.blocks))


class State:
    """An object that blocks write to."""

    total = 0.0


class BlockWithState(Block):
    def forward(self, x, state=None):
        (x,) = super().forward(x)
        state = state or self.state
        state.total = state.total + torch.tanh(x)
        return (x,)


class EffectsOnArgument(Blocks):
    """Blocks change an attribute of an argument."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([BlockWithState(6) for _ in range(3)])

    def forward(self, x):
        hidden, state = self.first(x), State()
        for block in self.blocks:
            hidden = block(hidden, state)[0]
        return self.head(hidden + state.total)


class EffectsOnAttribute(EffectsOnArgument):
    """Blocks change an attribute of an object that they contain."""

    def forward(self, x):
        hidden, state = self.first(x), State()
        for block in self.blocks:
            block.state = state
            hidden = block(hidden)[0]
        return self.head(hidden + state.total)


class Twice(Blocks):
    """Each block is used twice, and the second pass reads the outputs of the last block."""

    def forward(self, x):
        hidden = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            hidden = block(hidden)[0]
        return self.head(hidden)


class Routed(nn.Module):
    """Each token goes to one expert, so batches reach different layers."""

    def __init__(self, width=6):
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                out[chosen == number] = expert(x[chosen == number])
        return self.head(out)


class Overwriting(nn.Module):
    """The input of a layer is overwritten after the layer has read it, and before another does."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(x)
        z = self.a(y)
        y.mul_(3)
        z = z + self.b(y)
        return self.c(z)


@pytest.mark.parametrize(
    "kind", [Blocks, Skips, Effects, EffectsOnArgument, EffectsOnAttribute, Twice, Overwriting]
)
def test_statistics_are_those_of_full_runs(kind):
    torch.manual_seed(0)
    model = kind().double()
    compare_statistics(model, [torch.randn(n, 5, 6, dtype=torch.float64) for n in (2, 3, 1)])


def test_blocks_with_too_many_values_to_compare_run_each_time(monkeypatch):
    monkeypatch.setattr("tinyml.calibration.block_records._MAX_VALUES", 1)
    test_statistics_are_those_of_full_runs(EffectsOnArgument)


@pytest.mark.parametrize("joined", [True, False])
def test_experts_are_calibrated_on_the_tokens_of_all_batches_that_reach_them(joined):
    torch.manual_seed(0)
    batches = [torch.randn(1, 2, 6, dtype=torch.float64) for _ in range(5)]
    model = Routed().double()
    chosen = [set(model.router(batch).argmax(-1).flatten().tolist()) for batch in batches]
    assert len(set(map(frozenset, chosen))) > 2
    compare_statistics(model, [torch.cat(batches)] if joined else batches)


class Mixtures(nn.Module):
    """Blocks of experts with two layers, of which each batch reaches some."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Routed() for _ in range(3)])
        for block in self.blocks:
            block.experts = nn.ModuleList(
                [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)]
            )
            block.head = nn.Linear(6, 6)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_of_which_each_batch_reaches_some_layers():
    torch.manual_seed(0)
    model = Mixtures().double()
    compare_statistics(model, [torch.randn(1, 1, 6, dtype=torch.float64) for _ in range(6)])


class OrderedByInput(nn.Module):
    """The sign of the first number decides which of two layers is first."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x):
        return self.b(self.a(x)) if x.flatten()[0] > 0 else self.a(self.b(x))


def test_batches_that_reach_two_layers_in_different_orders_are_refused():
    model, batch = OrderedByInput(), torch.ones(2, 6)
    gptq(model, [batch, batch])
    with pytest.raises(ValueError, match="got batch 1, which reaches a after a layer that other"):
        gptq(model, [batch, -batch])


class Called(nn.Module):
    """A model of transformers that is called with one tensor of tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        if self.model.config.is_encoder_decoder:
            return self.model(input_ids=tokens, decoder_input_ids=tokens.flip(1))
        return self.model(input_ids=tokens)


T5 = {
    "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8,
    "decoder_start_token_id": 0,
}  # fmt: skip
USUAL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
}  # fmt: skip
FAMILIES = {
    "Llama": ("ForCausalLM", USUAL | {"num_key_value_heads": 1}),
    "Mistral": ("ForCausalLM", USUAL | {"num_key_value_heads": 1, "sliding_window": 4}),
    "GPTNeoX": ("ForCausalLM", USUAL),
    "Bert": ("ForMaskedLM", USUAL),
    "Albert": ("ForMaskedLM", USUAL | {"embedding_size": 16}),
    "T5": ("ForConditionalGeneration", T5),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_of_transformers_are_those_of_full_runs(family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    task, sizes = FAMILIES[family]
    special = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = getattr(transformers, family + "Config")(**sizes, **special)
    model = getattr(transformers, family + task)(config).eval().double()
    compare_statistics(Called(model), [torch.randint(3, 60, (2, 9)), torch.randint(3, 60, (1, 7))])


def test_nested_lists_of_blocks():
    torch.manual_seed(0)
    stages = [nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])]
    stages += [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), nn.Linear(6, 2)]
    compare_statistics(
        nn.Sequential(*stages).double(), [torch.randn(4, 6, dtype=torch.float64)] * 2
    )


def test_finished_blocks_do_not_run_again():
    torch.manual_seed(0)
    model, runs = Blocks(count=4), []
    for number, block in enumerate(model.blocks):
        block.q.register_forward_hook(lambda *_, n=number: runs.append(n))
    batches = [torch.randn(2, 5, 6) for _ in range(3)]
    gptq(model, batches, 4)
    # Queries and keys receive the same tensor; then there are two layers, and a last run records.
    assert [runs.count(number) for number in range(4)] == [4 * 3] * 4


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_finished_blocks_of_transformers_do_not_run_again(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = getattr(transformers, name)
    special = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    model, runs = kind(kind.config_class(**USUAL, **special)).eval(), []
    for block in model.base_model.get_submodule("layers" if "Llama" in name else "h"):
        block.mlp.register_forward_hook(lambda mlp, *_: runs.append(mlp))
    gptq(model, [{"input_ids": torch.arange(12)[None]}], 8)
    # The first run calibrates the last layer of the block, and the next run records the block.
    assert [runs.count(mlp) for mlp in dict.fromkeys(runs)] == [2] * 3


def test_progress_and_cache():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(**USUAL, vocab_size=50, bos_token_id=0, eos_token_id=1)
    model, calls = transformers.LlamaForCausalLM(config).eval(), []
    batch = {"input_ids": torch.arange(12)[None]}
    small = gptq(model, [batch], 8, progress=lambda *call: calls.append(call))
    assert [call[1:] for call in calls] == [(n + 1, 22) for n in range(22)]
    assert calls[0][0].endswith("q_proj")
    assert small.config.use_cache
    assert model.config.use_cache


def measure_peak_bytes(call):
    """Return the most bytes that `call` allocates at a time, and its result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = total = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak, result


@pytest.mark.parametrize(
    ("width", "count", "length"),
    [(64, 1, 16), (16, 4, 128), pytest.param(256, 8, 16, marks=pytest.mark.exhaustive)],
)
def test_memory_is_that_of_one_block_one_batch_and_two_matrices(width, count, length):
    torch.manual_seed(0)
    model = Blocks(width=width, count=3)
    batches = [torch.randn(2, length, width) for _ in range(count)]
    peak, small = measure_peak_bytes(lambda: gptq(model, batches, 4))
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    hidden = batches[0].nbytes
    inputs = model.blocks[0].mlp[2].in_features
    # The goal is 1.5 blocks alone. H and its factor are float64, and 128 columns are rounded at a
    # time. The inputs of a block for all other batches are in files.
    matrices = 8 * (2 * inputs**2 + 4 * 128 * inputs)
    assert block < peak <= size_of(small).bytes + 1.5 * (block + hidden) + matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_layer_needs_the_memory_of_two_float64_matrices(dtype):
    torch.manual_seed(0)
    inputs, outputs = 344, 128  # the proportions of a Llama's last layer in a block
    model = nn.Sequential(nn.Linear(inputs, outputs, dtype=dtype))
    batches = [torch.randn(64, inputs, dtype=dtype)]
    peak, small = measure_peak_bytes(lambda: gptq(model, batches, 4))
    matrix = 8 * inputs**2
    rest = size_of(small).bytes + 8 * 4 * 128 * inputs + 5 * model[0].weight.numel() * 4
    # The goal of 1.5 blocks would need H in less than float64, or outside of memory.
    block = (4 * outputs**2 + 3 * outputs * inputs) * dtype.itemsize
    assert 2 * block < 2 * matrix < peak <= 2 * matrix + rest


class WithFunction(Block):
    """A block whose outputs contain a function, which cannot be pickled."""

    def forward(self, x, scale=1.0):
        return (*super().forward(x, scale), lambda: scale)


def test_outputs_of_blocks_may_contain_any_objects():
    torch.manual_seed(0)
    model, batches = Blocks(), [torch.randn(2, 5, 6) for _ in range(3)]
    expected = gptq(model, batches)(batches[0])
    for block in model.blocks:
        block.__class__ = WithFunction
    assert torch.equal(gptq(model, batches)(batches[0]), expected)


class Counted(nn.Module):
    """A block whose outputs depend on the number of its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls * torch.relu(self.linear(x))


def test_calibration_leaves_the_buffers_as_they_were():
    batches = [torch.randn(8, 16) for _ in range(3)]
    model = nn.Sequential(Counted(), Counted())
    result = gptq(model, batches, 4)
    assert result[0].calls == result[1].calls == 0
    # Every batch is calibrated as the first call of the model.
    joined = gptq(model, [torch.cat(batches)], 4)
    assert torch.equal(result[1].linear.weight, joined[1].linear.weight)


def test_a_batch_may_be_a_list_of_one_tensor_but_not_of_several():
    model, batches = nn.Sequential(nn.Linear(16, 4)), torch.randn(2, 8, 16)
    result = gptq(model, DataLoader(TensorDataset(batches.flatten(0, 1)), batch_size=8))
    assert torch.equal(result[0].weight, gptq(model, list(batches))[0].weight)
    with pytest.raises(TypeError, match=r"got a list; a batch is .* pass only the inputs"):
        gptq(model, [[batches[0], torch.zeros(8)]])


def test_gptq_runs_in_inference_mode():
    model, batches = (
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        torch.randn(2, 8, 16),
    )
    expected = gptq(model, list(batches))
    with torch.inference_mode():
        result = gptq(model, list(batches + 0))
    assert torch.equal(result[2].weight, expected[2].weight)
