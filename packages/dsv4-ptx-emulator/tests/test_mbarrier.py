# SPDX-License-Identifier: Apache-2.0
"""The mbarrier object: its counts, phases and misuse, and random histories against a plain model."""

from __future__ import annotations

import pytest
from dsv4_ptx_emulator.errors import BarrierMisuseError
from dsv4_ptx_emulator.machine.mbarrier import MAXIMUM_COUNT, MBarrier, pending_count, phase_parity
from hypothesis import given, settings
from hypothesis import strategies as st


def test_waits_right_after_init() -> None:
    barrier = MBarrier.initialise(1)
    assert barrier.completed(1)
    assert not barrier.completed(0)
    barrier.arrive()
    assert barrier.completed(0)
    assert not barrier.completed(1)


def test_bytes_that_arrive_before_they_are_expected_keep_the_phase_open() -> None:
    barrier = MBarrier.initialise(1)
    barrier.complete_tx(96)
    assert barrier.transactions == -96
    barrier.expect_tx(128)
    assert not barrier.completed(0)
    barrier.arrive()
    assert not barrier.completed(0)
    barrier.complete_tx(32)
    assert barrier.completed(0)
    assert (barrier.pending, barrier.transactions) == (1, 0)


def test_expect_tx_can_be_what_completes_the_phase() -> None:
    barrier = MBarrier.initialise(1)
    barrier.complete_tx(16)
    barrier.arrive()
    assert not barrier.completed(0)
    barrier.expect_tx(16)
    assert barrier.completed(0)


def test_arrive_expect_tx_expects_before_it_arrives() -> None:
    barrier = MBarrier.initialise(1)
    state = barrier.arrive_expect_tx(64)
    assert not barrier.completed(0)
    assert pending_count(state) == 1
    assert not barrier.completed_state(state)
    barrier.complete_tx(64)
    assert barrier.completed_state(state)


def test_drop_counts_for_the_phases_to_come() -> None:
    barrier = MBarrier.initialise(3)
    barrier.arrive(2)
    barrier.arrive(drop=True)
    assert (barrier.phase, barrier.pending, barrier.expected) == (1, 2, 2)


@pytest.mark.parametrize("bits", [0, 1, 0x3FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0xCAFE])
def test_memory_that_is_no_barrier_is_recognised(bits: int) -> None:
    with pytest.raises(BarrierMisuseError, match="no initialised mbarrier"):
        MBarrier.from_bits(bits)
    with pytest.raises(BarrierMisuseError, match="no initialised mbarrier"):
        phase_parity(bits)


@pytest.mark.parametrize("count", [0, -1, MAXIMUM_COUNT + 1])
def test_counts_out_of_range(count: int) -> None:
    with pytest.raises(BarrierMisuseError, match="range is 1 to"):
        MBarrier.initialise(count)
    with pytest.raises(BarrierMisuseError, match="range is 1 to"):
        MBarrier.initialise(5).arrive(count)


def test_more_arrivals_than_pending() -> None:
    barrier = MBarrier.initialise(2)
    barrier.arrive(1)
    with pytest.raises(BarrierMisuseError, match="only 1 arrivals are pending"):
        barrier.arrive(2)


def test_no_complete_must_not_complete() -> None:
    barrier = MBarrier.initialise(2)
    barrier.arrive(no_complete=True)
    with pytest.raises(BarrierMisuseError, match="noComplete completed"):
        barrier.arrive(no_complete=True)


@pytest.mark.parametrize("operation", ["expect_tx", "complete_tx"])
def test_transaction_range(operation: str) -> None:
    barrier = MBarrier.initialise(1)
    getattr(barrier, operation)(MAXIMUM_COUNT)
    with pytest.raises(BarrierMisuseError, match="range is"):
        getattr(barrier, operation)(1)
    with pytest.raises(BarrierMisuseError, match="the limit is"):
        getattr(barrier, operation)(MAXIMUM_COUNT + 1)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["arrive", "expect", "complete"]), st.integers(1, 40)), max_size=40),
)
def test_histories_through_the_bits(count: int, history: list[tuple[str, int]]) -> None:
    """Every state survives its encoding; phases complete exactly when both counts are zero."""
    bits = MBarrier.initialise(count).to_bits()
    pending, transactions, phases = count, 0, 0
    for operation, amount in history:
        barrier = MBarrier.from_bits(bits)
        if operation == "arrive":
            if amount > pending:
                with pytest.raises(BarrierMisuseError):
                    barrier.arrive(amount)
                continue
            barrier.arrive(amount)
            pending -= amount
        elif operation == "expect":
            barrier.expect_tx(amount)
            transactions += amount
        else:
            barrier.complete_tx(amount)
            transactions -= amount
        if pending == 0 and transactions == 0:
            pending, phases = count, phases + 1
        bits = barrier.to_bits()
        assert 0 <= bits < 1 << 64
        assert MBarrier.from_bits(bits) == barrier
        assert (barrier.pending, barrier.transactions, barrier.phase) == (pending, transactions, phases % 2)
        assert barrier.completed(phases + 1)
        assert not barrier.completed(phases)
