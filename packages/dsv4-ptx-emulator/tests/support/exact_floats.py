# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic in rational numbers, rounded once: what the probes of floats expect.

Nothing of NumPy's arithmetic or of the emulator is used: bits to `Fraction`, exact operation, bits. NaN
results are the ISA's canonical ones; f64 has none (PTX ISA 9.7.3 leaves its payload open): None here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """An IEEE-754 binary interchange format, or bf16.

    Attributes:
        bits: Width.
        precision: Significant bits, with the implied one.
        nan: The canonical NaN.
    """

    bits: int
    precision: int
    nan: int | None

    @property
    def fraction_bits(self) -> int:
        """Stored bits of the significand."""
        return self.precision - 1

    @property
    def top(self) -> int:
        """The exponent field of infinities and NaN."""
        return (1 << self.bits - self.precision) - 1

    @property
    def smallest(self) -> int:
        """Exponent of the smallest subnormal."""
        return 3 - (self.top + 1) // 2 - self.precision

    @property
    def infinity(self) -> int:
        """Bits of infinity."""
        return self.top << self.fraction_bits

    def value(self, code: int) -> Fraction | float:
        """A number's exact value; zeros, infinities and NaN as a Python float, which has signs for them."""
        sign = -1 if code >> self.bits - 1 else 1
        exponent = code >> self.fraction_bits & self.top
        fraction = code & (1 << self.fraction_bits) - 1
        if exponent == self.top:
            return math.nan if fraction else sign * math.inf
        if not exponent and not fraction:
            return sign * 0.0
        significand = fraction | (1 << self.fraction_bits if exponent else 0)
        return Fraction(sign * significand) * Fraction(2) ** (self.smallest + max(exponent, 1) - 1)

    def code(self, value: Fraction | float, rounding: str = "rn") -> int | None:
        """Bits of a value, rounded: `rn` (ties to even), `rz`, `rm` or `rp`."""
        if isinstance(value, float) and (math.isnan(value) or math.isinf(value) or value == 0):
            if math.isnan(value):
                return self.nan
            special = self.infinity if value else 0
            return special | (1 << self.bits - 1 if math.copysign(1, value) < 0 else 0)
        exact = Fraction(value)
        negative, exact = exact < 0, abs(exact)
        sign = int(negative) << self.bits - 1
        scale = max(_exponent(exact) - self.fraction_bits, self.smallest)
        quotient = exact / Fraction(2) ** scale
        whole = quotient.numerator // quotient.denominator
        rest = quotient - whole
        up: bool = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
            "rz": False,
            "rm": negative and rest > 0,
            "rp": not negative and rest > 0,
        }[rounding]
        whole += int(up)
        # A carry out of the significand raises the exponent field by itself, as the encoding is monotonic.
        result = whole + (scale - self.smallest << self.fraction_bits)
        if result >= self.infinity:
            beyond = rounding == "rn" or rounding == ("rm" if negative else "rp")
            result = self.infinity if beyond else self.infinity - 1
        return result | sign

    def subnormal(self, code: int) -> bool:
        """Whether bits are a subnormal number's."""
        return not code >> self.fraction_bits & self.top and bool(code & (1 << self.fraction_bits) - 1)

    def flushed(self, code: int) -> int:
        """A subnormal number as the zero of its sign."""
        return code & 1 << self.bits - 1 if self.subnormal(code) else code

    def is_nan(self, code: int) -> bool:
        """Whether bits are a NaN's."""
        return code & (1 << self.bits - 1) - 1 > self.infinity


F16 = Format(16, 11, 0x7FFF)
BF16 = Format(16, 8, 0x7FFF)
F32 = Format(32, 24, 0x7FFF_FFFF)
F64 = Format(64, 53, None)


def _exponent(exact: Fraction) -> int:
    """Floor of the logarithm to base 2."""
    guess = exact.numerator.bit_length() - exact.denominator.bit_length()
    return guess if Fraction(2) ** guess <= exact else guess - 1


def _finite(*values: Fraction | float) -> bool:
    return all(isinstance(value, Fraction) or math.isfinite(value) for value in values)


def _as_float(value: Fraction | float) -> float:
    """Of the right sign and class, as much as results without finite operands depend on."""
    if isinstance(value, float):
        return value
    return 1.0 if value > 0 else -1.0


