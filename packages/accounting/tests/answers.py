"""Questions of coursework in LLM systems, each with the call that answers it.

`ANSWERS` is data: a question, the call as text (evaluated in `NAMESPACE`, so that what is printed
is what was run), the value expected, and how far a result may be off. Values were derived by hand
or taken from the publication that the question names; derivations stand beside them.
"""

from dataclasses import dataclass
from typing import Any

from accounting import (
    HARDWARE,
    PRECISIONS,
    Plan,
    Transformer,
    communication,
    fermi,
    flops,
    kv_cache,
    mfu,
    parameters,
    roofline,
    training_memory,
)
from accounting.flops import compute_utilization
from accounting.memory.activations import count_activation_bytes
from accounting.memory.states import count_state_bytes
from accounting.search.plans import find_fewest_devices
from accounting.time.mesh import compute_bound_batch
from published_models import PUBLISHED


@dataclass(frozen=True)
class Answer:
    id: str
    question: str
    call: str
    value: Any
    unit: str
    derivation: str
    tolerance: float = 0.0
    """Relative; 0 asks for equality."""

    def compute(self) -> Any:
        """Evaluate the call."""
        return eval(self.call, NAMESPACE)


GPT2 = Transformer(layers=12, d_model=768, heads=12, vocab_size=50257)
DEEPSEEK_MHA = Transformer(layers=61, d_model=7168, heads=128, head_dim=128, vocab_size=0)
DEEPSEEK_MQA = Transformer(
    layers=61, d_model=7168, heads=128, kv_heads=1, head_dim=128, vocab_size=0
)
_LARGE = {"layers": 64, "d_model": 8192, "heads": 32, "vocab_size": 65536}
_PLAIN = {"gated_mlp": False, "norm": "none"}
LARGE = Transformer(**_LARGE, **_PLAIN, tied=True)
LARGE_UNTIED = Transformer(**_LARGE, **_PLAIN)
LAYER_TABLE = Transformer(layers=32, d_model=4096, heads=32, vocab_size=0, **_PLAIN)
XXL = Transformer(
    layers=126,
    d_model=16384,
    heads=0,
    d_ff=53248,
    vocab_size=0,
    activation="relu",
    **_PLAIN,
)
PALM = Transformer(
    layers=118,
    d_model=18432,
    heads=48,
    kv_heads=1,
    head_dim=256,
    vocab_size=256_000,
    tied=True,
    norms_per_layer=1,
    parallel_block=True,
)


def course_model(d_model: int, d_ff: int, layers: int, heads: int) -> Transformer:
    """SwiGLU with three matrices, RMSNorm, rotary positions, an untied head, 10,000 tokens."""
    return Transformer(layers=layers, d_model=d_model, heads=heads, d_ff=d_ff, vocab_size=10_000)


COURSE = {
    "small": course_model(768, 3072, 12, 12),
    "medium": course_model(1024, 4096, 24, 16),
    "large": course_model(1280, 5120, 36, 20),
    "xl": course_model(1600, 6400, 48, 25),
    "2.7B": course_model(2560, 10240, 32, 32),
    "10B": course_model(4608, 12288, 50, 36),
}
MODELS = {"deepseek-v3": Transformer.from_hf(PUBLISHED["deepseek-v3"].config)}
_CALLS = (
    count_activation_bytes,
    communication,
    compute_bound_batch,
    find_fewest_devices,
    flops,
    kv_cache,
    mfu,
    count_state_bytes,
    parameters,
    roofline,
    training_memory,
    compute_utilization,
)
NAMESPACE: dict[str, Any] = {call.__name__: call for call in _CALLS} | {
    "COURSE": COURSE,
    "DEEPSEEK_MHA": DEEPSEEK_MHA,
    "DEEPSEEK_MQA": DEEPSEEK_MQA,
    "GPT2": GPT2,
    "HARDWARE": HARDWARE,
    "LARGE": LARGE,
    "LARGE_UNTIED": LARGE_UNTIED,
    "LAYER_TABLE": LAYER_TABLE,
    "MODELS": MODELS,
    "PALM": PALM,
    "PRECISIONS": PRECISIONS,
    "Plan": Plan,
    "XXL": XXL,
    "fermi": fermi,
}

