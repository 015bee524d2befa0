"""Order-of-magnitude estimates of compute, memory, time, money and energy for large models.

Each estimate is one function. Measured constants are listed with their sources. Ratios of tokens,
words and pages are conventions, not measurements.
"""

import math

from accounting import checks

BOLTZMANN_JOULE_PER_KELVIN = 1.380649e-23  # exact since the 2019 SI
PETAFLOP_DAY = 1e15 * 86_400  # operations per petaflop/s-day
# English text under a BPE vocabulary of 30-100k entries: 1.3 to 1.5 tokens per word.
TOKENS_PER_WORD = 1.4
WORDS_PER_PAGE = 400
PAGES_PER_BOOK = 300
TOKENS_PER_ESSAY = 1_400  # a thousand words
# NVIDIA H200 data sheet: dense FP8 rate (rounded), memory bandwidth and power.
H200_FP8_FLOPS = 1.98e15
H200_BANDWIDTH_BYTES_PER_SECOND = 4.8e12
H200_WATTS = 700.0
GPU_HOUR_USD = 1.5  # a rental price; pass your own
# Orders of magnitude; prices change.
SSD_USD_PER_MB_YEAR = 5e-5
DRAM_USD_PER_MB_YEAR = 4e-3
# Patterson et al. 2021, Carbon Emissions and Large Neural Network Training, table 4 (on V100s).
GPT3_TONNES_CO2 = 552.0
CO2_USD_PER_TONNE = 112.0  # between 50 and 250 USD; 112 is their geometric mean, rounded
BEEF_KG_CO2_PER_KG = 50.0
BURGER_KG = 0.113  # a quarter pound
GPT3_COST_USD = 6e6  # a published estimate of the training cost of GPT-3


#: Options of `gpu_hours`.
_SPEED = ("flops_per_second", "utilization")


@checks.entry()
def training_flops(parameters: float, tokens: float) -> float:
    """Return C = 6ND: two forward and four backward operations per parameter and token.

    See Kaplan et al. 2020.
    """
    return 6.0 * parameters * tokens


@checks.entry()
def chinchilla(
    flops: float,
    *,
    alpha: float = 0.34,
    beta: float = 0.28,
    a: float = 406.4,
    b: float = 410.7,
    flops_per_parameter_token: float = 6.0,
) -> tuple[float, float]:
    """Return the parameters and tokens that minimize A/N^alpha + B/D^beta for C = 6ND.

    N = G (C/6)^(beta/(alpha+beta)), D = (C/6)/N with G = (alpha A / beta B)^(1/(alpha+beta)). The
    constants are those of Hoffmann et al. 2022, approach 3. `flops_per_parameter_token` replaces
    the 6.
    """
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    effective = flops / flops_per_parameter_token
    parameters = g * effective ** (beta / (alpha + beta))
    return parameters, effective / parameters


@checks.entry()
def flops_for_scale(parameters: float, *, parameters_per_root_flop: float = 0.1) -> float:
    """Return the compute for which a model size is optimal if N = c sqrt(C): C = (N / c)^2."""
    return (parameters / parameters_per_root_flop) ** 2


@checks.entry()
def tokens_for_flops(flops: float, *, tokens_per_root_flop: float = 1.7) -> float:
    """Return the optimal tokens for a compute budget if D = c sqrt(C)."""
    return tokens_per_root_flop * flops**0.5


@checks.entry()
def words(tokens: float, *, tokens_per_word: float = TOKENS_PER_WORD) -> float:
    """Return the number of words that `tokens` tokens correspond to."""
    return tokens / tokens_per_word


@checks.entry()
def books(
    tokens: float,
    *,
    tokens_per_word: float = TOKENS_PER_WORD,
    words_per_page: float = WORDS_PER_PAGE,
    pages_per_book: float = PAGES_PER_BOOK,
) -> float:
    """Return the number of books that `tokens` tokens correspond to."""
    return words(tokens, tokens_per_word=tokens_per_word) / (words_per_page * pages_per_book)


@checks.entry()
def devices_for_bytes(size_bytes: float, *, memory_bytes: float = 100e9) -> int:
    """Return the number of devices needed to store `size_bytes` bytes.

    The default is 100 GB of an H200's 141 GB, which leaves room for other tensors.
    """
    return math.ceil(size_bytes / memory_bytes)


@checks.entry()
def seconds_per_token(
    weights_bytes: float,
    *,
    bandwidth_bytes_per_second: float = H200_BANDWIDTH_BYTES_PER_SECOND,
) -> float:
    """Return the minimum time to decode one token at batch size 1: each weight is read once."""
    return weights_bytes / bandwidth_bytes_per_second


