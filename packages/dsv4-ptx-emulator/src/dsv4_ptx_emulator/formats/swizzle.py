# SPDX-License-Identifier: Apache-2.0
"""Shared-memory swizzles of the tensor copy engine and of matrix descriptors.

A swizzle exchanges 16-byte chunks within a row of 32, 64 or 128 bytes by the row's number. Both users apply
it to the bits of the shared-memory address itself, not to an offset in the tile (PTX ISA 9.4, sections 5.5.7
and 9.7.17.5.1.2), which is why a tile may start anywhere in the repeating pattern and a descriptor may be
advanced inside of a row. The pattern repeats every 256, 512 or 1024 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Addresses = TypeVar("_Addresses", int, npt.NDArray[np.integer[Any]])


@dataclass(frozen=True)
class Swizzle:
    """XOR of address bits 4 upwards with as many bits from bit 7 upwards.

    Attributes:
        bits: How many bits: 0 (none), 1 (32 bytes), 2 (64 bytes), 3 (128 bytes).
    """

    bits: int

    @property
    def row_bytes(self) -> int:
        """Width of a row whose chunks are exchanged; 16 without swizzle."""
        return 16 << self.bits

    @property
    def period(self) -> int:
        """After how many bytes the pattern repeats; 16 without swizzle."""
        return 128 << self.bits if self.bits else 16

    @property
    def name(self) -> str:
        """As in the CUDA driver's enumeration: "none", "32B", "64B" or "128B"."""
        return f"{self.row_bytes}B" if self.bits else "none"

    def apply(self, address: _Addresses) -> _Addresses:
        """Where the byte of an unswizzled address lies; its own inverse."""
        return address ^ (address >> 3 & ((1 << self.bits) - 1) << 4)


NONE = Swizzle(0)
S32 = Swizzle(1)
S64 = Swizzle(2)
S128 = Swizzle(3)
