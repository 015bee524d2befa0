"""Sentences of the answers agree with the rows beside them; new rows refute old sentences."""

import itertools

import pytest
from workspace import script

COMPUTED = script("computed")
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


def kernels(context, phase):
    return row("kernels", context=context, phase=phase)


def warm_up(process, warmup, batch=4):
    return row("warmup", process=process, warmup=warmup, batch=batch)


def attention(seq, kernel, which, width=16):
    return row("attention_time", seq=seq, head_dim=width, **{"pass": which})[f"{kernel}_ms"]


def half(size, phase):
    """Return how many times as fast a phase is in bfloat16 as in float32."""
    full, less = (row("precision", size=size, dtype=dtype) for dtype in ("fp32", "bf16"))
    return full[f"{phase}_mean_ms"] / less[f"{phase}_mean_ms"]


def two_hosts(design, column="step_ms"):
    measured = result("ddp", "two-hosts", case="step", workload="transformer", design=design)
    return measured[column]


def all_reduce(world, size, algorithm="auto"):
    measured = result(
        "collectives",
        "one-host",
        case="all_reduce",
        algorithm=algorithm,
        world=world,
        size_bytes=size,
    )
    return measured["busbw_gbps"]


def bits(count, column):
    return row("digits", case="bits", bits=count)[column]


def rows_of_policies(case):
    """Return the rows of one case of paramserver, in the order of the page."""
    return [result("paramserver", "measured", case=case, kind=kind) for kind in POLICIES[case]]


def compressed(method, column):
    return result("llmsys-suite", "measured", case="compress", method=method)[column]


def optimum(fit, compute):
    return row("isoflop", fit=fit, compute=compute)["parameters"]


def sharded(name, column):
    return result("zero", "two-hosts", case="step", name=name)[column]


def rates(optimizer, steps, noise, task="linear"):
    return row("rates", task=task, optimizer=optimizer, steps=steps, label_noise=noise)


def gpu_step(size):
    return result("llmsys-suite", "gpu_steps", case="step", size=size)["step_p50_ms"]


def gpu_rate(which):
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


def lowest(task, optimizer, batch):
    """Return the rate of a curve that has the least loss."""
    curve = row("rate_curves", task=task, optimizer=optimizer, batch=batch)["curve"]
    return min(curve, key=lambda point: point[1])[0]


def swept(workload):
    return [row for row in RESULTS if (row["case"], row["workload"]) == ("sweep", workload)]


def least(workload, column):
    return min(swept(workload), key=lambda entry: entry[column])["design"]