@checks.entry("bandwidth_bytes_per_second")
def tokens_per_minute(weights_bytes: float, **memory: float) -> float:
    """Return the maximum tokens per minute of one sequence; see `seconds_per_token`."""
    return 60.0 / seconds_per_token(weights_bytes, **memory)


@checks.entry()
def activation_bytes_per_token(
    layers: int, heads: int, head_dim: int, *, bytes_per_value: int = 2, tensors: int = 1
) -> int:
    """Return the bytes per token over all layers, with `tensors` vectors per layer.

    A KV cache has two vectors per layer, a key and a value.
    """
    return layers * heads * head_dim * bytes_per_value * tensors


@checks.entry()
def petaflop_days(flops: float) -> float:
    """Return the compute in petaflop/s-days."""
    return flops / PETAFLOP_DAY


@checks.entry()
def gpu_hours(
    flops: float, *, flops_per_second: float = H200_FP8_FLOPS, utilization: float = 1.0
) -> float:
    """Return the device-hours for a compute budget at a fraction of the peak."""
    checks.number("utilization", utilization, most=1)
    return flops / (flops_per_second * utilization) / 3600.0


@checks.entry(*_SPEED)
def training_usd(flops: float, *, usd_per_hour: float = GPU_HOUR_USD, **speed: float) -> float:
    """Return the rental cost of a compute budget; `speed` accepts the options of `gpu_hours`."""
    return gpu_hours(flops, **speed) * usd_per_hour


@checks.entry(*_SPEED)
def wall_clock_hours(flops: float, devices: int, **speed: float) -> float:
    """Return the hours on several parallel devices; `speed` accepts the options of `gpu_hours`."""
    return gpu_hours(flops, **speed) / devices


@checks.entry()
def inference_flops(parameters: float, tokens: float) -> float:
    """Return 2ND: one multiply and one add per parameter and token."""
    return 2.0 * parameters * tokens


@checks.entry("usd_per_hour", *_SPEED)
def inference_usd(parameters: float, tokens: float, **price: float) -> float:
    """Return the rental cost to generate tokens if inference is compute-bound.

    `price` accepts the options of `training_usd`.
    """
    return training_usd(inference_flops(parameters, tokens), **price)


@checks.entry()
def break_even_tokens(cost_usd: float, *, usd_per_million_tokens: float = 120.0) -> float:
    """Return the number of tokens whose sale recovers a cost."""
    return cost_usd / usd_per_million_tokens * 1e6


@checks.entry()
def essays(tokens: float, *, tokens_per_essay: float = TOKENS_PER_ESSAY) -> float:
    """Return the number of thousand-word essays that `tokens` tokens correspond to."""
    return tokens / tokens_per_essay


@checks.entry()
def landauer_joule_per_flop(*, bits: int = 32, kelvin: float = 300.0) -> float:
    """Return the minimum energy to erase some bits: kT ln 2 per bit (Landauer 1961)."""
    return bits * BOLTZMANN_JOULE_PER_KELVIN * kelvin * math.log(2)


@checks.entry()
def landauer_watts(
    *, flops_per_second: float = H200_FP8_FLOPS, bits: int = 32, kelvin: float = 300.0
) -> float:
    """Return the minimum power (Landauer limit) of a device that erases `bits` per operation."""
    return flops_per_second * landauer_joule_per_flop(bits=bits, kelvin=kelvin)


@checks.entry()
def watts_above_landauer(
    *, watts: float = H200_WATTS, flops_per_second: float = H200_FP8_FLOPS, bits: int = 32
) -> float:
    """Return the ratio of the power of a device to its Landauer limit."""
    return watts / landauer_watts(flops_per_second=flops_per_second, bits=bits)


@checks.entry()
def carbon_usd(
    tonnes_co2: float = GPT3_TONNES_CO2, *, usd_per_tonne: float = CO2_USD_PER_TONNE
) -> float:
    """Return the social cost of an emission in USD."""
    return tonnes_co2 * usd_per_tonne


@checks.entry()
def burgers(
    tonnes_co2: float = GPT3_TONNES_CO2,
    *,
    burger_kg: float = BURGER_KG,
    kg_co2_per_kg: float = BEEF_KG_CO2_PER_KG,
) -> float:
    """Return the number of quarter-pounders whose beef causes the same emission."""
    return tonnes_co2 * 1000.0 / (burger_kg * kg_co2_per_kg)
