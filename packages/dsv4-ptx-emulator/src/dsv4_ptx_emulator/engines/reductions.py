# SPDX-License-Identifier: Apache-2.0
"""The element-wise operations of reducing copies (PTX ISA 9.4, sections 9.7.10.28.4.2 and 9.7.10.28.5.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4_ptx_emulator.formats.floats import FORMATS, decode, encode, flush

Combine = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
"""Old and new elements as bytes, of equal shape, to the bytes that are written."""

_INTEGERS: dict[str, Any] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}
_ON_INTEGERS: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "add": (np.add, ("u32", "s32", "u64")),
    "min": (np.minimum, ("u32", "s32", "u64", "s64")),
    "max": (np.maximum, ("u32", "s32", "u64", "s64")),
    "and": (np.bitwise_and, ("b32", "b64")),
    "or": (np.bitwise_or, ("b32", "b64")),
    "xor": (np.bitwise_xor, ("b32", "b64")),
}
_ON_FLOATS: dict[str, Callable[[Any, Any], Any]] = {"add": np.add, "min": np.fmin, "max": np.fmax}


def reduction(operation: str, element: str, *, flushing: bool = False) -> Combine | None:
    """How two arrays of elements combine; None for an operation or type that is not implemented.

    Floating-point sums are rounded once to the element's type, to nearest even. With `flushing`, subnormal
    operands and results of f32 become zeros: cp.reduce.async.bulk does so (9.7.10.28.4.2); of tensor copies
    the ISA says nothing of the kind (9.7.10.28.5.4).
    """
    on_integers, types = _ON_INTEGERS.get(operation, (np.add, ()))
    if element in types:
        dtype = _INTEGERS[element]
        return lambda old, new: _bytes(on_integers(_as(old, dtype), _as(new, dtype)), old)
    if element in ("f16", "bf16") and operation in _ON_FLOATS:
        fmt, on_floats = FORMATS[element], _ON_FLOATS[operation]

        def narrow(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
            left, right = decode(fmt, _as(old, np.uint16)), decode(fmt, _as(new, np.uint16))
            # In float64, so that the rounding to 16 bits is the only one.
            return _bytes(encode(fmt, on_floats(left.astype(np.float64), right)), old)

        return narrow
    if element in ("f32", "f64") and operation == "add":
        if element == "f32" and flushing:
            return lambda old, new: _bytes(
                flush(flush(_as(old, np.float32)) + flush(_as(new, np.float32))), old
            )
        dtype = np.float32 if element == "f32" else np.float64
        return lambda old, new: _bytes(_as(old, dtype) + _as(new, dtype), old)
    return None


def _as(data: NDArray[Any], dtype: Any) -> NDArray[Any]:
    return np.ascontiguousarray(data).reshape(-1).view(dtype)


def _bytes(values: NDArray[Any], like: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(like.shape)
