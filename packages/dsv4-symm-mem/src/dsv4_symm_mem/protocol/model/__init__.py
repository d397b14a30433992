# SPDX-License-Identifier: Apache-2.0
"""An executable model of the exchange protocol, explored exhaustively.

Contract: `explore(scenario, rules)` visits every state that the ranks, workers, links and faults of a
scenario can reach in any order of events, and reports the first promise of the protocol that breaks, with a
shortest sequence of events that breaks it. The promises: no deadlock, no unread slot or unseen flag
overwritten, no stale or foreign tile read, every own tile the sum of one partial from each source in rank
order, every output complete; when a rank dies, every survivor ends, all blame the dead rank, and no aborted
call leaves a number in its output.

    python -m dsv4_symm_mem.protocol.model [--large]

prints what is covered, state counts, and a counterexample for each broken rule (`catalogue` holds the
cases). `scenario` is what is run, `program` a worker's steps, `machine`, `moves` and `effects` are the
transition system, `search` explores it. Rejected: a model checker with a language of its own (the real
schedules could not be fed in, and the tests would need a tool), random testing of interleavings (it finds
these bugs rarely and proves nothing when it finds none).

What is modelled. A store into a peer's slot is issued and lands later; a worker publishes a tile when its
store has landed, one tile late, and flushes before any wait and before it ends; flags are those of `words`
and are never reset; two banks by the epoch's parity; a token to a peer that gets no tile, sent before the
call's first wait, awaited like a tile; an all-reduce pushes each reduced tile to every peer into slots with
flags and banks of their own and ends when all have come. A call ends with its last worker, which bumps the
epoch in memory; the next call on the rank follows, with no barrier between ranks.

In a multicast call a partial, also of a tile of one's own, stays in its source's memory; a store to it is
seen through the multicast address some time later, and its flag is raised after that. The owner awaits all
flags of a tile and reads all partials at once. In an all-reduce it then writes the sum over the partials. Its
reads are done by a worker of its own where there are several, as in the kernels, or in turn with the stores.

What is not: the values of a tile, the memory model below "a release orders what its worker's completed
stores wrote" (of the two alias fences of a multicast call, the writer's and the reader's, it has one),
failure of more than one rank, a teardown. P is 2 and 3 (4 where reduced), with 1 and 2 workers; that larger P
behave alike rests on each (flag, slot) pair having one writer and one reader at a time.

What it found
  * The sound protocol keeps every promise, also with flags in flight, ranks on different paths (fused,
    fused with another lag, unfused) in one call, and the next call launched before the last has ended.
  * Two banks suffice for multicast by the argument that they suffice for push, and for a stronger reason than
    each needs: when a rank begins a call, no rank is in the call before the last (`shared_banks` checks
    that). So calls of both kinds may lay out a bank differently and follow each other in any order.
  * Where other workers read, a multicast call needs no order of tiles: who publishes waits for nobody.
  * Rule ii ("a waiting tile waits only for lower-numbered tiles of peers") is not true of positions in a
    list where shards differ in size. It holds of row tiles: on every rank an own tile comes after the
    remote tiles of its row tile and below, whatever the group size and lag, which may differ by rank.
  * A baked epoch breaks not only graphs of an odd number of calls (two calls on one bank in a row): of two,
    because each flag still holds what its next call waits for; of four and more, as soon as one call writes
    a flag that the others leave alone. An alternating bit likewise is right only while every call writes
    the same flags.
  * Equal calls in another order on one rank are not told apart by any flag; a sum mixes the two. One stream
    is the only remedy.
  * A 16-bit signature finds ranks of different shape while they wait for the same kind of message. Where
    one waits for a tile and the other for a token, each is silent for the other. A deadline that then looks
    at all the flags of the rank it waited for reports the mismatch; it costs no message, and sending tokens
    to all adds nothing to it.
  * "The first writer of the abort word wins" blames a healthy rank, and leaves survivors that disagree,
    for P >= 3: of two survivors, the one that waits for the other, which waits for the dead rank, may be
    first. What is right is an order among abort words: mismatch before silence, then the smaller epoch,
    then the earlier wait (token, own tile by index, gathered tile by index), combined by an atomic minimum
    on every rank; and a worker that ends because of an abort adds its own wait. The word is final when all
    survivors have ended. Which survivor expires first, and whether it looks for a peer's abort before it
    blames, then does not matter; deadlines need to be longer than healthy ranks go on after another stops.
    Where they are shorter, all ranks still end, agree, and deliver no number, but may agree on a healthy
    rank.
  * Without the broadcast survivors end all the same, each by a deadline of its own, but do not agree.
  * With several workers NaN must be written by the last to leave; one that gives up and fills at once is
    followed by others that store their tiles.

What a configuration turned out not to need: the second bank, in all-reduces of which no shard is empty;
tokens, in all-reduces and wherever no shard is empty; the flush at exit, where each worker ends with a wait;
the broadcast and the order of abort words, with two ranks; warming up, where each rank has a device of its
own and one stream. None is worth a rule with an exception.
"""

from __future__ import annotations

from dsv4_symm_mem.protocol.model.scenario import (
    SOUND,
    Call,
    Deadline,
    Rules,
    Scenario,
    TileId,
    grouped_order,
    uniform_call,
)
from dsv4_symm_mem.protocol.model.search import Report, explore
from dsv4_symm_mem.protocol.model.state import Violation, ViolationKind

__all__ = [
    "SOUND",
    "Call",
    "Deadline",
    "Report",
    "Rules",
    "Scenario",
    "TileId",
    "Violation",
    "ViolationKind",
    "explore",
    "grouped_order",
    "uniform_call",
]
