# SPDX-License-Identifier: Apache-2.0
"""Flags, abort words and tickets: what a kernel reads and writes to agree with other CTAs and other ranks.

The rules they serve are in `protocol`; here is one instruction each, plus the one loop that waits.

Scope. Data that a peer pushes has its home in the memory of the receiver and crosses NVLink, so the release
and the acquire name the system: `.gpu` covers the threads of one device only (PTX ISA, Memory Consistency
Model, "Scope"), and two strong operations synchronise only if each one's scope contains the other's thread
("Morally strong operations"). `.gpu` is right only between CTAs of one grid, as for the ticket.

Why a thread that never wrote the data may publish it. A release pattern orders everything that happens
before it, and a barrier (`bar.sync`, ISA "barrier") makes the writes of all its threads happen before what
follows in each of them; so: all threads store, barrier, one thread releases. The reader mirrors it: one
thread acquires, barrier, all threads read ("Causality order" is transitive across both).

Polling with acquire, not relaxed polling and one acquire fence at the end: equally right, but then the
order depends on a second line that a later edit may move. One lane polls: 32 of them would ask for the same
line while its writer needs it.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from dsv4_symm_mem.device.address import global_pointer
from dsv4_symm_mem.device.clock import globaltimer, nanosleep
from dsv4_symm_mem.protocol.words import (
    ABORT_EPOCH_MASK,
    ABORT_EPOCH_SHIFT,
    KIND_SHIFT,
    LEVEL_SHIFT,
    MAX_LEVEL,
    NO_ABORT,
    SIGNATURE_BITS,
    AbortKind,
)

Scope = Literal["sys", "gpu", "cluster", "cta"]

PLAIN_POLLS = 256
"""Default of `wait_signal`: polls before the first sleep."""
SLEEP_NS = 128
"""Default of `wait_signal`: the sleep between later polls, 0 to 256 ns by the rules of `nanosleep`."""

_WORD_BYTES = 8


class WaitStatus(enum.IntEnum):
    """How `wait_signal` ended. `TIMEOUT` and `MISMATCH` equal the `AbortKind` that the waiter then raises."""

    ARRIVED = 0
    TIMEOUT = int(AbortKind.TIMEOUT)
    MISMATCH = int(AbortKind.MISMATCH)
    ABORTED = 4


_WAITING = -1


@dsl_user_op
def store_release(
    address: Int64, value: Int64, scope: Scope = "sys", *, loc: Any = None, ip: Any = None
) -> None:
    """Publish: store the 64-bit `value` after everything that happens before it.

    PTX, sm_90a and sm_100a: `st.release.sys.global.b64 [a], v;` (or `.gpu`, `.cluster`, `.cta`).

    Orders, at `scope`: this thread's earlier reads and writes, and those of other threads ordered before them
    by a barrier, before the store, for whoever reads `value` with an acquire. It does not order
    copies in flight of the async proxy (`cp.async.bulk`): wait for them and put `fence_proxy_async` first.
    ISA sections "st" and Memory Consistency Model, "Release and Acquire Patterns".
    """
    pointer = global_pointer(address, Int64, _WORD_BYTES, loc=loc, ip=ip)
    cute.arch.store(pointer, Int64(value), sem="release", scope=scope, loc=loc, ip=ip)


@dsl_user_op
def store_relaxed(
    address: Int64, value: Int64, scope: Scope = "sys", *, loc: Any = None, ip: Any = None
) -> None:
    """Store the 64-bit `value` in one piece, ordering nothing else.

    PTX, sm_90a and sm_100a: `st.relaxed.sys.global.b64 [a], v;` (or another scope). ISA section "st".
    """
    pointer = global_pointer(address, Int64, _WORD_BYTES, loc=loc, ip=ip)
    cute.arch.store(pointer, Int64(value), sem="relaxed", scope=scope, loc=loc, ip=ip)


@dsl_user_op
def load_acquire(address: Int64, scope: Scope = "sys", *, loc: Any = None, ip: Any = None) -> Int64:
    """Read a 64-bit word before everything that follows.

    PTX, sm_90a and sm_100a: `ld.acquire.sys.global.b64 d, [a];` (or another scope).

    If the value read was stored by a release, this thread's later generic-proxy accesses, and those of
    threads that it meets at a barrier afterwards, see what was released. Reads of the same data by the async
    proxy (TMA, bulk copies) need `fence_proxy_async` in between. ISA sections "ld" and Memory Consistency
    Model, "Release and Acquire Patterns".
    """
    pointer = global_pointer(address, Int64, _WORD_BYTES, loc=loc, ip=ip)
    return cute.arch.load(pointer, Int64, sem="acquire", scope=scope, loc=loc, ip=ip)


@dsl_user_op
def load_relaxed(address: Int64, scope: Scope = "sys", *, loc: Any = None, ip: Any = None) -> Int64:
    """Read a 64-bit word in one piece and past stale caches, ordering nothing else.

    PTX, sm_90a and sm_100a: `ld.relaxed.sys.global.b64 d, [a];` (or another scope). ISA section "ld".
    """
    pointer = global_pointer(address, Int64, _WORD_BYTES, loc=loc, ip=ip)
    return cute.arch.load(pointer, Int64, sem="relaxed", scope=scope, loc=loc, ip=ip)


@cute.jit
def wait_signal(
    flag: Int64,
    want: Int64,
    abort: Int64,
    deadline_ns: Int64,
    plain_polls: Int32 = PLAIN_POLLS,
    sleep_ns: Int32 = SLEEP_NS,
) -> tuple[Int32, Int64, Int64]:
    """Wait until the word at `flag` is the signal `want`; to be run by one lane.

    Ends with the first of: the flag holds `want` (`ARRIVED`); it holds another signal of the same
    epoch (`MISMATCH`: the peer makes this call with another shape); the abort word is not 0 (`ABORTED`);
    the deadline passed (`TIMEOUT`). A word of any other epoch is waited on. In a tie the earlier of these
    wins, so a message that has come is never given up. The clock is read between a poll and the next, and
    a deadline ends the wait only after one more poll: a CTA that was itself suspended past the
    deadline still finds a flag that was raised meanwhile. No clock is read if the first poll finds the
    signal.

    Args:
        flag: Address of the flag, in this rank's own block.
        want: `epoch << 16 | signature` of this call.
        abort: Address of this rank's own abort word.
        deadline_ns: `globaltimer` value to give up at (see `deadline_after`); 0 waits for ever.
        plain_polls: Polls without a pause before the sleeps begin.
        sleep_ns: Pause between later polls in nanoseconds (0 to twice that).

    Returns:
        The `WaitStatus`, the flag's last value and the number of polls.

    PTX, sm_90a and sm_100a, a loop around: `ld.relaxed.sys.global.b64` (abort word, issued first so that both
    loads are in flight together), `ld.acquire.sys.global.b64` (flag), `mov.u64 %globaltimer`,
    `nanosleep.u32`.

    Orders, after `ARRIVED` only: as `load_acquire` at system scope. A barrier (or `bar.warp.sync`) must
    follow before other threads read the data. The abort word is read relaxed: it is a value, it publishes no
    data.
    """
    status = Int32(_WAITING)
    seen = Int64(0)
    polls = Int64(0)
    now = Int64(0)
    while status == Int32(_WAITING):
        aborted = load_relaxed(abort)
        seen = load_acquire(flag)
        polls += 1
        if seen == want:
            status = Int32(int(WaitStatus.ARRIVED))
        elif (seen >> SIGNATURE_BITS) == (want >> SIGNATURE_BITS):
            status = Int32(int(WaitStatus.MISMATCH))
        elif aborted != Int64(NO_ABORT):
            status = Int32(int(WaitStatus.ABORTED))
        elif deadline_ns != Int64(0) and now >= deadline_ns:
            status = Int32(int(WaitStatus.TIMEOUT))
        else:
            if polls >= Int64(plain_polls):
                nanosleep(sleep_ns)
            now = globaltimer()
    return status, seen, polls


@dsl_user_op
def abort_word(
    epoch: Int64, blamed: Int32, kind: Int32, level: Int32, *, loc: Any = None, ip: Any = None
) -> Int64:
    """The word that `protocol.words.Abort` encodes; `kind` may be a `WaitStatus`, `level` is `wait_level`'s.

    PTX: shifts and ors.
    """
    earlier_epoch = Int64(ABORT_EPOCH_MASK) - (Int64(epoch) & Int64(ABORT_EPOCH_MASK))
    earlier_wait = Int64(MAX_LEVEL) - Int64(level)
    return (
        (Int64(kind) << KIND_SHIFT)
        | (earlier_epoch << ABORT_EPOCH_SHIFT)
        | (earlier_wait << LEVEL_SHIFT)
        | Int64(blamed)
    )


@dsl_user_op
def raise_abort(address: Int64, word: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """Combine `word` into an abort word, own or a peer's: the greater stays. Returns what was there.

    PTX, sm_90a and sm_100a: `atom.global.sys.acq_rel.max.s64 d, [a], word;`

    The greatest stays because ranks must blame the same one, and the first to notice need not know the cause
    (`protocol.words`). Atomics of system scope are performed at
    the memory's home, so writers on different devices exclude each other. acq_rel, at no cost that matters on
    this path: whoever acquires the word sees what its writer recorded before. ISA section "atom".
    """
    pointer = global_pointer(address, Int64, _WORD_BYTES, loc=loc, ip=ip)
    return cute.arch.atomic_max(pointer, Int64(word), sem="acq_rel", scope="sys", loc=loc, ip=ip)


@dsl_user_op
def try_lock(address: Int64, *, loc: Any = None, ip: Any = None) -> Boolean:
    """Take a lock between CTAs of one grid: true if the word was 0, which is now 1. Stores 0 give it back.

    PTX, sm_90a and sm_100a: `atom.global.acquire.gpu.cas.b64 d, [a], 0, 1;`

    Orders what the holder does after what earlier holders did before giving it back with `store_release` of
    at least device scope. ISA section "atom".
    """
    pointer = global_pointer(address, Int64, _WORD_BYTES, loc=loc, ip=ip)
    before = cute.arch.atomic_cas(
        pointer, cmp=Int64(0), val=Int64(1), sem="acquire", scope="gpu", loc=loc, ip=ip
    )
    return before == Int64(0)


@cute.jit
def arrive_ticket(address: Int64, participants: Int32) -> Boolean:
    """Arrive at the ticket of one launch; true for the last of `participants`, which also sets it back to 0.

    One thread of each CTA calls it, after a barrier over the CTA. The last one out may bump the epoch: every
    other CTA has read it. The ticket must be 0 before the first launch and may not be shared by launches that
    overlap.

    PTX, sm_90a and sm_100a: `atom.global.acq_rel.add.u64 d, [a], 1;` (no scope written means `.gpu`, ISA
    section "atom") and, in the last, `st.relaxed.gpu.global.b64 [a], 0;`

    Orders, at device scope, which holds all CTAs of the grid: what each arriver did before, reads
    included, before what the last one does after. Needs no more: the next launch is ordered by its stream.
    """
    pointer = global_pointer(address, Int64, _WORD_BYTES)
    before = cute.arch.atomic_add(pointer, Int64(1), sem="acq_rel", scope="gpu")
    last = before == Int64(participants) - 1
    if last:
        store_relaxed(address, Int64(0), "gpu")
    return last
