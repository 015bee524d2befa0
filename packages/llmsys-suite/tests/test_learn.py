"""A training of the stage `learn` continues from its checkpoint on any number of ranks."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from llmsys_suite import cli
from llmsys_suite.audit.run import catch_errors
from llmsys_suite.audit.stage_checks import learn as learn_checks
from llmsys_suite.audit.stage_checks import probed_step
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.learning import choice, evaluation
from llmsys_suite.learning import state as training_state
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.measure.samples import SINGLE
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.results import Train
from llmsys_suite.splits.split_model import SplitModel
from llmsys_suite.stages import learn
from llmsys_suite.start import execute
from llmsys_suite.text.data import load_corpus
from llmsys_suite.text.generation import MODEL, generate_text, load_model
from llmsys_suite.variants import VARIANTS
from llmsys_suite.variants.single import Variant
from run_folders import create_folder
from safetensors.torch import save_file
from worker_pool import run_on_shared_ranks, run_ranks

STEPS, ROWS = 8, 4


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_training_that_diverges_ends_with_the_step_and_a_remedy(loss):
    training_state.require_finite(5.5, 0)
    with pytest.raises(FloatingPointError, match="step 3 of learn; lower learning_rate"):
        training_state.require_finite(loss, 3)


def test_evaluations_and_checkpoints_follow_every_nth_step_and_the_last():
    assert [n for n in range(1, 13) if training_state.is_due(n, 12, 5)] == [2, 4, 6, 8, 10, 12]
    assert [n for n in range(1, 14) if training_state.is_due(n, 13, 2)] == [6, 12, 13]


def make_run(out, resume, learn_rows=ROWS, options=None):
    """Return the state of this rank in a run that trains on this file."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = RunConfig(
        size="mini",
        rows=learn_rows,
        context=16,
        world=world,
        learn=STEPS,
        data=Path(__file__),
        out=Path(out),
        resume=resume and Path(resume),
        **(options or {}),
    )
    cpu = torch.device("cpu")
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=cpu,
        corpus=load_corpus(config.data),
        recorder=Recorder(rank, cpu),
        progress=Progress(enabled=False),
    )
    run.folder = create_folder(config, {}) if rank == 0 else None
    return run


def run_learn(out, variant, stop_at=None, resume=None, learn_rows=ROWS, options=None):
    """Return all losses and the number of steps; the last rank gets SIGTERM in step `stop_at`."""
    run = make_run(out, resume, learn_rows, options)
    rank, world = run.rank, run.world
    run.results["train"] = Train([{"variant": variant, "ratio_p50": 0.5}], {}, {})
    cls, steps = VARIANTS[variant if world > 1 else SINGLE], []
    if run.config.tensor * run.config.pipeline > 1:
        cls = SplitModel

    def step(self, tokens, targets, original=cls.step):
        steps.append(tokens.tolist())
        if len(steps) == stop_at and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, tokens, targets)

    with mock.patch.object(cls, "step", step), mock.patch.object(evaluation, "WRITTEN_TOKENS", 4):
        try:
            result = learn.run(run)
        except KeyboardInterrupt:
            return "stopped", len(steps)
    assert result is None or result.heldout[0][0] == 0
    return result and result.losses, len(steps)


def train_whole_stopped_and_continued(folder, variant, options):
    """Train without a stop, until a SIGTERM, and from the checkpoint, on the same ranks."""
    outcomes = [run_learn(f"{folder}/whole", variant, options=options)]
    outcomes.append(run_learn(f"{folder}/part", variant, 5, options=options))
    resume = f"{folder}/part/{training_state.CHECKPOINT}"
    return [*outcomes, run_learn(f"{folder}/on2", variant, resume=resume, options=options)]


