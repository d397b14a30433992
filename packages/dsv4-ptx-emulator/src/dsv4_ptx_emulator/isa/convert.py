# SPDX-License-Identifier: Apache-2.0
"""cvt (PTX ISA 9.7.10.24): between integers, floats, and the narrow floats of formats/floats.py.

Where the ISA is silent this does what an H200 did when it was recorded (tests/support/record_probes.py):

* A NaN that leaves f64 for a narrower float keeps its sign and is quiet. Payloads with high bits were not
  recorded; they are kept, as f32 to f64 keeps them. Every other NaN becomes canonical.
* With `.ftz`, f32 to f64 makes a NaN canonical, and f32 to f16 does not flush its operand. The ISA names the
  conversions to integers and with integer rounding as those that do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsv4_ptx_emulator.formats.floats import FORMATS, decode, encode
from dsv4_ptx_emulator.isa.arithmetic import Array
from dsv4_ptx_emulator.isa.context import width_of
from dsv4_ptx_emulator.isa.emit import Emitter, expression
from dsv4_ptx_emulator.machine.warp import LANES

_INTEGERS = tuple(f"{letter}{bits}" for letter in "us" for bits in (8, 16, 32, 64))
_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}
_ROUNDINGS = ("rn", "rna", "rz", "rm", "rp")
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_PACKED = {
    "f16x2": ("f16", 16),
    "bf16x2": ("bf16", 16),
    "e4m3x2": ("e4m3", 8),
    "e5m2x2": ("e5m2", 8),
    "ue8m0x2": ("ue8m0", 8),
    "e2m1x2": ("e2m1", 4),
}


# Arrays, because NumPy takes three times as long for a scalar operand.
_SIXTEEN, _ONE, _HALF, _UPPER = (np.full(LANES, x, np.uint32) for x in (16, 1, 0x7FFF, 0xFFFF_0000))


def to_float(bits: Array, name: str) -> Array:
    """Register bits of a float type as f32 (f64 for f64)."""
    if name == "f64":
        return bits.view(np.float64)
    if name == "f32":
        return bits.view(np.float32)
    return decode(FORMATS[name], bits)


def from_float(values: Array, name: str, rounding: str, saturated: bool, relu: bool) -> Array:
    """Floats as register bits of a float type."""
    if name == "f64":
        return values.astype(np.float64).view(np.uint64)
    if values.dtype == np.float64:
        encoded = encode(FORMATS[name], values, rounding, saturate=saturated, relu=relu)
        nan = np.isnan(values)
        return np.where(nan, _quiet(values, name), encoded) if nan.any() else encoded
    if name == "f32" and rounding == "rn" and not relu and not saturated:
        return np.where(np.isnan(values), np.uint32(0x7FFF_FFFF), values.view(np.uint32))
    return encode(FORMATS[name], values, rounding, saturate=saturated, relu=relu)


def _quiet(values: Array, name: str) -> Array:
    """Bits of f64 NaN in a narrower type: sign and payload, quiet."""
    fmt = FORMATS[name]
    assert fmt.infinity is not None
    bits = values.view(np.uint64)
    fraction = bits >> np.uint64(52 - fmt.mantissa_bits) & np.uint64((1 << fmt.mantissa_bits) - 1)
    exponent = np.uint64(fmt.infinity | 1 << fmt.mantissa_bits - 1)
    return (bits >> np.uint64(63) << np.uint64(fmt.width - 1) | exponent | fraction).astype(fmt.storage)


def to_integer(values: Array, name: str, rounding: str, wide: bool) -> Array:
    """Floats as integers, clamped to the type's range.

    NaN gives the highest bit alone for 64-bit integers and with `wide`, for a source of f64; else 0.
    """
    bits = int(name[1:])
    signed = name[0] == "s"
    low = -(2 ** (bits - 1)) if signed else 0
    high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    whole = _TO_INTEGER[rounding](values.astype(np.float64))
    nan = np.isnan(whole)
    # The largest 64-bit values are no doubles: compare first, then convert what fits.
    above, below = whole >= float(high), whole <= float(low)
    inside = np.where(nan | above | below, 0.0, whole)
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    result = inside.astype(np.int64 if signed else np.uint64).astype(dtype)
    result = np.where(above, dtype.type(high), np.where(below, dtype.type(low), result))
    unsigned = np.dtype(f"u{bits // 8}")
    if bits == 64 or wide:
        return np.where(nan, unsigned.type(1 << bits - 1), result.view(unsigned))
    return result.view(unsigned)


def clamp(values: Array, name: str) -> Array:
    """Integers of any type clamped to another's range (`.sat`)."""
    bits = int(name[1:])
    low = -(2 ** (bits - 1)) if name[0] == "s" else 0
    high = 2 ** (bits - 1) - 1 if name[0] == "s" else 2**bits - 1
    info = np.iinfo(values.dtype)
    return np.clip(values, max(low, int(info.min)), min(high, int(info.max)))


