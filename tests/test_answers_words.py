"""Sentences of the answers agree with the rows beside them; new rows refute old sentences."""

import itertools

import pytest
from workspace import import_script

COMPUTED = import_script("computed")
row = COMPUTED.row
rows = COMPUTED.rows
result = COMPUTED.result

POLICIES = {
    "target": (
        "BulkSynchronous()",
        "StaleSynchronous(bound=4)",
        "Asynchronous()",
    ),
    "link": ("data-parallel", "DiLoCo", "DiLoCo, 4 bits, 5 fragments, overlap 5"),
}


def find_kernel_row(context, phase):
    return row("kernels", context=context, phase=phase)


def find_warmup_row(process, warmup, batch=4):
    return row("warmup", process=process, warmup=warmup, batch=batch)


def find_attention_row(seq, kernel, which, width=16):
    return row("attention_time", seq=seq, head_dim=width, **{"pass": which})[f"{kernel}_ms"]


def compute_bfloat16_speedup(size, phase):
    """Return how many times as fast a phase is in bfloat16 as in float32."""
    full, less = (row("precision", size=size, dtype=dtype) for dtype in ("fp32", "bf16"))
    return full[f"{phase}_mean_ms"] / less[f"{phase}_mean_ms"]


def find_two_hosts_figure(design, column="step_ms"):
    measured = result("ddp", "two-hosts", case="step", workload="transformer", design=design)
    return measured[column]


def find_all_reduce_row(world, size, algorithm="auto"):
    measured = result(
        "collectives",
        "one-host",
        case="all_reduce",
        algorithm=algorithm,
        world=world,
        size_bytes=size,
    )
    return measured["busbw_gbps"]


def find_bits_figure(count, column):
    return row("digits", case="bits", bits=count)[column]


def list_policy_rows(case):
    """Return the rows of one case of paramserver, in the order of the page."""
    return [result("paramserver", "measured", case=case, kind=kind) for kind in POLICIES[case]]


def find_compressed_figure(method, column):
    return result("llmsys-suite", "measured", case="compress", method=method)[column]


def find_optimum(fit, compute):
    return row("isoflop", fit=fit, compute=compute)["parameters"]


def find_sharded_figure(name, column):
    return result("zero", "two-hosts", case="step", name=name)[column]


def find_rates(optimizer, steps, noise, task="linear"):
    return row("rates", task=task, optimizer=optimizer, steps=steps, label_noise=noise)


def find_gpu_step(size):
    return result("llmsys-suite", "gpu_steps", case="step", size=size)["step_p50_ms"]


def find_gpu_rate(which):
    measured = result(
        "flashattn2",
        "gpu",
        case="train",
        batch=1,
        seq=16384,
        dim=128,
        causal="true",
        impl="ours triton",
        **{"pass": which},
    )
    return measured["tflops"]


def find_best_rate(task, optimizer, batch):
    """Return the rate of a curve that has the least loss."""
    curve = row("rate_curves", task=task, optimizer=optimizer, batch=batch)["curve"]
    return min(curve, key=lambda point: point[1])[0]


def find_sweep(workload):
    return [row for row in RESULTS if (row["case"], row["workload"]) == ("sweep", workload)]


def find_least(workload, column):
    return min(find_sweep(workload), key=lambda entry: entry[column])["design"]


RESULTS = import_script("measure").find_newest("ddp", "two-hosts")["rows"]
PREDICTED = result("ddp", "two-hosts", case="prediction", workload="transformer")["predicted_mb"]
STEP = row("layers", context=512)["drawn"]["training"]
SIZES = [entry for entry in rows("sizes") if "backward_mean_ms" in entry]
MEMORY = {entry["context"]: entry for entry in rows("layers")}
PROMPTS = [entry for entry in rows("prompt_overfits") if entry["step"] == 1500]
NEAR = pytest.approx

