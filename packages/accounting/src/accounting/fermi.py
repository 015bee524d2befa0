"""Estimates on the back of an envelope: what large models take in computation, memory, time, money
and energy.

Every estimate is one function with units in its name. An input may be a number or a range
(`Range(low, high)`): ranges go through every step, so that an uncertain input gives an uncertain
answer. Sources stand with the constants they are for. Ratios quoted in words (tokens, words, pages)
are conventions, not measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Union

from accounting import checks

BOLTZMANN_JOULE_PER_KELVIN = 1.380649e-23  # exact since the SI of 2019
PETAFLOP_DAY = 1e15 * 86_400  # operations in a petaflop/s-day
# English text under a BPE vocabulary of 30-100k entries: 1.3 to 1.5 tokens a word.
TOKENS_PER_WORD = 1.4
WORDS_PER_PAGE = 400
PAGES_PER_BOOK = 300
TOKENS_PER_ESSAY = 1_400  # a thousand words
# NVIDIA H200 data sheet: dense FP8, rounded, and the memory's bandwidth.
H200_FP8_FLOPS = 1.98e15
H200_BANDWIDTH_BYTES_PER_SECOND = 4.8e12
H200_WATTS = 700.0
GPU_HOUR_USD = 1.5  # a rental price, to be replaced by one's own
# Orders of magnitude, from half a cent a gigabyte-year upwards; replace as prices move.
SSD_USD_PER_MB_YEAR = 5e-5
DRAM_USD_PER_MB_YEAR = 4e-3
# Patterson et al. 2021, Carbon Emissions and Large Neural Network Training, table 4 (on V100s).
GPT3_TONNES_CO2 = 552.0
CO2_USD_PER_TONNE = 112.0  # between 50 and 250 USD; 112 is their geometric mean, rounded
BEEF_KG_CO2_PER_KG = 50.0
BURGER_KG = 0.113  # a quarter pound
GPT3_COST_USD = 6e6  # a published guess at what the training of GPT-3 cost


@dataclass(frozen=True)
class Range:
    """A positive quantity known up to an interval; arithmetic gives the interval of the result."""

    low: float
    high: float

    def __post_init__(self) -> None:
        checks.number("low", self.low)
        checks.number("high", self.high)
        if self.low > self.high:
            raise ValueError(
                f"a range runs from a positive low to high, not {self.low}..{self.high}"
            )

    @property
    def middle(self) -> float:
        """The geometric mean: the middle of an order-of-magnitude estimate."""
        return math.sqrt(self.low * self.high)

    def __mul__(self, other: Quantity) -> Range:
        other = as_range(other)
        return Range(self.low * other.low, self.high * other.high)

    def __truediv__(self, other: Quantity) -> Range:
        other = as_range(other)
        return Range(self.low / other.high, self.high / other.low)

    def __pow__(self, exponent: float) -> Range:
        ends = sorted((self.low**exponent, self.high**exponent))
        return Range(ends[0], ends[1])

    __rmul__ = __mul__

    def __rtruediv__(self, other: float) -> Range:
        return Range(other, other) / self


Quantity = Union[float, Range]  # noqa: UP007 - read by arithmetic above before Range exists


def as_range(value: Quantity) -> Range:
    """A number as the range that holds only it."""
    return value if isinstance(value, Range) else Range(value, value)


def training_flops(parameters: Quantity, tokens: Quantity) -> Quantity:
    """C = 6ND: two operations a parameter and token forward, four backward (Kaplan et al. 2020)."""
    return 6.0 * parameters * tokens


def chinchilla(
    flops: float,
    *,
    alpha: float = 0.34,
    beta: float = 0.28,
    a: float = 406.4,
    b: float = 410.7,
    flops_per_parameter_token: float = 6.0,
) -> tuple[float, float]:
    """Parameters and tokens that minimize A/N^alpha + B/D^beta at C = 6ND, in closed form.

    N = G (C/6)^(beta/(alpha+beta)), D = (C/6)/N with G = (alpha A / beta B)^(1/(alpha+beta)). The
    constants are those of Hoffmann et al. 2022, approach 3.
    """
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    effective = flops / flops_per_parameter_token
    parameters = g * effective ** (beta / (alpha + beta))
    return parameters, effective / parameters


def flops_for_scale(parameters: Quantity, *, parameters_per_root_flop: float = 0.1) -> Quantity:
    """Computation at which a model of that size is optimal where N = c sqrt(C): C = (N / c)^2."""
    return (parameters / parameters_per_root_flop) ** 2


def tokens_for_flops(flops: Quantity, *, tokens_per_root_flop: float = 1.7) -> Quantity:
    """Tokens that go with that computation where D = c sqrt(C)."""
    return tokens_per_root_flop * flops**0.5


def words(tokens: Quantity, *, tokens_per_word: Quantity = TOKENS_PER_WORD) -> Quantity:
    """Words in that many tokens."""
    return tokens / tokens_per_word


def books(
    tokens: Quantity,
    *,
    tokens_per_word: Quantity = TOKENS_PER_WORD,
    words_per_page: Quantity = WORDS_PER_PAGE,
    pages_per_book: Quantity = PAGES_PER_BOOK,
) -> Quantity:
    """Books in that many tokens."""
    return words(tokens, tokens_per_word=tokens_per_word) / (words_per_page * pages_per_book)


def weight_bytes(parameters: float, *, bytes_per_parameter: float = 2.0) -> float:
    """Memory of the weights alone."""
    return parameters * bytes_per_parameter


def devices_for_bytes(size_bytes: float, *, memory_bytes: float = 100e9) -> int:
    """Devices whose memory holds that much; 100 GB of an H200's 141 leave room for the rest."""
    return math.ceil(size_bytes / memory_bytes)