RESULTS = script("measure").newest("ddp", "two-hosts")["rows"]
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
        warm_up("cold", 1)["forward_std_ms"]
        < (warm_up("cold", 0)["forward_std_ms"] + warm_up("cold", 5)["forward_std_ms"]) / 2
    ),
    "a warm one: steps of warm-up make no difference beyond the deviation": lambda: (
        abs(warm_up("warm", 0)["forward_mean_ms"] - warm_up("warm", 5)["forward_mean_ms"])
        < warm_up("warm", 0)["forward_std_ms"] + warm_up("warm", 5)["forward_std_ms"]
    ),
    "a batch of 32 does not hide it": lambda: (
        warm_up("cold", 0, 32)["forward_std_ms"] > 2 * warm_up("cold", 1, 32)["forward_std_ms"]
    ),
    "the same top operator forward and backward": lambda: all(
        entry["top_operators"].startswith("mm x ")
        for entry in rows("kernels")
        if entry["phase"] != "optimizer"
    ),
    "an optimizer has no products": lambda: kernels(128, "optimizer")["matrix_products"] == 0,
    "softmax takes much time for its operations": lambda: (
        kernels(1024, "forward")["softmax"] > 0.1 * kernels(1024, "forward")["attention_products"]
    ),
    "the optimizer takes longer where memory is returned, at a short context": lambda: (
        row("allocator", context=128, memory="returned")["optimizer_ms"]
        > 1.3 * row("allocator", context=128, memory="kept")["optimizer_ms"]
    ),
    "half precision pays, and more for the larger model": lambda: (
        1 < half("tiny", "forward") < half("small", "forward")
        and 1 < half("tiny", "backward") < half("small", "backward")
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
        lowest("linear", "sgd", 64) / lowest("linear", "sgd", 1)
        > lowest("linear", "adam", 64) / lowest("linear", "adam", 1)
        > 1
        and lowest("mlp", "sgd", 64) / lowest("mlp", "sgd", 1)
        > lowest("mlp", "adam", 64) / lowest("mlp", "adam", 1)
        > 1
    ),
    "predictions for a GPU start from the steps and rates of the tables beside them": lambda: (
        gpu_step("small") == NEAR(63.3, abs=0.05)
        and gpu_step("medium") == NEAR(137.8, abs=0.05)
        and gpu_rate("forward") == NEAR(397, abs=0.5)
        and gpu_rate("backward") == NEAR(329, abs=0.5)
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
        attention(seq, "compiled", "forward", width) > attention(seq, "plain", "forward", width)
        for seq in (256, 512)
        for width in (16, 128)
    ),
    "compiling: from 1,024 on both passes gain, the backward pass more": lambda: all(
        0
        < attention(seq, "plain", "forward", width) - attention(seq, "compiled", "forward", width)
        < attention(seq, "plain", "backward", width) - attention(seq, "compiled", "backward", width)
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
        all_reduce(2, 1024, algorithm) / all_reduce(6, 1024, algorithm)
        > all_reduce(2, 104857600, algorithm) / all_reduce(6, 104857600, algorithm)
        for algorithm in ("auto", "gloo")
    ),
    "flat gains nothing to speak of over naive": lambda: (
        two_hosts("flat") == NEAR(two_hosts("naive"), rel=0.1)
    ),
    "overlap beats flat, and buckets beat single parameters": lambda: (
        two_hosts("10 MB") < two_hosts("overlapped") < two_hosts("flat")
    ),
    "the largest buckets are the worst of the overlapped ones": lambda: (
        max(two_hosts("100 MB"), two_hosts("1000 MB"))
        > max(two_hosts("1 MB"), two_hosts("10 MB"), two_hosts("overlapped"))
    ),
    "10 MB is the fastest bucket on that link": lambda: (
        two_hosts("10 MB") == min(two_hosts(f"{size} MB") for size in ("1", "10", "25", "100"))
    ),
    "the overhead's least is where it is predicted if the backward pass is long": lambda: (
        least("transformer", "model_ms") != least("transformer", "after_backward_ms")
        and least("busy_transformer", "model_ms")
        == least("busy_transformer", "after_backward_ms")
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
        max(rates("adam", steps, 8.0)[f"batch_{2**k}"] for k in range(9))
        > 1.2 * rates("adam", steps, 8.0)["batch_256"]
        for steps in (20, 100)
    ),
    "without it none that lasts": lambda: (
        rates("adam", 100, 0.0)["batch_256"]
        == max(rates("adam", 100, 0.0)[f"batch_{2**k}"] for k in range(9))
    ),
    "with label noise every rate of SGD is lower": lambda: all(
        rates("sgd", 10, 8.0)[f"batch_{2**k}"] < rates("sgd", 10, 0.0)[f"batch_{2**k}"]
        for k in range(9)
    ),
    "layers lie between a flat distribution and a normal one": lambda: all(
        0.289 < entry["within_half_std"] < 0.383 for entry in rows("digits", case="histogram")
    ),
    "the best run of each budget is off by a third at 1e24, and its sizes fall once": lambda: (
        optimum("best run of each", 1e24) / optimum("a parabola each", 1e24)
        == NEAR(2 / 3, abs=0.05)
        and optimum("best run", 6e20) > optimum("best run", 1e21)
        and optimum("the same, with an offset", 1e24) < optimum("best run of each", 1e24)
    ),
    "stages 1 and 2 cost no time over data parallelism, stage 3 some": lambda: (
        sharded("stage1", "time_ms") == NEAR(sharded("ddp", "time_ms"), rel=0.05)
        and sharded("stage2", "time_ms") == NEAR(sharded("ddp", "time_ms"), rel=0.05)
        and sharded("stage3", "time_ms") > 1.05 * sharded("ddp", "time_ms")
        and sharded("stage3", "sent_over_parameters") < 1.51
    ),
    "SGD has no surge, with noise or without": lambda: all(
        rates("sgd", 10, noise)[f"batch_{2**k}"] < rates("sgd", 10, noise)[f"batch_{2 ** (k + 1)}"]
        for noise in (0.0, 8.0)
        for k in range(8)
    ),
    "k-means errs less at every width": lambda: all(
        bits(count, "kmeans_error") < bits(count, "linear_error") for count in (8, 6, 4, 3, 2)
    ),
    "k-means is the smaller at 4 bits and below, the larger from 6 on": lambda: all(
        (bits(count, "kmeans_bytes") < bits(count, "linear_bytes")) == (count <= 4)
        for count in (8, 6, 4, 3, 2)
    ),
    "no image is lost by k-means down to 2 bits, by linear down to 3": lambda: all(
        bits(count, f"{kind}_accuracy") >= bits(8, f"{kind}_accuracy")
        for kind, widths in (("kmeans", (6, 4, 3, 2)), ("linear", (6, 4, 3)))
        for count in widths
    ),
    "palettes and grids are no faster, integer products are": lambda: (
        max(compressed(method, "speedup_p50") for method in ("k-means, 4 bits", "linear, 4 bits"))
        < 1.1
        and compressed("8 bits, activations too", "speedup_p50") > 1.2
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_rows_agree_with_the_sentence(sentence):
    assert SENTENCES[sentence](), sentence


def test_bounded_waiting_is_faster_with_one_slow_worker():
    bulk, stale, free = rows_of_policies("target")
    assert stale["over_bulk_p50"] < stale["last_over_bulk_p50"] < 1
    assert free["over_bulk_p50"] < free["last_over_bulk_p50"] < 1
    assert bulk["over_bulk_p50"] == 1


def test_fewer_exchanges_compute_more_on_a_slow_link_at_nearly_the_same_loss():
    parallel, diloco, streaming = rows_of_policies("link")
    shares = [row["computing_share"] for row in (parallel, diloco, streaming)]
    assert shares == sorted(shares)
    sent = [row["sent_bytes_a_step"] for row in (parallel, diloco, streaming)]
    assert sent == sorted(sent, reverse=True)
    equal = result("paramserver", "equal-loss", kind=streaming["kind"])
    assert 1 < equal["loss_over_data_parallel"] < 1.01
    diloco = result("paramserver", "measured", case="loss", kind="DiLoCo")
    assert diloco["loss_over_data_parallel"] > 1.05
    assert diloco["steps"] == equal["steps"] == 2000
    assert diloco["size"] == equal["size"] == "mini"