SENTENCES = {
    "the backward pass takes about twice the forward pass": lambda: all(
        1.5 < entry["backward_mean_ms"] / entry["forward_mean_ms"] < 3 for entry in SIZES
    ),
    "a cold process: one step of warm-up takes most of the deviation away": lambda: (
        find_warmup_row("cold", 1)["forward_std_ms"]
        < (
            find_warmup_row("cold", 0)["forward_std_ms"]
            + find_warmup_row("cold", 5)["forward_std_ms"]
        )
        / 2
    ),
    "a warm one: steps of warm-up make no difference beyond the deviation": lambda: (
        abs(
            find_warmup_row("warm", 0)["forward_mean_ms"]
            - find_warmup_row("warm", 5)["forward_mean_ms"]
        )
        < find_warmup_row("warm", 0)["forward_std_ms"]
        + find_warmup_row("warm", 5)["forward_std_ms"]
    ),
    "a batch of 32 does not hide it": lambda: (
        find_warmup_row("cold", 0, 32)["forward_std_ms"]
        > 2 * find_warmup_row("cold", 1, 32)["forward_std_ms"]
    ),
    "the same top operator forward and backward": lambda: all(
        entry["top_operators"].startswith("mm x ")
        for entry in rows("kernels")
        if entry["phase"] != "optimizer"
    ),
    "an optimizer has no products": lambda: (
        find_kernel_row(128, "optimizer")["matrix_products"] == 0
    ),
    "softmax takes much time for its operations": lambda: (
        find_kernel_row(1024, "forward")["softmax"]
        > 0.1 * find_kernel_row(1024, "forward")["attention_products"]
    ),
    "the optimizer takes longer where memory is returned, at a short context": lambda: (
        row("allocator", context=128, memory="returned")["optimizer_ms"]
        > 1.3 * row("allocator", context=128, memory="kept")["optimizer_ms"]
    ),
    "half precision pays, and more for the larger model": lambda: (
        1
        < compute_bfloat16_speedup("tiny", "forward")
        < compute_bfloat16_speedup("small", "forward")
        and 1
        < compute_bfloat16_speedup("tiny", "backward")
        < compute_bfloat16_speedup("small", "backward")
    ),
    "fp16 does not pay on this processor": lambda: (
        row("precision", size="small", dtype="fp16")["forward_mean_ms"]
        > row("precision", size="small", dtype="fp32")["forward_mean_ms"]
    ),
    "peaks at 128 and 256 are the same, the one at 512 is not": lambda: (
        MEMORY[128]["training_peak_mib"] == NEAR(MEMORY[256]["training_peak_mib"], rel=1e-4)
        and MEMORY[512]["training_peak_mib"] > 1.1 * MEMORY[256]["training_peak_mib"]
    ),
    "under autocast more is held at the end of the forward pass": lambda: all(
        entry["forward_end_autocast_mib"] > entry["forward_end_mib"] for entry in MEMORY.values()
    ),
    "under autocast the peak of a step is hardly higher, and in the backward pass": lambda: (
        MEMORY[128]["training_peak_autocast_mib"] == MEMORY[128]["training_peak_mib"]
        and all(
            1 < entry["training_peak_autocast_mib"] / entry["training_peak_mib"] < 1.05
            for entry in (MEMORY[256], MEMORY[512])
        )
    ),
    "autocast raises the peak of a forward pass, and its cache is the reason": lambda: all(
        entry["inference_autocast_mib"] > 1.4 * entry["inference_float32_mib"]
        and entry["inference_autocast_uncached_mib"]
        == NEAR(entry["inference_float32_mib"], rel=0.01)
        for entry in rows("mixed_memory")
    ),
    "the rate with the least loss grows with the batch, with Adam less than with SGD": lambda: (
        find_best_rate("linear", "sgd", 64) / find_best_rate("linear", "sgd", 1)
        > find_best_rate("linear", "adam", 64) / find_best_rate("linear", "adam", 1)
        > 1
        and find_best_rate("mlp", "sgd", 64) / find_best_rate("mlp", "sgd", 1)
        > find_best_rate("mlp", "adam", 64) / find_best_rate("mlp", "adam", 1)
        > 1
    ),
    "predictions for a GPU start from the steps and rates of the tables beside them": lambda: (
        find_gpu_step("small") == NEAR(63.3, abs=0.05)
        and find_gpu_step("medium") == NEAR(137.8, abs=0.05)
        and find_gpu_rate("forward") == NEAR(397, abs=0.5)
        and find_gpu_rate("backward") == NEAR(329, abs=0.5)
    ),
    "memory climbs, falls, and is flat in the optimizer": lambda: (
        max(STEP, key=lambda point: point[1])
        == next(point for point in STEP if point[0] == "backward")
        and all(a < b for (_, a), (phase, b) in itertools.pairwise(STEP) if phase == "forward")
        and max(live for phase, live in STEP if phase == "optimizer")
        < 1.01 * min(live for phase, live in STEP if phase == "optimizer")
    ),
    "three matrices of scores at the peak": lambda: (
        row("attention_memory", seq=16384, head_dim=16)["score_matrices_at_peak"]
        == NEAR(3, abs=0.1)
    ),
    "what is held before the backward pass is the softmax and little else": lambda: all(
        entry["held_before_backward_mib"] < 1.2 * 4 * 8 * entry["seq"] ** 2 / 2**20
        for entry in rows("attention_memory")
        if entry["seq"] >= 4096
    ),
    "compiling: at 256 and 512 tokens the forward pass only pays": lambda: all(
        find_attention_row(seq, "compiled", "forward", width)
        > find_attention_row(seq, "plain", "forward", width)
        for seq in (256, 512)
        for width in (16, 128)
    ),
    "compiling: from 1,024 on both passes gain, the backward pass more": lambda: all(
        0
        < find_attention_row(seq, "plain", "forward", width)
        - find_attention_row(seq, "compiled", "forward", width)
        < find_attention_row(seq, "plain", "backward", width)
        - find_attention_row(seq, "compiled", "backward", width)
        for seq in (1024, 2048, 4096)
        for width in (16, 128)
    ),
    "flashattn2 takes SDPA's time": lambda: all(
        entry["flashattn2_ms"] == NEAR(entry["SDPA_ms"], rel=0.1)
        for entry in rows("attention_time")
    ),
    "auto runs gloo between hosts at 64 KiB and takes up to 1.3 times as long": lambda: all(
        row["runs"] == "gloo" and 1 / 1.3 < row["ratio_p50"] < 1
        for case in ("all_reduce", "reduce_scatter", "all_gather")
        for row in (
            result("collectives", "two-hosts", case=case, algorithm="auto", size_bytes=65536),
        )
    ),
    "more processes cost the larger share where messages are short": lambda: all(
        find_all_reduce_row(2, 1024, algorithm) / find_all_reduce_row(6, 1024, algorithm)
        > find_all_reduce_row(2, 104857600, algorithm)
        / find_all_reduce_row(6, 104857600, algorithm)
        for algorithm in ("auto", "gloo")
    ),
    "flat gains nothing to speak of over naive": lambda: (
        find_two_hosts_figure("flat") == NEAR(find_two_hosts_figure("naive"), rel=0.1)
    ),
    "overlap beats flat, and buckets beat single parameters": lambda: (
        find_two_hosts_figure("10 MB")
        < find_two_hosts_figure("overlapped")
        < find_two_hosts_figure("flat")
    ),
    "the largest buckets are the worst of the overlapped ones": lambda: (
        max(find_two_hosts_figure("100 MB"), find_two_hosts_figure("1000 MB"))
        > max(
            find_two_hosts_figure("1 MB"),
            find_two_hosts_figure("10 MB"),
            find_two_hosts_figure("overlapped"),
        )
    ),
    "10 MB is the fastest bucket on that link": lambda: (
        find_two_hosts_figure("10 MB")
        == min(find_two_hosts_figure(f"{size} MB") for size in ("1", "10", "25", "100"))
    ),
    "the overhead's least is where it is predicted if the backward pass is long": lambda: (
        find_least("transformer", "model_ms") != find_least("transformer", "after_backward_ms")
        and find_least("busy_transformer", "model_ms")
        == find_least("busy_transformer", "after_backward_ms")
        == f"{PREDICTED} MB"
    ),
    "the shortest step of the busy model is not at the predicted bucket": lambda: (
        result("ddp", "two-hosts", case="step", workload="busy_transformer", design="10 MB")[
            "step_ms"
        ]
        < result(
            "ddp", "two-hosts", case="step", workload="busy_transformer", design=f"{PREDICTED} MB"
        )["step_ms"]
    ),
    "a prompt overfits, and a longer one further": lambda: (
        all(entry["loss_of_4_seen"] < entry["loss_of_256_others"] - 1 for entry in PROMPTS)
        and PROMPTS[1]["loss_of_4_seen"] < PROMPTS[0]["loss_of_4_seen"]
    ),
    "with label noise Adam's rate falls again, after 20 steps and after 100": lambda: all(
        max(find_rates("adam", steps, 8.0)[f"batch_{2**k}"] for k in range(9))
        > 1.2 * find_rates("adam", steps, 8.0)["batch_256"]
        for steps in (20, 100)
    ),
    "without it none that lasts": lambda: (
        find_rates("adam", 100, 0.0)["batch_256"]
        == max(find_rates("adam", 100, 0.0)[f"batch_{2**k}"] for k in range(9))
    ),
    "with label noise every rate of SGD is lower": lambda: all(
        find_rates("sgd", 10, 8.0)[f"batch_{2**k}"] < find_rates("sgd", 10, 0.0)[f"batch_{2**k}"]
        for k in range(9)
    ),
    "layers lie between a flat distribution and a normal one": lambda: all(
        0.289 < entry["within_half_std"] < 0.383 for entry in rows("digits", case="histogram")
    ),
    "the best run of each budget is off by a third at 1e24, and its sizes fall once": lambda: (
        find_optimum("best run of each", 1e24) / find_optimum("a parabola each", 1e24)
        == NEAR(2 / 3, abs=0.05)
        and find_optimum("best run", 6e20) > find_optimum("best run", 1e21)
        and find_optimum("the same, with an offset", 1e24) < find_optimum("best run of each", 1e24)
    ),
    "stages 1 and 2 cost no time over data parallelism, stage 3 some": lambda: (
        find_sharded_figure("stage1", "time_ms")
        == NEAR(find_sharded_figure("ddp", "time_ms"), rel=0.05)
        and find_sharded_figure("stage2", "time_ms")
        == NEAR(find_sharded_figure("ddp", "time_ms"), rel=0.05)
        and find_sharded_figure("stage3", "time_ms") > 1.05 * find_sharded_figure("ddp", "time_ms")
        and find_sharded_figure("stage3", "sent_over_parameters") < 1.51
    ),
    "SGD has no surge, with noise or without": lambda: all(
        find_rates("sgd", 10, noise)[f"batch_{2**k}"]
        < find_rates("sgd", 10, noise)[f"batch_{2 ** (k + 1)}"]
        for noise in (0.0, 8.0)
        for k in range(8)
    ),
    "k-means errs less at every width": lambda: all(
        find_bits_figure(count, "kmeans_error") < find_bits_figure(count, "linear_error")
        for count in (8, 6, 4, 3, 2)
    ),
    "k-means is the smaller at 4 bits and below, the larger from 6 on": lambda: all(
        (find_bits_figure(count, "kmeans_bytes") < find_bits_figure(count, "linear_bytes"))
        == (count <= 4)
        for count in (8, 6, 4, 3, 2)
    ),
    "no image is lost by k-means down to 2 bits, by linear down to 3": lambda: all(
        find_bits_figure(count, f"{kind}_accuracy") >= find_bits_figure(8, f"{kind}_accuracy")
        for kind, widths in (("kmeans", (6, 4, 3, 2)), ("linear", (6, 4, 3)))
        for count in widths
    ),
    "palettes and grids are no faster, integer products are": lambda: (
        max(
            find_compressed_figure(method, "speedup_p50")
            for method in ("k-means, 4 bits", "linear, 4 bits")
        )
        < 1.1
        and find_compressed_figure("8 bits, activations too", "speedup_p50") > 1.2
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_rows_agree_with_the_sentence(sentence):
    assert SENTENCES[sentence](), sentence


def test_bounded_waiting_is_faster_with_one_slow_worker():
    bulk, stale, free = list_policy_rows("target")
    assert stale["over_bulk_p50"] < stale["last_over_bulk_p50"] < 1
    assert free["over_bulk_p50"] < free["last_over_bulk_p50"] < 1
    assert bulk["over_bulk_p50"] == 1


def test_fewer_exchanges_compute_more_on_a_slow_link_at_nearly_the_same_loss():
    parallel, diloco, streaming = list_policy_rows("link")
    shares = [row["computing_share"] for row in (parallel, diloco, streaming)]
    assert shares == sorted(shares)
    sent = [row["sent_bytes_per_step"] for row in (parallel, diloco, streaming)]
    assert sent == sorted(sent, reverse=True)
    equal = result("paramserver", "equal-loss", kind=streaming["kind"])
    assert 1 < equal["loss_over_data_parallel"] < 1.01
    diloco = result("paramserver", "measured", case="loss", kind="DiLoCo")
    assert diloco["loss_over_data_parallel"] > 1.05
    assert diloco["steps"] == equal["steps"] == 2000
    assert diloco["size"] == equal["size"] == "mini"
