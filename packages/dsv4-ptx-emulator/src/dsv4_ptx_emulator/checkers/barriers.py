# SPDX-License-Identifier: Apache-2.0
"""Named barriers that a CTA leaves behind with arrivals that nobody waited for.

Such a phase never ends. It is harmless in that CTA, but shows that arrivals and waits do not balance, and
a loop that runs once more would take the left arrival for one of its own.
"""

from __future__ import annotations

from dsv4_ptx_emulator.errors import BarrierMisuseError
from dsv4_ptx_emulator.machine.cta import Cta
from dsv4_ptx_emulator.machine.observer import Observer


class UnbalancedBarriers(Observer):
    """Raises `BarrierMisuseError` when a CTA ends with a named barrier in the middle of a phase."""

    def on_cta_end(self, cta: Cta) -> None:
        """Look at every barrier that was used."""
        for barrier in cta.barriers.values():
            if barrier.arrived:
                raise BarrierMisuseError(f"the CTA ends with {barrier.describe()}", where=cta.describe())
