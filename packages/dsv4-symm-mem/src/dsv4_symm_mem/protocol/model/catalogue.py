# SPDX-License-Identifier: Apache-2.0
"""The scenarios that hold the protocol to its promises, and those that show what each rule is for.

`SOUND_CASES` keep every rule and must break no promise. `BROKEN_CASES` break one rule each, in a smallest
scenario that needs it. `SPARE_CASES` break a rule where it turns out not to be needed, so that nobody takes
a rule's reason for wider than it is. `P` ranks, `W` workers per rank; (2,1,0) lists the tiles that ranks own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4_symm_mem.protocol.model.scenario import (
    SOUND,
    Call,
    Deadline,
    Rules,
    Scenario,
    TileId,
    grouped_order,
    signature_of,
    uniform_call,
)
from dsv4_symm_mem.protocol.model.state import ViolationKind
from dsv4_symm_mem.protocol.words import Operation

RS = Operation.REDUCE_SCATTER
AR = Operation.ALL_REDUCE
AG = Operation.ALL_GATHER
MRS = Operation.MULTICAST_REDUCE_SCATTER
MAR = Operation.MULTICAST_ALL_REDUCE


@dataclass(frozen=True)
class Case:
    """A scenario, the rules under which it runs, and what the model is to find.

    Attributes:
        scenario: What is run.
        rules: The rules in force.
        expected: The promise that breaks, None where none may.
        full: Whether every interleaving is walked, without reduction.
    """

    scenario: Scenario
    rules: Rules = SOUND
    expected: ViolationKind | None = None
    full: bool = True


def without(*names: str) -> Rules:
    """All rules but those named."""
    return replace(SOUND, **dict.fromkeys(names, False))


def own_tiles_last(owned: Sequence[int], rank: int) -> tuple[TileId, ...]:
    """The order of an unfused reduce-scatter: whole shards of the others, then the rank's own."""
    owners = [(rank + distance) % len(owned) for distance in range(1, len(owned) + 1)]
    return tuple((owner, index) for owner in owners for index in range(owned[owner]))


def disagreeing_call(*shapes: Sequence[int]) -> Call:
    """A call that each rank takes for another shape: `shapes[r]`, tiles per owner as rank r sees them."""
    return Call(
        orders=tuple(grouped_order(owned, rank) for rank, owned in enumerate(shapes)),
        signatures=tuple(signature_of(owned, RS) for owned in shapes),
    )


def _mixed_paths(owned: Sequence[int]) -> Call:
    """One rank fused, one fused with another lag, one unfused."""
    orders = [grouped_order(owned, 0, lag=1), own_tiles_last(owned, 1)]
    if len(owned) == 3:
        orders.append(grouped_order(owned, 2, lag=0))
    return Call(tuple(orders), (signature_of(owned, RS),) * len(owned))


_MIXED_2 = (uniform_call((2, 2)), uniform_call((1, 0)), uniform_call((0, 0), AR), uniform_call((2, 1), AR))
_MIXED_3 = (uniform_call((1, 1, 1)), uniform_call((1, 1, 0)), uniform_call((1, 1, 1), AR))
_GATHERED_2 = (
    uniform_call((2, 1)),
    uniform_call((2, 1), AG),
    uniform_call((1, 0), AG),
    uniform_call((0, 0), AG),
)
_GATHERED_3 = (uniform_call((1, 1, 0)), uniform_call((1, 1, 0), AG), uniform_call((1, 1, 1), AG))
_GROWING_3 = (
    uniform_call((2, 1, 0)),
    uniform_call((0, 0, 0)),
    uniform_call((2, 2, 1), AR),
    uniform_call((1, 1, 1)),
)
_MULTICAST_2 = (
    uniform_call((2, 2), MRS),
    uniform_call((1, 0), MRS),
    uniform_call((0, 0), MAR),
    uniform_call((2, 1), MAR),
)
_MULTICAST_3 = (
    uniform_call((1, 1, 1), MRS),
    uniform_call((1, 1, 0), MRS),
    uniform_call((1, 1, 0), MAR),
    uniform_call((1, 1, 1), MRS),
)
_BOTH_2 = (
    uniform_call((2, 1), MAR),
    uniform_call((1, 0)),
    uniform_call((1, 0), AG),
    uniform_call((2, 1), MRS),
    uniform_call((1, 1), AR),
)
_PULLED = uniform_call((1, 1), MRS)
_PAIR = uniform_call((1, 1))
_ALONE = uniform_call((1, 0))
_PATIENT = Deadline.PATIENT
_HASTY = Deadline.HASTY