_DATA = "communication(LAYER_TABLE, Plan(data=8))['gradients']"
_PIPELINE = "communication(LAYER_TABLE, Plan(pipeline=8), batch=128, seq=4096, stage=1)"
_TENSOR = "communication(LAYER_TABLE, Plan(tensor=8), batch=128, seq=4096)"
_FSDP = "communication(LAYER_TABLE, Plan(data=8, zero=3))"
_MESH = "d_ff=53248, fsdp_axes=2, flops_per_second=4.6e14, axis_bytes_per_second=1.8e11"
_XXL_STATES = "training_memory(XXL, batch=0, seq=1, precision='fp32')"

ANSWERS = [
    Answer("a1.1", "head dimension at d=768 and 12 heads", "GPT2.head_dim", 64, "", "768/12"),
    Answer(
        "a1.2",
        "cost of one token's attention with a KV cache: ratio at 4000 and at 1000 tokens",
        "flops(GPT2, seq=4000, phase='decode')['attention'].total "
        "/ flops(GPT2, seq=1000, phase='decode')['attention'].total",
        4,
        "",
        "4 s d per layer: linear in the sequence, O(s d)",
    ),
    Answer(
        "a1.3",
        "dtype of the master weights of DeepSeek-V3's optimizer",
        "PRECISIONS['deepseek_v3'].master",
        "fp32",
        "",
        "report, section 3.3: master weights and gradients FP32, moments BF16",
    ),
    Answer(
        "a1.4a",
        "KV entries per token, MHA",
        "kv_cache(DEEPSEEK_MHA, dtype='int8').total",
        1_998_848,
        "entries",
        "2*61*128*128",
    ),
    Answer(
        "a1.4b",
        "KV entries per token, MQA",
        "kv_cache(DEEPSEEK_MQA, dtype='int8').total",
        15_616,
        "entries",
        "2*61*1*128",
    ),
    Answer(
        "a1.4c",
        "KV entries per token, MLA as in DeepSeek-V3",
        "kv_cache(MODELS['deepseek-v3'], dtype='int8').total",
        35_136,
        "entries",
        "61*(512+64)",
    ),
    Answer(
        "a1.5a",
        "parameters at L=64, d=8192, 32 heads, vocabulary 65536, one embedding",
        "parameters(LARGE).total",
        52_076_478_464,
        "parameters",
        "64*(4*8192^2 + 8*8192^2) + 65536*8192",
    ),
    Answer(
        "a1.5b",
        "the same with an untied head",
        "parameters(LARGE_UNTIED).total",
        52_613_349_376,
        "parameters",
        "+ 65536*8192",
    ),
    Answer(
        "a1.5c",
        "parameters of its blocks only",
        "parameters(LARGE).total - parameters(LARGE)['embedding'].total",
        51_539_607_552,
        "parameters",
        "64*12*8192^2",
    ),
    Answer(
        "a1.5d",
        "bytes of the model with one embedding in bf16",
        "2 * parameters(LARGE).total",
        104_152_956_928,
        "B",
        "2*52,076,478,464 = 97 GiB",
    ),
    Answer(
        "c1.1",
        "TF32 peak of an A100",
        "HARDWARE['A100'].peak('tf32')",
        155_934_720_000_000,
        "FLOP/s",
        "1.41e9*108*512*2",
    ),
    Answer(
        "c1.2a",
        "intensity of fp16 (4096x4096)@(4096x4096)",
        "roofline('A100', shape=(4096, 4096, 4096)).intensity",
        4096 / 3,
        "FLOP/B",
        "2mkn / 2(mk+kn+mn)",
        1e-12,
    ),
    Answer(
        "c1.2b",
        "intensity of fp16 (4096x32)@(32x4096)",
        "roofline('A100', shape=(4096, 32, 4096)).intensity",
        1_073_741_824 / 34_078_720,
        "FLOP/B",
        "2mkn / 2(mk+kn+mn)",
        1e-12,
    ),
    Answer(
        "c1.2c",
        "intensity of fp16 (32x4096)@(4096x32)",
        "roofline('A100', shape=(32, 4096, 32)).intensity",
        8_388_608 / 526_336,
        "FLOP/B",
        "2mkn / 2(mk+kn+mn)",
        1e-12,
    ),
    Answer(
        "c2.0",
        "parameters of the layer table (32 layers, d=4096)",
        "parameters(LAYER_TABLE).total",
        6_442_450_944,
        "parameters",
        "32*12*4096^2",
    ),
    Answer(
        "c2.1a",
        "data parallel all-reduce over 8 GPUs, fp16 gradients, counted once",
        f"{_DATA}.payload",
        12_884_901_888,
        "B",
        "2*6,442,450,944",
    ),
    Answer(
        "c2.1b",
        "the same, sent by each GPU of a ring",
        f"{_DATA}.wire",
        22_548_578_304,
        "B",
        "2*(7/8)*payload",
    ),
    Answer(
        "c2.1c",
        "the same, sent by all 8",
        f"8 * {_DATA}.wire",
        180_388_626_432,
        "B",
        "8 * the above",
    ),
    Answer(
        "c2.2a",
        "GPipe, 8 stages, batch 128 x 4096: forward over one boundary",
        f"{_PIPELINE}['activations to the next stage'].payload",
        4_294_967_296,
        "B",
        "128*4096*4096*2",
    ),
    Answer(
        "c2.2b",
        "the same, backward",
        f"{_PIPELINE}['gradients to the previous stage'].payload",
        4_294_967_296,
        "B",
        "gradients of the activations",
    ),
    Answer(
        "c2.2c",
        "the same, all 7 boundaries in both directions",
        f"7 * {_PIPELINE}.payload.total",
        60_129_542_144,
        "B",
        "7*2*4 GiB",
    ),
    Answer(
        "c2.3a",
        "tensor parallel over 8: all-reduces of an iteration, counted once",
        f"{_TENSOR}.payload.total",
        549_755_813_888,
        "B",
        "4 per layer (two forward, two backward) * 32 * 128*4096*4096*2",
    ),
    Answer(
        "c2.3b",
        "the same, sent by each GPU of a ring",
        f"{_TENSOR}.wire.total",
        962_072_674_304,
        "B",
        "1.75*payload",
    ),
    Answer(
        "c2.4a",
        "FSDP over 8: all-gather of weights, counted once",
        f"{_FSDP}['weights'].payload",
        25_769_803_776,
        "B",
        "forward and backward, 2*12,884,901,888",
    ),
    Answer(
        "c2.4b",
        "FSDP: reduce-scatter of gradients, counted once",
        f"{_FSDP}['gradients'].payload",
        12_884_901_888,
        "B",
        "2*6,442,450,944",
    ),
    Answer(
        "c2.4c",
        "FSDP: all-gather, sent by each GPU",
        f"{_FSDP}['weights'].wire",
        22_548_578_304,
        "B",
        "(7/8)*payload",
    ),
    Answer(
        "c2.4d",
        "FSDP: reduce-scatter, sent by each GPU",
        f"{_FSDP}['gradients'].wire",
        11_274_289_152,
        "B",
        "(7/8)*payload",
    ),
    Answer(
        "m1.1d",
        "residual stream of the 2.7B model in fp32, batch 4, context 512",
        "4 * 512 * COURSE['2.7B'].d_model * 4",
        20 * 2**20,
        "B",
        "4*512*2560*4 = 20 MiB; 5, 10, 40 MiB at context 128, 256, 1024",
    ),
    Answer(
        "m1.2",
        "one score matrix in fp32, batch 8, 16384 tokens",
        "8 * 16384 * 16384 * 4",
        8_589_934_592,
        "B",
        "8*16384^2*4",
    ),
    Answer(
        "x.p",
        "parameters of the XXL model",
        "parameters(XXL).total",
        219_848_638_464,
        "parameters",
        "126*2*16384*53248",
    ),
    Answer(
        "x.a1",
        "its fp32 weights, gradients and Adam states",
        f"{_XXL_STATES}.total",
        3_517_578_215_424,
        "B",
        "16 B per parameter",
    ),
    Answer(
        "x.a2",
        "its activations for the backward in bf16, per token",
        "count_activation_bytes(XXL, batch=1, seq=1, precision='bf16').total",
        17_547_264,
        "B/token",
        "2*126*(16384+53248): the inputs of both linear layers",
    ),
    Answer(
        "x.a3",
        "80 GB devices that hold its states",
        "find_fewest_devices(XXL, memory_bytes=80e9)",
        44,
        "devices",
        "ceil(3517.58 / 80)",
    ),
    Answer(
        "x.b1",
        "bytes per device at N=64, 4096 tokens, half the activations sharded",
        "training_memory(XXL, Plan(data=64, zero=3), batch=0, seq=1).total "
        "+ count_activation_bytes(XXL, batch=1, seq=4096, precision='bf16').total * (1 + 1/64) / 2",
        16 * 219_848_638_464 / 64 + 17_547_264 * 4096 / 2 + 17_547_264 * 4096 / 128,
        "B",
        "16P/N + A/2 + A/(2N)",
        1e-12,
    ),
    Answer(
        "x.b2",
        "devices under 95 GB, activations ignored",
        "find_fewest_devices(XXL, memory_bytes=95e9)",
        38,
        "devices",
        "ceil(3517.58 / 95)",
    ),
    *(
        Answer(
            f"x.b3.{tokens}",
            f"the same with the activations of {tokens} tokens per device, half of them sharded",
            f"find_fewest_devices(XXL, memory_bytes=95e9, activation_bytes={tokens} * 17_547_264, "
            "sharded_activations=0.5)",
            value,
            "devices",
            "16P/N + A/2 + A/(2N) <= 95e9, A = 17,547,264 per token",
        )
        for tokens, value in ((1024, 41), (2048, 46), (4096, 61), (8192, 156))
    ),
    Answer(
        "x.c0",
        "alpha of a TPU v5p: FLOP per byte of link",
        f"compute_bound_batch(fsdp=16, tensor=4, {_MESH}).alpha",
        4.6e14 / 1.8e11,
        "FLOP/B",
        "4.6e14/1.8e11",
        1e-9,
    ),
    Answer(
        "x.c1",
        "compute-bound batch per device at X=16, Y=4, M_X=2, M_Y=1, comms summed",
        f"compute_bound_batch(fsdp=16, tensor=4, {_MESH}).per_device",
        395.3392281629618,
        "tokens/device",
        "F/(Y M_X) + B/(X M_Y) < B F/(N alpha)",
        1e-9,
    ),
    Answer(
        "x.c2",
        "the same, whole batch",
        f"compute_bound_batch(fsdp=16, tensor=4, {_MESH}).tokens",
        25301.710602429554,
        "tokens",
        "64 * the above",
        1e-9,
    ),
    Answer(
        "x.c3",
        "the same per device, comms overlapped",
        f"compute_bound_batch(fsdp=16, tensor=4, comms='overlapped', {_MESH}).per_device",
        319.44444444444446,
        "tokens/device",
        "alpha/(Y M_X)",
        1e-9,
    ),
    Answer(
        "x.c4",
        "the lowest compute-bound batch per device over all X, 64 devices, comms summed",
        "4 * (4.6e14 / 1.8e11) ** 2 / (2 * 1 * 53248)",
        245.29988722697058,
        "tokens/device",
        "4 alpha^2 / (M_X M_Y F), at X = 6.14",
        1e-9,
    ),
    *(
        Answer(
            f"cs336.{name}",
            f"parameters of the {name} model",
            f"parameters(COURSE[{name!r}]).total",
            value,
            "parameters",
            "L(4d^2 + 3 d d_ff + 2d) + 2Vd + d",
        )
        for name, value in (
            ("small", 128_625_408),
            ("medium", 423_183_360),
            ("large", 969_411_840),
            ("xl", 1_998_235_200),
            ("2.7B", 3_406_809_600),
            ("10B", 12_832_823_808),
        )
    ),
    Answer(
        "z3.a",
        "weights, gradients and AdamW state of the xl model in fp32 on one GPU",
        "training_memory(COURSE['xl'], batch=0, seq=1).total / 2**30",
        29.776,
        "GiB",
        "16 B per parameter",
        1e-4,
    ),
    Answer(
        "z3.a2",
        "the same with the optimizer sharded over two",
        "training_memory(COURSE['xl'], Plan(data=2, zero=1), batch=0, seq=1).total / 2**30",
        22.332,
        "GiB",
        "12 B per parameter",
        1e-4,
    ),
    Answer(
        "l1d",
        "bytes of a rank-8 update of a 4096x4096 matrix in fp32",
        "4 * 8 * (4096 + 4096)",
        262_144,
        "B",
        "4k(m+l), 1/256 of 4ml",
    ),
    Answer(
        "s6b",
        "parameters of a soft prompt of 5 vectors",
        "5 * GPT2.embedding_dim",
        3_840,
        "parameters",
        "5 E, E = 768",
    ),
    Answer(
        "f.c1",
        "computation of a model of 1e14 parameters",
        "fermi.flops_for_scale(1e14)",
        1e30,
        "FLOP",
        "(1e14/0.1)^2",
    ),
    Answer(
        "f.c2",
        "tokens that go with it",
        "fermi.tokens_for_flops(1e30)",
        1.7e15,
        "tokens",
        "1.7*1e15",
    ),
    Answer(
        "f.d1",
        "words in 1e15 tokens",
        "1e15 / fermi.TOKENS_PER_WORD",
        7.142857e14,
        "words",
        "/1.4",
        1e-6,
    ),
    Answer(
        "f.d2",
        "books in 1e15 tokens",
        "fermi.books(1e15)",
        5.952381e9,
        "books",
        "/1.4/400/300",
        1e-6,
    ),
    Answer("f.e1", "weights of 1B in bf16", "2 * 1e9", 2e9, "B", "2 B each"),
    Answer("f.e2", "weights of 1T", "2 * 1e12", 2e12, "B", "2 B each"),
    Answer(
        "f.e3",
        "H200s that hold 1T at 100 GB each",
        "2 * 1e12 / 100e9",
        20,
        "devices",
        "2e12/1e11",
    ),
    Answer(
        "f.e4",
        "H200s that hold 100T at 100 GB each",
        "2 * 1e14 / 100e9",
        2000,
        "devices",
        "2e14/1e11",
    ),
    Answer(
        "f.f1",
        "100T on SSD for a year",
        "2e14 / 1e6 * fermi.SSD_USD_PER_MB_YEAR",
        10_000,
        "USD",
        "2e8 MB * price",
        1e-12,
    ),
    Answer(
        "f.f2",
        "100T in DRAM for a year",
        "2e14 / 1e6 * fermi.DRAM_USD_PER_MB_YEAR",
        800_000,
        "USD",
        "2e8 MB * price",
        1e-12,
    ),
    Answer(
        "f.g1",
        "seconds per token, 100T in bf16 on an H200",
        "fermi.seconds_per_token(2e14)",
        41.666667,
        "s",
        "2e14/4.8e12",
        1e-6,
    ),
    Answer(
        "f.g1b",
        "tokens per minute",
        "60 / fermi.seconds_per_token(2e14)",
        1.44,
        "",
        "60/41.67",
        1e-9,
    ),
    Answer(
        "f.g2",
        "seconds per token, GPT-3 in bf16",
        "fermi.seconds_per_token(3.5e11)",
        0.0729166667,
        "s",
        "3.5e11/4.8e12",
        1e-6,
    ),
    Answer(
        "f.g2b",
        "tokens per minute",
        "60 / fermi.seconds_per_token(3.5e11)",
        822.857143,
        "",
        "60/0.0729",
        1e-6,
    ),
    Answer(
        "f.g3",
        "activations of GPT-3, per token",
        "fermi.activation_bytes_per_token(96, 96, 128)",
        2_359_296,
        "B",
        "96*96*128*2",
    ),
    Answer(
        "f.g4",
        "tokens whose activations equal the weights",
        "350e9 / fermi.activation_bytes_per_token(96, 96, 128)",
        148349.33810763888,
        "tokens",
        "350e9/2,359,296",
        1e-9,
    ),
    Answer("f.h1", "FLOP of a petaflop/s-day", "fermi.PETAFLOP_DAY", 8.64e19, "FLOP", "1e15*86400"),
    Answer(
        "f.h1b",
        "H200-hours of a petaflop/s-day",
        "fermi.gpu_hours(fermi.PETAFLOP_DAY)",
        12.12121,
        "h",
        "8.64e19/1.98e15/3600",
        1e-6,
    ),
    Answer(
        "f.h1c",
        "price of a petaflop/s-day",
        "fermi.training_usd(fermi.PETAFLOP_DAY)",
        18.18182,
        "USD",
        "1.5 USD per hour",
        1e-6,
    ),
    Answer(
        "f.h2",
        "price of the training of GPT-3 (3640 PF-days) on H200s",
        "fermi.training_usd(3640 * fermi.PETAFLOP_DAY)",
        66181.81818181818,
        "USD",
        "3640*18.18",
        1e-9,
    ),
    Answer(
        "f.h3",
        "price of 1e30 FLOP on H200s",
        "fermi.training_usd(1e30)",
        210437710437.71045,
        "USD",
        "1e30/1.98e15/3600*1.5",
        1e-9,
    ),
    Answer(
        "f.h4",
        "time of 1e30 FLOP on 30 million H200s",
        "fermi.gpu_hours(1e30) / 30_000_000",
        4676.393565282454,
        "h",
        "194.85 days; 649.5 at 30 %",
        1e-9,
    ),
    Answer(
        "f.j1",
        "a million tokens from 1T parameters",
        "fermi.inference_flops(1e12, 1e6)",
        2e18,
        "FLOP",
        "2ND",
    ),
    Answer(
        "f.j1b",
        "its time on one H200",
        "3600 * fermi.gpu_hours(2e18)",
        1010.10101,
        "s",
        "2e18/1.98e15",
        1e-6,
    ),
    Answer(
        "f.j1c",
        "its price",
        "fermi.GPU_HOUR_USD * fermi.gpu_hours(2e18)",
        0.42087542,
        "USD",
        "1010.1 s at 1.5 USD per hour",
        1e-6,
    ),
    Answer(
        "f.j2",
        "tokens to recoup 1e9 USD at 120 USD per million",
        "1e9 / 120 * 1e6",
        8.3333333e12,
        "tokens",
        "1e9/120*1e6",
        1e-6,
    ),
    Answer(
        "f.j2b",
        "the same in essays",
        "1e9 / 120 * 1e6 / fermi.TOKENS_PER_ESSAY",
        5.95238095e9,
        "essays",
        "/1400",
        1e-6,
    ),
    Answer(
        "f.k1",
        "least energy of an operation that erases 32 bits at 300 K",
        "fermi.landauer_joule_per_flop()",
        9.187132432251917e-20,
        "J",
        "32 kT ln 2",
        1e-9,
    ),
    Answer(
        "f.k2",
        "least power at 1.98e15 FLOP/s",
        "fermi.landauer_watts()",
        1.81905e-4,
        "W",
        "rate * energy",
        1e-5,
    ),
    Answer(
        "f.k2b",
        "how far above it 700 W are",
        "fermi.H200_WATTS / fermi.landauer_watts()",
        3.848e6,
        "",
        "700 W / least power",
        1e-4,
    ),
    Answer(
        "f.l1",
        "carbon cost of GPT-3",
        "fermi.GPT3_TONNES_CO2 * fermi.CO2_USD_PER_TONNE",
        61_824,
        "USD",
        "552*112",
    ),
    Answer(
        "f.l1b",
        "as a fraction of 6 million USD",
        "fermi.GPT3_TONNES_CO2 * fermi.CO2_USD_PER_TONNE / fermi.GPT3_COST_USD",
        0.010304,
        "",
        "61,824/6e6",
        1e-9,
    ),
    Answer(
        "f.l2",
        "burgers that cause the emissions of GPT-3's training",
        "1000 * fermi.GPT3_TONNES_CO2 / (fermi.BURGER_KG * fermi.BEEF_KG_CO2_PER_KG)",
        97699.115,
        "burgers",
        "552000/(0.113*50)",
        1e-8,
    ),
    Answer(
        "r.palm",
        "MFU of PaLM-540B, 238.3k tokens/s on 6144 TPU v4",
        "mfu(PALM, tokens_per_second=238.3e3, seq=2048, devices=6144, peak_flops=275e12, "
        "attention='full')",
        0.4623,
        "",
        "published 46.2 %",
        1e-3,
    ),
    Answer(
        "r.palm2",
        "the same without attention",
        "mfu(PALM, tokens_per_second=238.3e3, seq=2048, devices=6144, peak_flops=275e12, "
        "include_attention=False)",
        0.4573,
        "",
        "published 45.7 %",
        1e-3,
    ),
    *(
        Answer(
            f"r.l405.{rate}",
            f"MFU of Llama-3 405B at {rate} TFLOP/s per H100",
            f"compute_utilization({rate}e12, hardware='H100')",
            value,
            "",
            "/989.4e12",
            1e-3,
        )
        for rate, value in ((430, 0.4346), (400, 0.4043), (380, 0.3841))
    ),
    Answer(
        "r.l405f",
        "training FLOPs of Llama-3 405B",
        "fermi.training_flops(405e9, 15.6e12)",
        3.8e25,
        "FLOP",
        "6ND; published 3.8e25",
        0.01,
    ),
    Answer(
        "r.gpt3",
        "petaflop/s-days of GPT-3",
        "fermi.training_flops(175e9, 300e9) / fermi.PETAFLOP_DAY",
        3640,
        "PF-day",
        "6ND/8.64e19; published 3,640",
        0.01,
    ),
    Answer(
        "r.dsv3h",
        "H800-hours of DeepSeek-V3's pre-training",
        "14.8 * 180e3",
        2.664e6,
        "h",
        "14.8T tokens at 180k hours per trillion",
        1e-9,
    ),
    Answer(
        "r.dsv3",
        "price of all its training",
        "2.788e6 * 2",
        5.576e6,
        "USD",
        "2.788M hours at 2 USD",
        1e-9,
    ),
    *(
        Answer(
            f"r.zero{stage}",
            f"ZeRO figure 1: 7.5B on 64 GPUs, stage {stage}",
            f"count_state_bytes(7_500_000_000, data=64, zero={stage}).total / 1e9",
            value,
            "GB",
            "16P; 4P+12P/N; 2P+14P/N; 16P/N",
            0.01,
        )
        for stage, value in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.88))
    ),
]
