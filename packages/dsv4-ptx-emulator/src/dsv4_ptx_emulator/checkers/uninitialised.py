# SPDX-License-Identifier: Apache-2.0
"""Reads of shared memory that nothing has written since its CTA began, and accesses after its CTA's end.

One flag per byte and CTA. Whatever writes through a `Memory` counts, so asynchronous engines do; what
they read counts as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4_ptx_emulator.errors import OutOfBoundsError, UninitialisedError
from dsv4_ptx_emulator.machine.observer import Access, Observer
from dsv4_ptx_emulator.machine.region import ROWS
from dsv4_ptx_emulator.machine.warp import Warp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsv4_ptx_emulator.machine.cta import Cta


class UninitialisedShared(Observer):
    """Raises `UninitialisedError` or `OutOfBoundsError` at the first such access."""

    def __init__(self) -> None:
        self._written: dict[int, NDArray[np.bool_]] = {}

    def on_cta_begin(self, cta: Cta) -> None:
        """Nothing is written yet."""
        self._written[id(cta)] = np.zeros(len(cta.shared_data), np.bool_)

    def on_cta_end(self, cta: Cta) -> None:
        """Forget the CTA."""
        self._written.pop(id(cta), None)

    def on_access(self, access: Access) -> None:
        """Check a read, note a write."""
        owner = access.owner
        if owner is None:
            return
        written = self._written.get(id(owner))
        if written is None:
            self._refuse(access, owner)
            return
        offsets = (access.addresses - np.uint64(owner.shared_base)).view(np.int64)
        size = access.size
        if len(offsets) == 1:
            first = int(offsets[0])
            if access.action == "write":
                written[first : first + size] = True
            elif not written[first : first + size].all():
                self._report(access, written, offsets)
            return
        if size not in ROWS or len(written) % size:
            bytes_ = offsets[:, None] + np.arange(size)
            if access.action == "write":
                written[bytes_] = True
            elif not written[bytes_].all():
                self._report(access, written, offsets)
            return
        # Accesses through lanes are aligned to their size, and shared memory begins at a multiple of it.
        rows = written.view(ROWS[size])
        at = offsets >> (size.bit_length() - 1)
        count = len(offsets)
        if access.action == "write":
            rows[at] = np.frombuffer(b"\x01" * (count * size), ROWS[size])
        elif rows[at].tobytes() != b"\x01" * (count * size):
            self._report(access, written, offsets)

    def _refuse(self, access: Access, owner: Cta) -> None:
        """An access after the CTA's end, by a warp of another CTA; engines are checked elsewhere."""
        if isinstance(access.agent, Warp) and owner.running == 0:
            raise OutOfBoundsError(
                f"{access.kind.opcode} accesses the shared memory of {owner.describe()}, which has ended",
                line=access.kind.line,
                where=access.agent.describe(),
            )

    def _report(self, access: Access, written: NDArray[np.bool_], offsets: NDArray[np.int64]) -> None:
        wrong = [int(at) for at in offsets if not written[int(at) : int(at) + access.size].all()]
        first = wrong[0] + int(np.argmin(written[wrong[0] : wrong[0] + access.size]))
        assert access.owner is not None
        raise UninitialisedError(
            f"{access.kind.opcode} reads byte {first} of the shared memory of {access.owner.describe()}, "
            f"which nothing has written",
            line=access.kind.line,
            where=access.agent.describe(),
        )