SOUND_CASES = (
    Case(Scenario("P=1: no peer", (uniform_call((2,)), uniform_call((0,)), uniform_call((1,), AR)))),
    Case(Scenario("P=2 W=1: M changes, empty shards, RS and AR", _MIXED_2)),
    Case(Scenario("P=2 W=1: the same, twice over", _MIXED_2 * 2)),
    Case(Scenario("P=2 W=2: M changes, empty shards, RS and AR", _MIXED_2, workers=2)),
    Case(Scenario("P=2 W=1: flags in flight", _MIXED_2, flags_in_flight=True)),
    Case(Scenario("P=2 W=2: flags in flight", _MIXED_2, workers=2, flags_in_flight=True), full=False),
    Case(Scenario("P=2 W=1: tiles published at once", _MIXED_2, publish_lag=0)),
    Case(Scenario("P=2 W=1: tiles published two late", _MIXED_2, publish_lag=2)),
    Case(Scenario("P=2 W=1: tokens to all", _MIXED_2, tokens_always=True)),
    Case(
        Scenario(
            "P=2 W=2: own tiles not delayed", tuple(uniform_call((2, 2), lag=0) for _ in range(4)), workers=2
        )
    ),
    Case(Scenario("P=2 W=1: empty calls only", (uniform_call((0, 0)), uniform_call((0, 0), AR)) * 2)),
    Case(Scenario("P=2 W=1: fused beside unfused", (_mixed_paths((2, 2)), _mixed_paths((2, 1))) * 2)),
    Case(Scenario("P=2 W=1: two workspaces", (_PAIR, uniform_call((1, 1), workspace=1)) * 2)),
    Case(Scenario("P=2 W=2: next call launched early", (_PAIR, _ALONE, _PAIR), workers=2, overlap=True)),
    Case(Scenario("P=2 W=2: the same, room for both", (_PAIR, _ALONE), workers=2, overlap=True, places=4)),
    Case(Scenario("P=2 W=1: reduce-scatters and all-gathers", _GATHERED_2 * 2)),
    Case(Scenario("P=2 W=2: reduce-scatters and all-gathers", _GATHERED_2, workers=2)),
    Case(Scenario("P=3 W=1: reduce-scatters and all-gathers", _GATHERED_3)),
    Case(Scenario("P=3 W=2: reduce-scatters and all-gathers", _GATHERED_3, workers=2), full=False),
    Case(Scenario("P=3 W=1: M changes, empty shards, RS and AR", _MIXED_3)),
    Case(Scenario("P=3 W=2: a call of each kind", _MIXED_3[1:], workers=2), full=False),
    Case(Scenario("P=3 W=2: M changes, empty shards, RS and AR", _MIXED_3, workers=2), full=False),
    Case(Scenario("P=3 W=1: M grows and shrinks", _GROWING_3), full=False),
    Case(Scenario("P=3 W=2: M grows and shrinks", _GROWING_3, workers=2), full=False),
    Case(Scenario("P=3 W=1: flags in flight", _MIXED_3, flags_in_flight=True), full=False),
    Case(Scenario("P=3 W=1: fused beside unfused", (_mixed_paths((2, 1, 1)),) * 3), full=False),
    Case(
        Scenario(
            "P=4 W=1: M changes, empty shards, RS and AR",
            (uniform_call((1, 1, 1, 0)), uniform_call((1, 0, 0, 0)), uniform_call((1, 1, 1, 1), AR)),
        ),
        full=False,
    ),
    Case(Scenario("P=2 W=1: multicast, RS and AR", _MULTICAST_2, shared_banks=True)),
    Case(Scenario("P=2 W=1: multicast, twice over", _MULTICAST_2 * 2, shared_banks=True)),
    Case(
        Scenario("P=2 W=2: multicast, a worker of its own reads", _MULTICAST_2, workers=2, shared_banks=True)
    ),
    Case(
        Scenario(
            "P=2 W=3: multicast, two produce and one reads", (_PULLED,) * 3, workers=3, shared_banks=True
        ),
        full=False,
    ),
    Case(Scenario("P=2 W=1: multicast, flags in flight", _MULTICAST_2, flags_in_flight=True)),
    Case(Scenario("P=2 W=1: multicast, published two late", _MULTICAST_2, publish_lag=2, shared_banks=True)),
    Case(Scenario("P=2 W=1: push and multicast", _BOTH_2, shared_banks=True)),
    Case(Scenario("P=2 W=2: push and multicast", _BOTH_2, workers=2, shared_banks=True), full=False),
    Case(Scenario("P=3 W=1: multicast, RS and AR", _MULTICAST_3, shared_banks=True), full=False),
    Case(
        Scenario("P=3 W=2: multicast, RS and AR", _MULTICAST_3[1:], workers=2, shared_banks=True), full=False
    ),
    Case(
        Scenario("P=3 W=1: push and multicast", (*_MIXED_3[1:], *_MULTICAST_3[1:3]), shared_banks=True),
        full=False,
    ),
    Case(
        Scenario(
            "P=2 W=2: multicast, a rank dies", _MULTICAST_2, workers=2, mortal=(0, 1), deadline=_PATIENT
        ),
        full=False,
    ),
    Case(
        Scenario("P=3 W=1: multicast, a rank dies", _MULTICAST_3[1:3], mortal=(0, 1, 2), deadline=_PATIENT),
        full=False,
    ),
    Case(Scenario("P=2 W=1: a rank dies", _MIXED_2, mortal=(0, 1), deadline=_PATIENT)),
    Case(Scenario("P=2 W=2: a rank dies", (_PAIR, _PAIR), workers=2, mortal=(0, 1), deadline=_PATIENT)),
    Case(Scenario("P=3 W=1: a rank dies", _MIXED_3, mortal=(0, 1, 2), deadline=_PATIENT), full=False),
    Case(
        Scenario("P=3 W=2: a rank dies", _MIXED_3[:2], workers=2, mortal=(0, 1, 2), deadline=_PATIENT),
        full=False,
    ),
    Case(
        Scenario("P=3 W=1: a rank dies in an all-gather", _GATHERED_3, mortal=(0, 1, 2), deadline=_PATIENT),
        full=False,
    ),
    Case(
        Scenario(
            "P=3 W=1: a rank dies in an all-reduce",
            (uniform_call((2, 1, 1), AR),),
            mortal=(0, 1, 2),
            deadline=_PATIENT,
        ),
        full=False,
    ),
    Case(
        Scenario("P=4 W=1: a rank dies", (uniform_call((1, 1, 1, 1)),) * 2, mortal=(3,), deadline=_PATIENT),
        full=False,
    ),
    Case(Scenario("P=2 W=1: deadlines too short", _MIXED_2, deadline=_HASTY)),
    Case(Scenario("P=2 W=2: deadlines too short", (uniform_call((2, 2)),), workers=2, deadline=_HASTY)),
    Case(Scenario("P=3 W=1: deadlines too short", (uniform_call((1, 1, 1)),), deadline=_HASTY)),
)