def storage_usd_per_year(size_bytes: float, *, usd_per_mb_year: float) -> float:
    """Cost of keeping that many bytes for a year, a megabyte being 1e6 bytes."""
    return size_bytes / 1e6 * usd_per_mb_year


def seconds_per_token(
    weights_bytes: Quantity,
    *,
    bandwidth_bytes_per_second: Quantity = H200_BANDWIDTH_BYTES_PER_SECOND,
) -> Quantity:
    """Least time to decode one token alone: every weight is read once."""
    return weights_bytes / bandwidth_bytes_per_second


def tokens_per_minute(weights_bytes: Quantity, **memory: Quantity) -> Quantity:
    """Most tokens a minute for one sequence; `memory` is the option of `seconds_per_token`."""
    return 60.0 / seconds_per_token(weights_bytes, **memory)


def activation_bytes_per_token(
    layers: int, heads: int, head_dim: int, *, bytes_per_value: int = 2, tensors: int = 1
) -> int:
    """What one token leaves in every layer: one vector, or two of them for a cache of keys and
    values."""
    return layers * heads * head_dim * bytes_per_value * tensors


def tokens_to_match_weights(weights_bytes: float, bytes_per_token: float) -> float:
    """Tokens whose activations take as much memory as the weights."""
    return weights_bytes / bytes_per_token


def petaflop_days(flops: Quantity) -> Quantity:
    """Computation in petaflop/s-days."""
    return flops / PETAFLOP_DAY


def gpu_hours(
    flops: Quantity, *, flops_per_second: Quantity = H200_FP8_FLOPS, utilization: Quantity = 1.0
) -> Quantity:
    """Device-hours for that computation at a share of the peak."""
    return flops / (flops_per_second * utilization) / 3600.0


def training_usd(
    flops: Quantity, *, usd_per_hour: Quantity = GPU_HOUR_USD, **speed: Quantity
) -> Quantity:
    """Rent for that computation; `speed` are the options of `gpu_hours`."""
    return gpu_hours(flops, **speed) * usd_per_hour


def wall_clock_hours(flops: Quantity, devices: int, **speed: Quantity) -> Quantity:
    """Hours on that many devices at once; `speed` are the options of `gpu_hours`."""
    return gpu_hours(flops, **speed) / devices


def inference_flops(parameters: Quantity, tokens: Quantity) -> Quantity:
    """2ND: a multiply and an add for each parameter and token."""
    return 2.0 * parameters * tokens


def inference_usd(parameters: Quantity, tokens: Quantity, **price: Quantity) -> Quantity:
    """Rent to produce that many tokens if computation were all, with `training_usd`'s options."""
    return training_usd(inference_flops(parameters, tokens), **price)


def break_even_tokens(cost_usd: Quantity, *, usd_per_million_tokens: Quantity = 120.0) -> Quantity:
    """Tokens to be sold until a cost has come back."""
    return cost_usd / usd_per_million_tokens * 1e6


def essays(tokens: Quantity, *, tokens_per_essay: Quantity = TOKENS_PER_ESSAY) -> Quantity:
    """Essays of a thousand words in that many tokens."""
    return tokens / tokens_per_essay


def landauer_joule_per_flop(*, bits: int = 32, kelvin: float = 300.0) -> float:
    """Least energy to erase that many bits: kT ln 2 each (Landauer 1961)."""
    return bits * BOLTZMANN_JOULE_PER_KELVIN * kelvin * math.log(2)


def landauer_watts(
    *, flops_per_second: float = H200_FP8_FLOPS, bits: int = 32, kelvin: float = 300.0
) -> float:
    """Least power of a device that erases that many bits an operation."""
    return flops_per_second * landauer_joule_per_flop(bits=bits, kelvin=kelvin)


def watts_above_landauer(
    *, watts: float = H200_WATTS, flops_per_second: float = H200_FP8_FLOPS, bits: int = 32
) -> float:
    """How many times more power a device draws than physics asks for."""
    return watts / landauer_watts(flops_per_second=flops_per_second, bits=bits)


def carbon_usd(
    tonnes_co2: Quantity = GPT3_TONNES_CO2, *, usd_per_tonne: Quantity = CO2_USD_PER_TONNE
) -> Quantity:
    """Social cost of emitting that much."""
    return tonnes_co2 * usd_per_tonne


def burgers(
    tonnes_co2: Quantity = GPT3_TONNES_CO2,
    *,
    burger_kg: Quantity = BURGER_KG,
    kg_co2_per_kg: Quantity = BEEF_KG_CO2_PER_KG,
) -> Quantity:
    """Quarter-pounders whose beef emits as much."""
    return tonnes_co2 * 1000.0 / (burger_kg * kg_co2_per_kg)


def device_hours(tokens: Quantity, *, hours_per_trillion_tokens: Quantity) -> Quantity:
    """Device-hours of a run whose pace is known."""
    return tokens / 1e12 * hours_per_trillion_tokens


def price_of_training(hours: Quantity, *, usd_per_hour: Quantity) -> Quantity:
    """Rent of a run whose device-hours are known."""
    return hours * usd_per_hour


_SPEED = ("flops_per_second", "utilization")
_HANDED_ON = {
    "tokens_per_minute": ("bandwidth_bytes_per_second",),
    **dict.fromkeys(("training_usd", "wall_clock_hours"), _SPEED),
    "inference_usd": ("usd_per_hour", *_SPEED),
}
# Every number that an estimate is given must be finite and above zero.
globals().update(
    (name, checks.entry(*_HANDED_ON.get(name, ()))(found))
    for name, found in list(globals().items())
    if isinstance(found, type(as_range)) and found.__module__ == __name__ and name != "as_range"
)