def _nearest_bf16(values: Array) -> Array:
    """f32 without NaN rounded to bf16, nearest even, in the upper half of 32 bits (below: rubbish)."""
    bits = values.view(np.uint32)
    rounded: Array = bits + ((bits >> _SIXTEEN & _ONE) + _HALF)
    return rounded


def pack_two(high: Array, low: Array, name: str, rounding: str, saturated: bool, relu: bool) -> Array:
    """Two f32 as a pair of a narrow type: `high` in the upper half."""
    base, bits = _PACKED[name]
    if name == "bf16x2" and rounding == "rn" and not saturated and not relu:
        # NaN if one of them is; also for infinity times zero, which the longer way serves as well.
        product = high.dot(low)
        if product == product:
            return _nearest_bf16(high) & _UPPER | _nearest_bf16(low) >> _SIXTEEN
    wide: Any = np.uint32 if bits == 16 else np.uint16
    upper = encode(FORMATS[base], high, rounding, saturate=saturated, relu=relu).astype(wide)
    lower = encode(FORMATS[base], low, rounding, saturate=saturated, relu=relu).astype(wide)
    both: Array = upper << wide(bits) | lower
    return both if bits > 4 else both.astype(np.uint8)


def narrow_two(pair: Array, source: str, target: str, rounding: str, relu: bool) -> Array:
    """An f16x2 or bf16x2 as a pair of 8-bit floats, saturated."""
    values = decode(FORMATS[_PACKED[source][0]], pair.view(np.uint16)).reshape(-1, 2)
    codes = encode(FORMATS[_PACKED[target][0]], values, rounding, saturate=True, relu=relu)
    both: Array = np.ascontiguousarray(codes).view(np.uint16).reshape(-1)
    return both


def unpack_two(pair: Array, source: str, target: str, relu: bool) -> Array:
    """A pair of a narrow type as f16x2 or bf16x2."""
    base, bits = _PACKED[source]
    mask = pair.dtype.type((1 << bits) - 1)
    halves = []
    for part in (pair & mask, pair >> pair.dtype.type(bits) & mask):
        values = decode(FORMATS[base], part)
        halves.append(encode(FORMATS[_PACKED[target][0]], values, relu=relu).astype(np.uint32))
    return halves[0] | halves[1] << np.uint32(16)


@expression("cvt", section="9.7.10.24")
def cvt(e: Emitter) -> None:
    """Convert between types."""
    if len(e.modifiers) < 2:
        e.context.unsupported("this form")
    target, source = e.modifiers[-2:]
    flags = e.modifiers[:-2]
    if target in _PACKED:
        _packed(e, target, source, flags)
    elif target in _INTEGERS and source in _INTEGERS:
        _integers(e, target, source, flags)
    elif target in _INTEGERS and source in _FLOATS:
        _float_to_integer(e, target, source, flags)
    elif target in _FLOATS and source in _INTEGERS:
        _integer_to_float(e, target, source, flags)
    elif target in _FLOATS and source in _FLOATS:
        _floats(e, target, source, flags)
    else:
        e.context.unsupported(f"conversion .{target}.{source}")


def _split(e: Emitter, flags: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, frozenset[str]]:
    """The rounding ("" if none is written) and the other flags."""
    rounding = ""
    rest = []
    for word in flags:
        if word in _ROUNDINGS or word in _TO_INTEGER:
            rounding = word
        elif word in allowed:
            rest.append(word)
        else:
            e.context.unsupported(f"modifier .{word}")
    return rounding, frozenset(rest)


def _integers(e: Emitter, target: str, source: str, flags: tuple[str, ...]) -> None:
    rounding, rest = _split(e, flags, ("sat",))
    if rounding:
        e.context.unsupported(f"modifier .{rounding}")
    d, a = e.take(2)
    bits, wide = width_of(source), width_of(target)
    view = "s" if source[0] == "s" else "u"
    value = e.get(a, bits, view)
    if "sat" in rest:
        value = f"{e.bind(clamp)}({value}, {target!r})"
    letter = "i" if target[0] == "s" else "u"
    e.put(d, wide, f"{value}.astype({letter}{wide})", "s" if letter == "i" else "u", signed=letter == "i")


