# SPDX-License-Identifier: Apache-2.0
"""Multicast memory of a `System`: what `cuMulticastCreate` and its companions set up on GPUs.

    mapping = MulticastMapping(system, {0: x0, 1: x1})
    ... kernels use mapping.address with multimem instructions ...
    mapping.close()

The members' memory is leased for all ranks while the mapping exists. The address range is reserved in the
host's address space, without memory behind it, so that no tensor can ever be there.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.errors import ArgumentError
from dsv4_ptx_emulator.runtime.memory import extent_of

if TYPE_CHECKING:
    from dsv4_ptx_emulator.runtime.system import System

ALIGNMENT = 256


class MulticastMapping:
    """One multicast object, mapped.

    Args:
        system: Where.
        members: By rank, memory of equal size (see `Device.share` for what it may be).

    Attributes:
        address: First multicast address, a multiple of 256.
        size: Bytes.

    Raises:
        ArgumentError: The sizes differ, or an address is not a multiple of 16.
    """

    def __init__(self, system: System, members: Mapping[int, Any]) -> None:
        extents = {rank: extent_of(memory) for rank, memory in members.items()}
        sizes = {extent.end - extent.start for extent in extents.values()}
        if len(sizes) != 1:
            raise ArgumentError("members", sizes, "memory of one size")
        (self.size,) = sizes
        self._system = system
        self._members = dict(members)
        # A private mapping that is never touched costs no memory.
        self._reserved = mmap.mmap(-1, self.size + ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._reserved))
        self.address = -(-start // ALIGNMENT) * ALIGNMENT
        places = {rank: extent.start for rank, extent in extents.items()}
        system.emulator.map_multicast(self.address, self.size, places)
        for rank, memory in self._members.items():
            system.devices[rank].share(memory)
        self._open = True

    def close(self) -> None:
        """Unmap; idempotent. The members' memory stays what it was."""
        if not self._open:
            return
        self._open = False
        self._system.emulator.unmap_multicast(self.address)
        for rank, memory in self._members.items():
            self._system.devices[rank].unshare(memory)