LARGE_CASES = (
    Case(Scenario("P=3 W=2: M changes, empty shards, RS and AR", _MIXED_3, workers=2)),
    Case(Scenario("P=3 W=2: next call launched early", _MIXED_3[:2], workers=2, overlap=True)),
)
"""Every interleaving of what `SOUND_CASES` holds reduced; minutes, not part of the tests."""

BROKEN_CASES = (
    Case(
        Scenario("the other rank is a call ahead", (_PAIR, _PAIR)),
        without("two_banks"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario("a gatherer is a call ahead", (uniform_call((1, 1), AG),) * 2),
        without("two_banks"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario("a rank that gets nothing runs ahead", (_ALONE,) * 3),
        without("tokens"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario("each holds back what the other awaits", (_PAIR,)),
        without("flush_before_poll"),
        ViolationKind.DEADLOCK,
    ),
    Case(
        Scenario("a worker's last tile is a remote one", (_PAIR,), workers=2),
        without("flush_before_exit"),
        ViolationKind.DEADLOCK,
    ),
    Case(
        Scenario("wait_group.read, then the flag", (_PAIR,)),
        without("publish_after_landing"),
        ViolationKind.STALE_READ,
    ),
    Case(
        Scenario("multicast: the other rank is a call ahead", (_PULLED, _PULLED)),
        without("two_banks"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario("multicast: the owner of a sum is a call ahead", (uniform_call((1, 0), MAR),) * 2),
        without("two_banks"),
        ViolationKind.LOST_FLAG,
    ),
    Case(
        Scenario("multicast: a rank without tiles runs ahead", (uniform_call((1, 0), MRS),) * 3),
        without("tokens"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario(
            "push, then multicast in its bank", (_ALONE, uniform_call((1, 0), MRS)) * 2, shared_banks=True
        ),
        without("tokens"),
        ViolationKind.BANK_IN_USE,
    ),
    Case(
        Scenario("multicast: the flag before the alias fence", (_PULLED,)),
        without("alias_fences"),
        ViolationKind.STALE_READ,
    ),
    Case(
        Scenario("multicast: the same of a sum", (uniform_call((1, 0), MAR),)),
        without("alias_fences"),
        ViolationKind.STALE_READ,
    ),
    Case(Scenario("own tiles first", (_PAIR,)), without("remote_tiles_first"), ViolationKind.DEADLOCK),
    Case(
        Scenario("two streams, in another order on rank 1", (_PAIR, uniform_call((1, 1), workspace=1))),
        without("one_stream"),
        ViolationKind.DEADLOCK,
    ),
    Case(
        Scenario("equal calls swapped on one workspace", (_PAIR, _PAIR)),
        without("one_stream"),
        ViolationKind.STALE_READ,
    ),
    Case(
        Scenario("room for one worker of two", (_PAIR,), workers=2),
        without("co_resident"),
        ViolationKind.DEADLOCK,
    ),
    Case(
        Scenario("virtual ranks, module loaded at first use", (_PAIR,), shared_device=True),
        without("warmed_up"),
        ViolationKind.DEADLOCK,
    ),
    Case(
        Scenario("the next call takes a worker's place", (_PAIR, _PAIR), workers=2, overlap=True),
        without("launch_after_all_run"),
        ViolationKind.DEADLOCK,
    ),
    Case(
        Scenario("the next call begins at once", (_PAIR, _PAIR), overlap=True, places=2),
        without("waits_for_previous_call"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario("a flag that one call leaves alone", (_PAIR, _PAIR, uniform_call((2, 1)))),
        without("epoch_in_flag"),
        ViolationKind.STALE_READ,
    ),
    Case(
        Scenario("rank 1 takes M for half", (disagreeing_call((2, 2), (1, 1)),)),
        without("signature_in_flag"),
        ViolationKind.FOREIGN_READ,
    ),
    Case(
        Scenario("a graph of one call", (_PAIR,) * 2, graph_calls=1),
        without("epoch_in_memory"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario("a graph of two calls", (_PAIR,) * 4, graph_calls=2),
        without("epoch_in_memory"),
        ViolationKind.STALE_READ,
    ),
    Case(
        Scenario("a graph of three calls", (_PAIR,) * 6, graph_calls=3),
        without("epoch_in_memory"),
        ViolationKind.OVERWRITE,
    ),
    Case(
        Scenario("rank 1 dies", (_PAIR,), mortal=(1,), deadline=_PATIENT),
        without("deadline"),
        ViolationKind.ENDLESS_WAIT,
    ),
    Case(
        Scenario(
            "rank 2 dies, the others do not talk",
            (uniform_call((1, 1, 1), AR),),
            mortal=(2,),
            deadline=_PATIENT,
        ),
        without("broadcast_abort"),
        ViolationKind.WRONG_BLAME,
    ),
    Case(
        Scenario(
            "rank 2 dies, one who waits for a waiting rank is first",
            (uniform_call((1, 1, 1)),) * 2,
            mortal=(2,),
            deadline=_PATIENT,
        ),
        without("earliest_wait_blames"),
        ViolationKind.WRONG_BLAME,
    ),
    Case(
        Scenario(
            "rank 2 dies within one all-reduce",
            (uniform_call((1, 1, 1), AR),),
            mortal=(2,),
            deadline=_PATIENT,
        ),
        without("earliest_wait_blames"),
        ViolationKind.WRONG_BLAME,
    ),
    Case(
        Scenario(
            "one worker gives up, the other goes on", (uniform_call((2, 2)),), workers=2, deadline=_HASTY
        ),
        without("last_worker_fills"),
        ViolationKind.NUMBER_IN_ABORTED_OUTPUT,
    ),
)

SPARE_CASES = (
    Case(
        Scenario("AR, no shard empty: one bank is enough", (uniform_call((2, 1), AR),) * 4),
        without("two_banks"),
    ),
    Case(
        Scenario("AR, no shard empty: one bank is enough", (uniform_call((1, 1, 1), AR),) * 3),
        without("two_banks"),
        full=False,
    ),
    Case(
        Scenario("AR with empty shards: no token is needed", (uniform_call((1, 0), AR),) * 4),
        without("tokens"),
    ),
    Case(Scenario("no shard ever empty: no token is needed", (_PAIR,) * 4), without("tokens")),
    Case(Scenario("one worker ends with a wait: no flush at exit", _MIXED_2), without("flush_before_exit")),
    Case(
        Scenario("published at once: nothing to flush", _MIXED_2, publish_lag=0),
        without("flush_before_poll", "flush_before_exit"),
    ),
    Case(
        Scenario("own tiles first, but another worker sends", (_PAIR,) * 2, workers=2),
        without("remote_tiles_first"),
    ),
    Case(
        Scenario("multicast with a reading worker: any order of tiles", (_PULLED,) * 3, workers=2),
        without("remote_tiles_first"),
    ),
    Case(Scenario("fixed M: one alternating bit is enough", (_PAIR,) * 6), without("epoch_in_flag")),
    Case(
        Scenario("a graph of four calls, fixed M: baked epochs are right", (_PAIR,) * 8, graph_calls=4),
        without("epoch_in_memory"),
    ),
    Case(Scenario("a device per rank: loads at first use are harmless", (_PAIR,) * 2), without("warmed_up")),
    Case(
        Scenario("rank 1 of 2 dies: no broadcast is needed", (_PAIR,), mortal=(1,), deadline=_PATIENT),
        without("broadcast_abort"),
    ),
    Case(
        Scenario("rank 1 of 2 dies: the first writer is right", _MIXED_2, mortal=(1,), deadline=_PATIENT),
        without("earliest_wait_blames"),
    ),
    Case(
        Scenario("one worker: whoever gives up fills", (_PAIR, _PAIR), deadline=_HASTY),
        without("last_worker_fills"),
    ),
)
