# SPDX-License-Identifier: Apache-2.0
"""States of the model, what can happen in them, and what can go wrong.

States are nested tuples of integers, so that equal states hash alike. Flags and slots carry one bit more
than the machine's: whether their receiver has yet to see them. That bit is the model's, not the protocol's;
it makes a lost flag and an overwritten slot visible at the moment they happen.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from dsv4_symm_mem.protocol.model.scenario import TileId
from dsv4_symm_mem.protocol.words import AbortKind

NOT_STARTED = -1
ENDED = -2
NEW = 1
"""Bit of a flag or slot whose receiver has not looked at its present value."""


class Blame(NamedTuple):
    """An abort word, ordered: the smallest is the strongest.

    A mismatch is evidence by itself, silence is not, hence `silent` comes first. Of two silent ranks the
    one whose message is due earlier holds up the other, see `Machine`.
    """

    silent: bool
    epoch: int
    level: int
    blamed: int

    @property
    def kind(self) -> AbortKind:
        """The kind of abort that the word stands for."""
        return AbortKind.TIMEOUT if self.silent else AbortKind.MISMATCH


class Pending(NamedTuple):
    """A store on its way: of a tile's content into a slot, or of a flag's value.

    `guard` is the flag that will tell of a tile, `place` for a flag itself.
    """

    is_flag: bool
    place: int
    value: int
    guard: int


class Worker(NamedTuple):
    """One CTA.

    `step` indexes its program, or is NOT_STARTED or ENDED; `added` are the sources added so far.
    """

    step: int = NOT_STARTED
    epoch: int = 0
    added: tuple[int, ...] = ()


class Frame(NamedTuple):
    """One call in execution on one rank; `written` are the output's tiles that hold numbers."""

    call: int
    workers: tuple[Worker, ...]
    written: tuple[TileId, ...] = ()
    aborted: bool = False


class Rank(NamedTuple):
    """One rank.

    Attributes:
        dead: It has stopped for ever.
        launched: Calls launched so far.
        epochs: The epoch word of each workspace.
        frames: Calls in execution, oldest first.
        pending: Stores on their way, for each worker.
        abort: Its abort word.
        notices: Abort words on their way to (rank, word).
    """

    dead: bool
    launched: int
    epochs: tuple[int, ...]
    frames: tuple[Frame, ...]
    pending: tuple[tuple[Pending, ...], ...]
    abort: Blame | None = None
    notices: tuple[tuple[int, Blame], ...] = ()


class State(NamedTuple):
    """All ranks, and the flags and slots in all their memories, by place and bank."""

    ranks: tuple[Rank, ...]
    flags: tuple[int, ...]
    slots: tuple[int, ...]


class Event(enum.IntEnum):
    """What can happen."""

    LAUNCH = 0
    START = 1
    STEP = 2
    LAND = 3
    FIND_MISMATCH = 4
    GIVE_UP = 5
    EXPIRE = 6
    NOTICE = 7
    DIE = 8


PROGRESS = frozenset({Event.LAUNCH, Event.START, Event.STEP, Event.LAND, Event.FIND_MISMATCH})
"""What healthy ranks do untold of any fault; a patient deadline expires only when none is possible."""


class Action(NamedTuple):
    """Something that can happen in a state: which rank, which of its frames (or notices), which worker."""

    event: Event
    rank: int
    frame: int = -1
    worker: int = -1
    item: int = -1


class ViolationKind(enum.Enum):
    """What the protocol promises never to happen."""

    DEADLOCK = "deadlock"
    ENDLESS_WAIT = "endless wait for a dead rank"
    OVERWRITE = "overwrite of an unread slot"
    LOST_FLAG = "flag overwritten before it was seen"
    STALE_READ = "stale read"
    BANK_IN_USE = "bank begun while a rank is still in the call that used it before"
    FOREIGN_READ = "read of a tile of another shape"
    WRONG_OUTPUT = "incomplete or wrong output"
    NUMBER_IN_ABORTED_OUTPUT = "number in an aborted call's output"
    WRONG_BLAME = "a healthy rank blamed"
    DISAGREEMENT = "survivors disagree on whom to blame"


class Violation(NamedTuple):
    """A broken promise and where it broke."""

    kind: ViolationKind
    detail: str
