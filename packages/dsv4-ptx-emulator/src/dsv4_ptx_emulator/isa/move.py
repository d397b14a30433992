# SPDX-License-Identifier: Apache-2.0
"""Moves (PTX ISA 9.7.10.3), parameters, and addresses as values (9.7.10.22, .23, .26, .27)."""

from __future__ import annotations

from dsv4_ptx_emulator.isa.context import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, width_of
from dsv4_ptx_emulator.isa.emit import Emitter, expression
from dsv4_ptx_emulator.ptx.module import Address, Immediate, Pair, Register, Sink, Symbol, Vector

_TYPES = (
    "pred",
    "b8",
    "b16",
    "b32",
    "b64",
    "u16",
    "u32",
    "u64",
    "s16",
    "s32",
    "s64",
    "f16",
    "f32",
    "f64",
    "bf16",
)
_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}


@expression("mov", section="9.7.10.3, 9.7.10.4")
def mov(e: Emitter) -> None:
    """Copy a register, constant, special register or address; pack and unpack vectors."""
    _, bits = e.type(*_TYPES, "b128")
    e.flags()
    d, a = e.take(2)
    if isinstance(d, Pair):
        e.context.unsupported("a pair of destinations")
    if bits == 128:
        e.context.unsupported("type .b128")
    if isinstance(d, Vector):
        part = bits // len(d.elements)
        value = e.get(a, bits)
        for place, element in enumerate(d.elements):
            shifted = f"({value} >> {e.constant(place * part, bits)})" if place else value
            if not isinstance(element, Sink):
                e.put(element, part, f"{shifted}.astype(u{part})")
    elif isinstance(a, Vector):
        texts = [e.get(element, bits // len(a.elements)) for element in a.elements]
        while len(texts) > 1:
            texts = [f"halves({low}, {high})" for low, high in zip(texts[::2], texts[1::2], strict=True)]
        e.put(d, bits, texts[0])
    elif isinstance(a, Register) and isinstance(d, Register) and width_of(a.type) != bits:
        e.context.unsupported(f"a source of type .{a.type}")
    else:
        if isinstance(a, Symbol) and e.context.symbol(a.name)[0] in ("local", "const") and bits != 64:
            e.context.unsupported(f"the address of {a.name} in {bits} bits")
        e.put(d, bits, e.get(a, bits))


@expression("ld.param", section="9.7.10.8")
def ld_param(e: Emitter) -> None:
    """Load kernel parameters; they never change, so this is no memory access."""
    words = [word for word in e.modifiers if word not in ("v2", "v4")]
    if len(words) != 1 or (words[0] not in _TYPES and words[0] not in ("u8", "s8")):
        e.context.unsupported(f"modifiers .{'.'.join(e.modifiers)}")
    bits = width_of(words[0])
    d, source = e.take(2)
    if not isinstance(source, Address) or not isinstance(source.base, Symbol | Immediate):
        e.context.unsupported("a parameter address in a register")
    base = source.base.value if isinstance(source.base, Immediate) else e.context.symbol(source.base.name)[1]
    targets = d.elements if isinstance(d, Vector) else (d,)
    for place, target in enumerate(targets):
        offset = base + source.offset + place * bits // 8
        e.put(target, bits, f"C[{offset}, {bits}]", signed=words[0].startswith("s"))


def _window(e: Emitter) -> int:
    words = [word for word in e.modifiers[:-1] if word != "to"]
    space = words[0].split("::")[0] if len(words) == 1 else ""
    if space not in _WINDOWS:
        e.context.unsupported(f"modifiers .{'.'.join(e.modifiers)}")
    return _WINDOWS[space]


@expression("cvta", section="9.7.10.23")
def cvta(e: Emitter) -> None:
    """To a generic address, or with `.to` from one."""
    _, bits = e.type("u64", "u32")
    window = _window(e)
    d, a = e.take(2)
    if bits == 32:
        e.context.unsupported("a 32-bit generic address")
    operator = "-" if "to" in e.modifiers else "+"
    e.put(d, 64, f"{e.get(a, 64)} {operator} {e.constant(window, 64)}")


@expression("isspacep", section="9.7.10.22")
def isspacep(e: Emitter) -> None:
    """Whether a generic address is in a space."""
    (space,) = e.modifiers or ("",)
    name = space.split("::")[0]
    if name not in _WINDOWS or space == "shared::cta":
        e.context.unsupported(f"modifier .{space}")
    d, a = e.take(2)
    e.put(d, 1, f"({e.get(a, 64)} >> {e.constant(56, 64)}) == {_WINDOWS[name] >> 56}")


@expression("mapa", section="9.7.10.26")
def mapa(e: Emitter) -> None:
    """The shared address of the same variable in another CTA of the cluster."""
    _, bits = e.type("u32", "u64")
    generic = "shared::cluster" not in e.flags("shared::cluster")
    if generic and bits == 32:
        e.context.unsupported("a 32-bit generic address")
    d, a, cta = e.take(3)
    keep = e.constant(0xFFFF_FFFF_00FF_FFFF if bits == 64 else 0x00FF_FFFF, bits)
    where = e.get(cta, 32) + ("" if bits == 32 else ".astype(u64)")
    e.put(d, bits, f"({e.get(a, bits)} & {keep}) | ({where} << {e.constant(24, bits)})")


@expression("getctarank", section="9.7.10.27")
def getctarank(e: Emitter) -> None:
    """%cluster_ctarank of the CTA that a shared address belongs to."""
    _, bits = e.type("u32", "u64")
    e.flags("shared::cluster")
    d, a = e.take(2)
    e.put(d, 32, f"({e.get(a, bits)} >> {e.constant(24, bits)}).astype(u32) & {e.constant(0xFF, 32)}")