def _float_to_integer(e: Emitter, target: str, source: str, flags: tuple[str, ...]) -> None:
    rounding, rest = _split(e, flags, ("ftz", "sat"))
    if rounding not in _TO_INTEGER:
        e.context.unsupported("a conversion to integer without .rni, .rzi, .rmi or .rpi")
    d, a = e.take(2)
    value = f"{e.bind(to_float)}({e.get(a, _FLOATS[source])}, {source!r})"
    if "ftz" in rest:
        value = f"flush({value})"
    e.put(
        d,
        width_of(target),
        f"{e.bind(to_integer)}({value}, {target!r}, {rounding!r}, {source == 'f64'})",
        signed=target[0] == "s",
    )


def _integer_to_float(e: Emitter, target: str, source: str, flags: tuple[str, ...]) -> None:
    rounding, _ = _split(e, flags, ())
    if rounding not in _ROUNDINGS or target == "tf32":
        e.context.unsupported("this conversion of an integer")
    d, a = e.take(2)
    bits = width_of(source)
    value = e.get(a, bits, "s" if source[0] == "s" else "u")
    if target == "f32" and rounding == "rn":
        e.put(d, 32, f"{value}.astype(f32)", "f")
    elif target == "f64" and (bits <= 32 or rounding == "rn"):
        e.put(d, 64, f"{value}.astype(f64)", "f")
    elif bits <= 32:
        function = e.bind(from_float)
        text = f"{function}({value}.astype(f64), {target!r}, {rounding!r}, False, False)"
        e.put(d, _FLOATS[target], text)
    else:
        e.context.unsupported("this conversion of a 64-bit integer")


def _floats(e: Emitter, target: str, source: str, flags: tuple[str, ...]) -> None:
    rounding, rest = _split(e, flags, ("ftz", "sat", "satfinite", "relu"))
    d, a = e.take(2)
    if (target, source) == ("f32", "bf16") and not rest and not rounding:
        # The bits stay, a NaN payload included (as on an H200, where f16 to f32 makes a NaN canonical).
        e.put(d, 32, f"{e.get(a, 16)}.astype(u32) << {e.constant(16, 32)}")
        return
    value = f"{e.bind(to_float)}({e.get(a, _FLOATS[source])}, {source!r})"
    if "ftz" in rest and target != "f16":
        value = f"canonical(flush({value}))" if target == "f64" else f"flush({value})"
    if rounding in _TO_INTEGER:
        # cvt.rni.f32.f32 rounds to an integral value.
        name = e.bind(_TO_INTEGER[rounding])
        value = f"{name}({value})"
        rounding = "rn"
    if "sat" in rest:
        value = f"saturate({value})"
    function = e.bind(from_float)
    saturated, relu = "satfinite" in rest, "relu" in rest
    text = f"{function}({value}, {target!r}, {rounding or 'rn'!r}, {saturated}, {relu})"
    e.put(d, _FLOATS[target], text)


def _packed(e: Emitter, target: str, source: str, flags: tuple[str, ...]) -> None:
    rounding, rest = _split(e, flags, ("satfinite", "relu"))
    saturated, relu = "satfinite" in rest, "relu" in rest
    bits = _PACKED[target][1]
    width = 2 * bits
    if source == "f32":
        if rounding not in _ROUNDINGS or (bits == 8 and not saturated):
            e.context.unsupported(f"modifiers .{'.'.join(e.modifiers)}")
        d, a, b = e.take(3)
        texts = f"{e.get(a, 32, 'f')}, {e.get(b, 32, 'f')}"
        text = f"{e.bind(pack_two)}({texts}, {target!r}, {rounding!r}, {saturated}, {relu})"
        e.put(d, width, text)
    elif source in ("f16x2", "bf16x2") and bits == 8 and rounding in _ROUNDINGS and saturated:
        d, a = e.take(2)
        text = f"{e.bind(narrow_two)}({e.get(a, 32)}, {source!r}, {target!r}, {rounding!r}, {relu})"
        e.put(d, width, text)
    elif source in _PACKED and bits == 16 and _PACKED[source][1] < 16 and rounding == "rn" and not saturated:
        d, a = e.take(2)
        text = f"{e.bind(unpack_two)}({e.get(a, 2 * _PACKED[source][1])}, {source!r}, {target!r}, {relu})"
        e.put(d, 32, text)
    else:
        e.context.unsupported(f"conversion .{target}.{source}")
