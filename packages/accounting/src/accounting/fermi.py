"""Order-of-magnitude estimates of compute, memory, time, money and energy for large models.

An estimate is a function, or a product of the constants of this module. Constants without a source
are conventions, such as words per page, or rounded orders of magnitude.
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


@checks.validate()
def training_flops(parameters: float, tokens: float) -> float:
    """Return C = 6ND: two forward and four backward operations per parameter and token.

    See Kaplan et al. 2020.
    """
    return 6.0 * parameters * tokens


@checks.validate()
def flops_for_scale(parameters: float, *, parameters_per_root_flop: float = 0.1) -> float:
    """Return the compute in FLOPs at which N `parameters` are optimal: C = (N / c)^2.

    The assumed law is N = c sqrt(C), where c is `parameters_per_root_flop`.
    """
    return (parameters / parameters_per_root_flop) ** 2


@checks.validate()
def tokens_for_flops(flops: float, *, tokens_per_root_flop: float = 1.7) -> float:
    """Return the optimal number of tokens D = c sqrt(C); c is `tokens_per_root_flop`."""
    return tokens_per_root_flop * flops**0.5


@checks.validate()
def books(
    tokens: float,
    *,
    tokens_per_word: float = TOKENS_PER_WORD,
    words_per_page: float = WORDS_PER_PAGE,
    pages_per_book: float = PAGES_PER_BOOK,
) -> float:
    """Return the number of books that `tokens` tokens correspond to."""
    return tokens / tokens_per_word / (words_per_page * pages_per_book)


@checks.validate()
def seconds_per_token(
    weights_bytes: float,
    *,
    bandwidth_bytes_per_second: float = H200_BANDWIDTH_BYTES_PER_SECOND,
) -> float:
    """Return the minimum seconds to decode one token at batch size 1: each weight is read once."""
    return weights_bytes / bandwidth_bytes_per_second


@checks.validate()
def activation_bytes_per_token(
    layers: int, heads: int, head_dim: int, *, bytes_per_value: int = 2, tensors: int = 1
) -> int:
    """Return the bytes per token of `tensors` vectors of all heads in each layer.

    A KV cache has two vectors per layer, a key and a value.
    """
    return layers * heads * head_dim * bytes_per_value * tensors


@checks.validate()
def gpu_hours(
    flops: float, *, flops_per_second: float = H200_FP8_FLOPS, utilization: float = 1.0
) -> float:
    """Return the device-hours for `flops` operations at a fraction `utilization` of the peak."""
    checks.require_number("utilization", utilization, maximum=1)
    return flops / (flops_per_second * utilization) / 3600.0


@checks.validate()
def training_usd(flops: float, *, usd_per_hour: float = GPU_HOUR_USD, **speed: float) -> float:
    """Return the rental cost in USD of `flops` operations; `speed` has options of `gpu_hours`."""
    return gpu_hours(flops, **speed) * usd_per_hour


@checks.validate()
def inference_flops(parameters: float, tokens: float) -> float:
    """Return the FLOPs 2ND of a forward pass: one multiply and add per parameter and token."""
    return 2.0 * parameters * tokens


@checks.validate()
def landauer_joule_per_flop(*, bits: int = 32, kelvin: float = 300.0) -> float:
    """Return the minimum joules of a FLOP that erases `bits` bits: kT ln 2 each (Landauer 1961)."""
    return bits * BOLTZMANN_JOULE_PER_KELVIN * kelvin * math.log(2)


@checks.validate()
def landauer_watts(
    *, flops_per_second: float = H200_FP8_FLOPS, bits: int = 32, kelvin: float = 300.0
) -> float:
    """Return the minimum power in watts of a device that erases `bits` bits per operation."""
    return flops_per_second * landauer_joule_per_flop(bits=bits, kelvin=kelvin)
