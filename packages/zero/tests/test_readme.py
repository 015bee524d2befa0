"""The README's example prints what the README shows, and its figures are measured."""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest
from worker_pool import run_on_shared_ranks, run_ranks

README = Path(__file__).parent.parent / "README.md"


def run_example(folder):
    import torch.distributed as dist

    os.chdir(folder)
    code = re.search(r"```python\n(import.*?)```", README.read_text(), re.S)[1]
    # The ranks of a test have a process group already, which the example creates and destroys.
    for line in ('dist.init_process_group("gloo")', "dist.destroy_process_group()"):
        assert line in code
        code = code.replace(line, "")
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    assert dist.is_initialized()
    return printed.getvalue(), len(names["sharded"].units)


def test_the_readmes_example_runs(tmp_path):
    output = re.search(r"^Output:\n\n```\n(.*?)```", README.read_text(), re.S | re.M)[1]
    assert run_ranks(run_example, 2, str(tmp_path)) == [(output, 2), ("", 2)]


def average_weights(stage):
    import torch
    from torch import nn
    from torch.optim.swa_utils import get_ema_multi_avg_fn
    from zero import FSDP, ShardedOptimizer

    code = re.search(r"```python\n(average.*?)```", README.read_text(), re.S)[1]
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    if stage == 3:
        model = FSDP(model, shard=nn.Linear)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, shard_gradients=True)
    twin_optimizer = torch.optim.AdamW(twin.parameters())
    names = {"torch": torch, "model": model}
    exec(code, names)
    expected = [p.detach().clone() for p in twin.parameters()]
    for step in range(3):
        for trained, used in ((model, optimizer), (twin, twin_optimizer)):
            trained(torch.full((2, 5), step + 1.0)).square().mean().backward()
            used.step()
            used.zero_grad()
        names["update_average"](decay=0.9)
        get_ema_multi_avg_fn(0.9)(expected, [p.detach() for p in twin.parameters()], step)
    averages = names["average"].values()
    whole = [a.full_tensor() for a in averages] if stage == 3 else list(averages)
    torch.testing.assert_close(whole, expected)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(names["average"][name])
        for p, value in zip(twin.parameters(), expected, strict=True):
            p.copy_(value)
        torch.testing.assert_close(model(torch.ones(2, 5)), twin(torch.ones(2, 5)))
    return True


@pytest.mark.parametrize("stage", [2, 3])
def test_the_readmes_average_of_the_weights_equals_torchs(stage):
    assert all(run_on_shared_ranks(average_weights, 2, stage))


def find_newest_rows(run, case, key):
    """Return the rows of a case of the newest run, by the value of `key`."""
    results = README.parents[2] / "docs" / "results"
    newest = max(results.glob(f"*-cpu/zero-{run}.json"))
    return {r[key]: r for r in json.loads(newest.read_text())["rows"] if r["case"] == case}


def test_figures_in_sentences_are_measured():
    text = " ".join(README.read_text().split())
    two_hosts = find_newest_rows("two-hosts", "step", "name")
    assert "stages 1 and 2 take about 0.64 of the time of DDP with ZeroRedundancyOpt" in text
    for name in ("stage1", "stage2"):
        assert two_hosts[name]["ratio_p50"] == pytest.approx(0.64, abs=0.02)
    assert "Stage 3 takes about half of the time of FSDP2" in text
    assert two_hosts["stage3"]["ratio_p50"] == pytest.approx(0.5, abs=0.05)
    one_host = find_newest_rows("one-host", "step", "name")
    assert "a step of stages 1 and 2 takes about as long as with torch's" in text
    for name in ("stage1", "stage2"):
        assert one_host[name]["ratio_p50"] == pytest.approx(1.0, abs=0.1)
    stage3 = one_host["stage3"]
    assert (
        f"A step of stage 3 takes {stage3['ratio_p50']:.2f} of the time of FSDP2 "
        f"({stage3['ratio_p10']:.2f} to {stage3['ratio_p90']:.2f} in single rounds). "
    ) in text
    assert ("The goal of 0.70 was missed." in text) == (stage3["ratio_p50"] > 0.7)
    memory = find_newest_rows("two-hosts", "memory", "stage")
    peaks = [f"{memory[stage]['measured_peak_mib']:.0f} MiB" for stage in range(4)]
    assert (
        f"The peak per rank is {peaks[0]} with DDP, {peaks[1]} at stage 1, {peaks[2]} at stage 2 "
        f"and {peaks[3]} at stage 3. Activations take {memory[0]['activations_mib']:.0f} MiB"
    ) in text
    for row in memory.values():
        assert row["predicted_peak_mib"] == pytest.approx(row["measured_peak_mib"], rel=1e-4)