@pytest.mark.parametrize(
    ("variant", "worlds"),
    [
        ("fsdp", (1,)),
        pytest.param("fsdp", (2, 4), marks=pytest.mark.exhaustive),
        pytest.param("ddp bucketed", (1, 2, 4), marks=pytest.mark.exhaustive),
        pytest.param("zero 2", (1, 2, 4), marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_training_goes_on_at_another_number_of_ranks(tmp_path, variant, worlds):
    clip = {"clip": 0.5}
    first, second = run_on_shared_ranks(
        train_whole_stopped_and_continued, 2, str(tmp_path), variant, clip
    )
    (whole, _), stopped, continued = first
    assert len(whole) == STEPS
    assert stopped == second[1] == ("stopped", 5)
    # On the same number of ranks the losses are equal.
    assert continued == (whole, STEPS - 5)
    resume = str(tmp_path / "part" / training_state.CHECKPOINT)
    for world in worlds:
        (losses, steps), *_ = run_on_shared_ranks(
            run_learn, world, str(tmp_path / f"new{world}"), variant, None, resume, ROWS, clip
        )
        assert steps == STEPS - 5
        # Another number of ranks adds the losses in another order.
        assert losses == (whole if world == 2 else pytest.approx(whole, rel=1e-5))


def list_failed_checks_of_continued(resume, forgotten):
    """Return the failed checks of a run that resumes with the moment `forgotten` set to zero."""

    def restore(_, model, optimizer):
        for state in optimizer.state.values():
            state.get(forgotten, torch.zeros(1)).zero_()

    run = make_run(f"{resume}-{forgotten}", resume)
    with (
        mock.patch.object(Variant, "restore", restore),
        mock.patch.object(evaluation, "WRITTEN_TOKENS", 4),
    ):
        result = learn.run(run)
    return [
        c.name for c in learn_checks._check_continuation(run, result, Path(resume)) if not c.passed
    ]


def continue_without_moments(folder):
    assert run_learn(f"{folder}/part", "ddp flat", 5) == ("stopped", 5)
    resume = f"{folder}/part/{training_state.CHECKPOINT}"
    return [list_failed_checks_of_continued(resume, key) for key in (None, "exp_avg", "exp_avg_sq")]


def test_a_training_that_continues_without_a_moment_of_its_checkpoint_fails(tmp_path):
    second = ["second loss after the checkpoint"]
    failed = run_on_shared_ranks(continue_without_moments, 1, str(tmp_path))
    assert failed == [[[], second, second]]


def train_whole_and_loaded(folder):
    whole, _ = run_learn(f"{folder}/whole", "fsdp")
    resume = f"{folder}/whole/{training_state.CHECKPOINT}"
    return whole, run_learn(f"{folder}/new", "fsdp", resume=resume)


def test_a_training_that_has_ended_is_loaded_and_saved_in_the_new_folder(tmp_path):
    ((whole, loaded),) = run_on_shared_ranks(train_whole_and_loaded, 1, str(tmp_path))
    assert loaded == (whole, 0)
    checkpoint = training_state.CHECKPOINT
    first, second = (
        probed_step.read_checkpoint(tmp_path / name / checkpoint) for name in ("whole", "new")
    )
    for kind, tensors in first.items():
        assert all(torch.equal(tensor, second[kind][name]) for name, tensor in tensors.items())


def list_failed_checks_of_last_checkpoint(folder):
    """Return the failed checks of a training, then of checkpoints without an entry or cut short."""
    run = make_run(f"{folder}/run", None)
    with mock.patch.object(evaluation, "WRITTEN_TOKENS", 4):
        result = learn.run(run)

    def failed(kind):
        checkpoint = probed_step.read_checkpoint(run.out / training_state.CHECKPOINT)
        if kind is not None:
            checkpoint[kind].popitem()
        with mock.patch.object(probed_step, "read_checkpoint", return_value=checkpoint):
            checks = learn_checks._check_last_checkpoint(run.folder, result)
            return [check.name for check in checks if not check.passed]

    incomplete = [failed(kind) for kind in (None, "step", "weight")]
    for file in (run.out / training_state.CHECKPOINT).glob("*.distcp"):
        os.truncate(file, 100)
    (damaged,) = catch_errors("learn", learn_checks._check_last_checkpoint(run.folder, result))
    return [*incomplete, [damaged.name]]


def test_a_checkpoint_without_a_weight_or_its_moments_fails(tmp_path):
    failed = run_on_shared_ranks(list_failed_checks_of_last_checkpoint, 1, str(tmp_path))
    entries = [[], ["steps of the optimizer"], ["weights of the model file"]]
    assert failed == [[*entries, ["what the audit reads"]]]


GRIDS = [
    pytest.param(2, {"tensor": 2}, id="tensor", marks=pytest.mark.exhaustive),
    pytest.param(
        2,
        {"pipeline": 2, "recompute": True},
        id="pipeline, recomputed",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(4, {"pipeline": 2}, id="data x pipeline", marks=pytest.mark.exhaustive),
    pytest.param(
        8,
        {"tensor": 2, "pipeline": 2, "clip": 0.5},
        id="all three, clipped",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(2, {"tensor": 2, "compile": True}, id="compiled", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("world", "options"), GRIDS)
def test_a_split_model_learns_and_goes_on_as_one_process_does(tmp_path, world, options):
    clip = {"clip": options.get("clip")}
    (whole, _), *_ = run_ranks(
        run_learn, 1, str(tmp_path / "whole"), "fsdp", None, None, ROWS, clip
    )
    stopped = run_ranks(
        run_learn, world, str(tmp_path / "part"), "fsdp", 5, None, ROWS, options, timeout=400
    )
    assert stopped == [("stopped", 5)] * world
    resume = str(tmp_path / "part" / training_state.CHECKPOINT)
    # On the same grid, and on one process: the checkpoint has the whole model.
    for number, grid in ((world, options), (1, clip)):
        (losses, steps), *_ = run_ranks(
            run_learn, number, str(tmp_path / f"on{number}"), "fsdp", None, resume, ROWS, grid
        )
        assert steps == STEPS - 5
        assert losses == pytest.approx(whole, rel=1e-5)


def refuse_other_rows(folder):
    run_learn(f"{folder}/part", "ddp flat", 3)
    resume = f"{folder}/part/{training_state.CHECKPOINT}"
    with pytest.raises(UsageError, match="has rows 4, got 8; set the same rows"):
        run_learn(f"{folder}/other", "ddp flat", None, resume, 8)


def test_the_stage_refuses_rows_that_contradict_the_checkpoint(tmp_path):
    run_on_shared_ranks(refuse_other_rows, 1, str(tmp_path))


def test_a_run_that_cannot_go_on_is_refused_before_it_begins(tmp_path):
    run_on_shared_ranks(run_learn, 1, str(tmp_path / "part"), "ddp flat", 3)
    checkpoint, out = tmp_path / "part" / training_state.CHECKPOINT, tmp_path / "new"
    config = RunConfig(
        stages=("plan", "train", "learn", "report"),
        size="mini",
        rows=8,
        context=16,
        learn=STEPS,
        data=Path(cli.__file__),
        out=out,
        resume=checkpoint,
    )
    with pytest.raises(UsageError, match="set the same --data and --tokenizer"):
        execute(config)
    assert not out.exists()


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        ({"context": 64}, "has context 64, got 128; set the same context"),
        (
            {"text": "other"},
            "has text digest other, got .*; set the same --data and --tokenizer",
        ),
        ({"total": 900}, "has --learn 900, got 700; set the same --learn"),
        ({"size": "tiny"}, "has size tiny, got mini"),
        ({"seed": 7}, "has seed 7, got 0"),
        ({"rows": 3}, "c cannot be continued: 3 rows are not a multiple of 2 replicas"),
        ({"clip": 1.0}, "has clip 1.0, got None"),
        ({"learning_rate": 1.0}, "learning_rate 1.0, got 0.002"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused(saved, complaint):
    text = "digest"
    config = RunConfig(size="mini", learn=700)
    state = training_state.build_initial_state(config, text)
    training_state.require_same(dict(state), config, text, Path("c"))
    with pytest.raises(UsageError, match=complaint):
        training_state.require_same(state | saved, config, text, Path("c"))


def test_rows_that_the_user_has_set_and_that_contradict_the_checkpoint_are_refused():
    text = "digest"
    state = training_state.build_initial_state(RunConfig(size="mini", rows=12), text)
    training_state.require_same(state, RunConfig(size="mini", world=3, rows=12), text, Path("c"))
    training_state.require_same(state, RunConfig(size="mini", world=2, rows=8), text, Path("c"))
    config = RunConfig(size="mini", world=2, rows=16)
    with pytest.raises(UsageError, match="has rows 12, got 16; set the same rows"):
        training_state.require_same(state, config, text, Path("c"))
    split = RunConfig(size="tiny", world=4, pipeline=4, rows=16)
    with pytest.raises(UsageError, match="2 rows per replica are fewer than 4 pipeline stages"):
        training_state.require_same(state | {"rows": 2}, split, text, Path("c"))


def test_checkpoint_without_the_state_of_a_training_is_refused():
    config = RunConfig(size="mini")
    with pytest.raises(
        UsageError, match=r"expected a checkpoint of the stage learn, .* has no clip"
    ):
        training_state.require_same({}, config, "digest", Path("c"))


def test_checkpoint_decides_the_number_of_steps_if_no_option_does():
    text = "digest"
    state = training_state.build_initial_state(RunConfig(size="mini", learn=900), text)
    training_state.require_same(state, RunConfig(size="mini"), text, Path("c"))
    with pytest.raises(UsageError, match="has --learn 900, got 500; set the same --learn"):
        training_state.require_same(state, RunConfig(size="mini", learn=500), text, Path("c"))


def test_the_fastest_that_can_learn_is_chosen():
    rows = [
        {"variant": "parameter server", "ratio_p50": 0.1},
        {"variant": "zero 1", "ratio_p50": 0.8},
        {"variant": "ddp flat", "ratio_p50": 0.9},
        {"variant": "single process"},
    ]
    assert choice.choose_fastest(rows) == "zero 1"
    assert choice.choose_fastest([]) == "torch DDP"
    # Only rank 0 has the rows and chooses; rank 1 receives the choice.
    model = ModelConfig.from_size("mini", context=16)
    run = mock.Mock(config=RunConfig(size="mini"), model=model, results={}, rank=1, world=2)
    run.gather.side_effect = lambda mine: ["zero 1", mine]
    with (
        mock.patch.object(choice, "choose_fastest", side_effect=AssertionError),
        mock.patch.dict(choice.VARIANTS, {"zero 1": mock.Mock()}),
    ):
        assert choice.make_variant(run)[0] == "zero 1"


def test_a_run_s_model_writes_on_from_a_prompt_and_a_run_without_one_says_so(tmp_path, capsys):
    folder = create_folder(RunConfig(size="mini", context=16, out=tmp_path), {})
    with pytest.raises(UsageError, match=r"to have model\.safetensors; run the stage learn"):
        cli.app(["sample", str(tmp_path)], standalone_mode=False)
    trained = Decoder(ModelConfig.from_size("mini", context=16))
    save_file(trained.state_dict(), folder.path / MODEL)
    model = load_model(folder)
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(model(tokens), trained(tokens))
    written = generate_text(model, "To be", 20)
    # Bytes that form a character in UTF-8 are printed as this character.
    assert 5 <= len(written) <= 20
    assert written == generate_text(model, "To be", 20)
    assert written != generate_text(model, "To be", 20, temperature=50.0, seed=1)
    assert 2 <= len(generate_text(model, os.fsdecode(b"caf\xe9"), 5)) <= 5
    # The most likely token at each position, also at a temperature by which logits overflow.
    coldest = generate_text(model, "To be", 20, temperature=1e-300)
    assert coldest == generate_text(model, "To be", 20, temperature=1e-6, seed=1)
    cli.app(
        ["sample", str(tmp_path), "--prompt", "To be", "--max-bytes", "20"], standalone_mode=False
    )
    assert capsys.readouterr().out == f"To be{written}\n"
    for prompt, max_bytes, temperature, complaint in (
        ("", 4, 1.0, "at least one token"),
        ("a", 0, 1.0, "expected --max-bytes >= 1, got 0"),
        ("a", 4, 0.0, "above 0 and below infinity, got 0;"),
        ("a", 4, float("inf"), "above 0 and below infinity, got inf;"),
        ("a", 4, float("nan"), "above 0 and below infinity, got nan;"),
    ):
        with pytest.raises(UsageError, match=complaint):
            generate_text(model, prompt, max_bytes, temperature=temperature)
    with pytest.raises(UsageError, match=r"expected a seed from .*, got 9{20}"):
        generate_text(model, "a", 4, seed=10**20 - 1)


def test_the_audit_clips_as_torch_does():
    gradients = {name: torch.randn(5, 3) * scale for name, scale in (("a", 3), ("b", 0.1))}
    for max_norm in (0.5, 1e6):
        parameters = [torch.nn.Parameter(torch.zeros(5, 3)) for _ in gradients]
        for parameter, gradient in zip(parameters, gradients.values(), strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        expected = dict(zip(gradients, [p.grad for p in parameters], strict=True))
        torch.testing.assert_close(probed_step.clip(gradients, max_norm), expected)
