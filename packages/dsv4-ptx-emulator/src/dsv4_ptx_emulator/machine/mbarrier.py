# SPDX-License-Identifier: Apache-2.0
"""The mbarrier object as a value: 64 opaque bits in, 64 opaque bits out (PTX ISA 9.4, section 9.7.15.16).

An object of this class holds no memory and waits for nothing; the instructions read the 64 bits, call one
method and write them back, atomically with respect to every other agent because one scheduler step does it.
The bits are the only state, so whatever overwrites a barrier in shared memory damages it here as on hardware,
and a barrier survives being looked at through another address of the same bytes.

Layout (ours; the ISA keeps it opaque), from bit 0: pending arrivals (20), expected arrivals (20), transaction
count (21, two's complement), phase parity (1), tag (2, always 0b10). The tag is why memory that was never
initialised, or zeroed, or invalidated, is recognised as no mbarrier.

Rules that are easily got wrong:

* A phase completes when pending arrivals and transaction count are both zero, whichever gets there last; the
  check follows every arrive, expect-tx and complete-tx (section 9.7.15.16.5).
* `complete_tx` may come before its `expect_tx`: the count goes negative and the phase stays open.
* A completed phase re-arms itself with the expected count; the transaction count is zero by then.
* A parity wait asks for the completion of the phase of that parity and is true when the current phase has
  the other parity, so right after init waiting for parity 1 passes at once and waiting for parity 0 waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_ptx_emulator.errors import BarrierMisuseError

MAXIMUM_COUNT = (1 << 20) - 1
"""Largest of any count, and of the transaction count's magnitude (section 9.7.15.16.2)."""

_FIELD = (1 << 20) - 1
_TX_FIELD = (1 << 21) - 1
_TX_SHIFT = 40
_PHASE_SHIFT = 61
_TAG_SHIFT = 62
_TAG = 0b10


def phase_parity(bits: int) -> int:
    """Parity of the current phase, straight from the bits: what a poll needs, without building an object.

    Raises:
        BarrierMisuseError: The bits are no initialised mbarrier.
    """
    if bits >> _TAG_SHIFT != _TAG:
        raise BarrierMisuseError(f"0x{bits:016x} is no initialised mbarrier object")
    return bits >> _PHASE_SHIFT & 1


def pending_count(state: int) -> int:
    """Pending arrivals that a state token records (`mbarrier.pending_count`, section 9.7.15.16.20).

    Raises:
        BarrierMisuseError: The token did not come from an arrive.
    """
    phase_parity(state)
    return state & _FIELD


@dataclass(slots=True)
class MBarrier:
    """An initialised mbarrier.

    Attributes:
        expected: Arrivals that each phase from the next on will need.
        pending: Arrivals that the current phase still needs.
        transactions: Bytes that the current phase still expects; negative if completions came first.
        phase: Parity of the current, incomplete phase.
    """

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0

    @classmethod
    def initialise(cls, count: int) -> MBarrier:
        """Phase 0 with `count` arrivals pending and no transactions (`mbarrier.init`, 9.7.15.16.12).

        Raises:
            BarrierMisuseError: The count is outside 1 to 2^20 - 1.
        """
        if not 1 <= count <= MAXIMUM_COUNT:
            raise BarrierMisuseError(f"mbarrier.init with count {count}; the range is 1 to {MAXIMUM_COUNT}")
        return cls(count, count)

    @classmethod
    def from_bits(cls, bits: int) -> MBarrier:
        """Read the object.

        Raises:
            BarrierMisuseError: The bits are no initialised mbarrier: never initialised, invalidated or
                overwritten.
        """
        parity = phase_parity(bits)
        transactions = bits >> _TX_SHIFT & _TX_FIELD
        if transactions >> 20:
            transactions -= 1 << 21
        return cls(bits >> 20 & _FIELD, bits & _FIELD, transactions, parity)

    def to_bits(self) -> int:
        """The 64 bits to store, also the state token of an arrive that follows."""
        return (
            self.pending
            | self.expected << 20
            | (self.transactions & _TX_FIELD) << _TX_SHIFT
            | self.phase << _PHASE_SHIFT
            | _TAG << _TAG_SHIFT
        )

    def arrive(self, count: int = 1, *, drop: bool = False, no_complete: bool = False) -> int:
        """Arrive-on with `count` (sections 9.7.15.16.16 and 9.7.15.16.17).

        Args:
            count: Arrivals, 1 to what is pending.
            drop: `arrive_drop`: later phases expect that many fewer.
            no_complete: `.noComplete`: the caller promises that the phase doesn't complete.

        Returns:
            The state token: the object before the arrival.

        Raises:
            BarrierMisuseError: More arrivals than pending, a count outside 1 to 2^20 - 1, or a phase that
                completes in spite of `.noComplete`.
        """
        token = self.to_bits()
        if not 1 <= count <= MAXIMUM_COUNT:
            raise BarrierMisuseError(f"arrive with count {count}; the range is 1 to {MAXIMUM_COUNT}")
        if count > self.pending:
            raise BarrierMisuseError(
                f"arrive with count {count} where only {self.pending} arrivals are pending"
            )
        self.pending -= count
        if drop:
            self.expected -= count
        if self._complete_if_due() and no_complete:
            raise BarrierMisuseError("an arrive.noComplete completed the phase")
        return token

    def arrive_expect_tx(self, count: int, *, drop: bool = False) -> int:
        """Raise the transaction count by `count`, then arrive once (`mbarrier.arrive.expect_tx`).

        Returns:
            The state token: the object before both.

        Raises:
            BarrierMisuseError: As for `expect_tx` and `arrive`.
        """
        token = self.to_bits()
        self.expect_tx(count)
        self.arrive(drop=drop)
        return token

    def expect_tx(self, count: int) -> None:
        """Raise the transaction count (`mbarrier.expect_tx`, section 9.7.15.16.14).

        Raises:
            BarrierMisuseError: The count or the sum leaves the range of a transaction count.
        """
        self._add_transactions(count, "expect_tx")

    def complete_tx(self, count: int) -> None:
        """Lower the transaction count (`mbarrier.complete_tx`, section 9.7.15.16.15, and every bulk copy).

        Raises:
            BarrierMisuseError: The count or the difference leaves the range of a transaction count.
        """
        self._add_transactions(-count, "complete_tx")

    def completed(self, parity: int) -> bool:
        """Whether the phase of this parity, the current or the one before, has completed (9.7.15.16.19)."""
        return self.phase != parity & 1

    def completed_state(self, state: int) -> bool:
        """Whether the phase of a state token has completed.

        Raises:
            BarrierMisuseError: The token did not come from an arrive.
        """
        return self.phase != phase_parity(state)

    def _add_transactions(self, change: int, operation: str) -> None:
        if abs(change) > MAXIMUM_COUNT:
            raise BarrierMisuseError(f"{operation} of {abs(change)} bytes; the limit is {MAXIMUM_COUNT}")
        self.transactions += change
        if abs(self.transactions) > MAXIMUM_COUNT:
            raise BarrierMisuseError(
                f"{operation} takes the transaction count to {self.transactions}; "
                f"its range is -{MAXIMUM_COUNT} to {MAXIMUM_COUNT}"
            )
        self._complete_if_due()

    def _complete_if_due(self) -> bool:
        if self.pending or self.transactions:
            return False
        self.phase ^= 1
        self.pending = self.expected
        return True
