# SPDX-License-Identifier: Apache-2.0
"""Shared memory that is gone before the copies and matrix operations that use it are done.

A CTA's shared memory ends with its last thread. Whoever issues a store must wait for its source to be read
(`.read` is enough), whoever is the target of a load must wait for the barrier, and wgmma must be waited for.
On hardware the next CTA on the processor is what such a copy reads or overwrites; in the emulator nothing
would happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4_ptx_emulator.engines.copies import CopyEngine
from dsv4_ptx_emulator.engines.warpgroup import WarpgroupPipe
from dsv4_ptx_emulator.errors import AsyncMisuseError
from dsv4_ptx_emulator.machine.observer import Observer

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.cta import Cta


class InFlight(Observer):
    """Raises `AsyncMisuseError` where a CTA ends while something still uses its shared memory."""

    def on_cta_end(self, cta: Cta) -> None:
        """Look at every engine that could reach the CTA's shared memory."""
        for other in cta.cluster.ctas:
            engine = other.scratch.get("copy_engine")
            if isinstance(engine, CopyEngine) and (transfer := engine.touching(cta)):
                copy = f"{transfer.name} ({transfer.kind.opcode})"
                raise AsyncMisuseError(
                    f"the CTA ended while {copy} still uses its shared memory",
                    line=transfer.kind.line,
                    where=cta.describe(),
                )
        for pipe in cta.scratch.values():
            if isinstance(pipe, WarpgroupPipe) and (text := pipe.describe()):
                raise AsyncMisuseError(f"the CTA ended before {text}", where=cta.describe())