def add(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Sum."""
    if not _finite(a, b):
        return _as_float(a) + _as_float(b)
    if isinstance(a, float) and isinstance(b, float):
        return a + b
    total = Fraction(a) + Fraction(b)
    return total if total else 0.0


def negated(a: Fraction | float) -> Fraction | float:
    """Negation."""
    return -a


def multiply(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Product."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return _as_float(a) * _as_float(b)


def divide(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Quotient."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    left, right = _as_float(a), _as_float(b)
    if right == 0:
        return (
            math.nan
            if left == 0 or math.isnan(left)
            else math.copysign(math.inf, left) * math.copysign(1, right)
        )
    return left / right


def fused(a: Fraction | float, b: Fraction | float, c: Fraction | float) -> Fraction | float:
    """Product and sum."""
    return add(multiply(a, b), c)


def root(a: Fraction | float, bits: int = 130) -> Fraction | float:
    """Square root, with a last bit that says whether it is exact: enough to round it right."""
    if isinstance(a, float):
        return math.nan if a < 0 else a
    if a < 0:
        return math.nan
    shift = 2 * (bits - _exponent(a) // 2)
    scaled = a * Fraction(2) ** shift
    whole = scaled.numerator // scaled.denominator
    found = math.isqrt(whole)
    sticky = Fraction(1, 2) if found * found != scaled else Fraction(0)
    return (found + sticky) / Fraction(2) ** (shift // 2)


def lesser(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Minimum of numbers; -0 is below +0."""
    if a == b == 0:
        return a if math.copysign(1, a) < 0 else b
    return a if a < b else b


def greater(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Maximum of numbers."""
    return negated(lesser(negated(a), negated(b)))


def operation(
    fmt: Format, function: Callable[..., Fraction | float], operands: int, flags: tuple[str, ...] = ()
) -> Callable[..., int | None]:
    """A function of numbers as one of bits, with `ftz`, `sat` and a rounding.

    None where the text leaves it open: a NaN of f64, and with `ftz` a result below the smallest normal number
    that rounds to it.
    """
    normal = Fraction(2) ** (fmt.smallest + fmt.fraction_bits)

    def bits(*codes: int) -> int | None:
        if "ftz" in flags:
            codes = tuple(fmt.flushed(code) for code in codes)
        rounding = next((flag for flag in flags if flag in ("rz", "rm", "rp")), "rn")
        values = [fmt.value(code) for code in codes]
        exact = function(*values)
        if "sat" in flags and isinstance(exact, float) and math.isnan(exact):
            return 0
        code = fmt.code(exact, rounding)
        below = isinstance(exact, Fraction) and abs(exact) < normal
        if "ftz" in flags and below and code is not None and abs(fmt.value(code)) == normal:
            return None
        if code is not None and "ftz" in flags:
            code = fmt.flushed(code)
        if code is not None and "sat" in flags:
            one = fmt.code(Fraction(1))
            assert one is not None
            code = 0 if code >> fmt.bits - 1 else min(code, one)
        return code

    if operands == 1:
        return lambda a: bits(a)
    if operands == 2:
        return lambda a, b: bits(a, b)
    return lambda a, b, c: bits(a, b, c)


def extreme(
    fmt: Format, function: Callable[..., Fraction | float], flags: tuple[str, ...] = ()
) -> Callable[[int, int], int | None]:
    """Minimum or maximum of bits: the number if one operand is NaN, with `NaN` always NaN."""

    def bits(a: int, b: int) -> int | None:
        if "ftz" in flags:
            a, b = fmt.flushed(a), fmt.flushed(b)
        nans = fmt.is_nan(a), fmt.is_nan(b)
        if all(nans) or (any(nans) and "NaN" in flags):
            return fmt.nan
        if any(nans):
            return b if nans[0] else a
        return fmt.code(function(fmt.value(a), fmt.value(b)))

    return bits


def halves(function: Callable[..., int | None], operands: int) -> Callable[..., int | None]:
    """A function of 16 bits applied to both halves of 32."""

    def both(*words: int) -> int | None:
        low, high = function(*(w & 0xFFFF for w in words)), function(*(w >> 16 for w in words))
        return None if low is None or high is None else low | high << 16

    if operands == 1:
        return lambda a: both(a)
    if operands == 2:
        return lambda a, b: both(a, b)
    return lambda a, b, c: both(a, b, c)
