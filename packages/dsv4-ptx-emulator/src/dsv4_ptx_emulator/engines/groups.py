# SPDX-License-Identifier: Apache-2.0
"""Async-groups: what `commit_group` closes and `wait_group` waits for (PTX ISA 9.4, section 9.7.10.28.1.1).

Groups belong to a thread. A warp that commits with all of its lanes makes 32 groups, most of them usually
empty. Bulk copies, non-bulk copies and wgmma have sequences of their own.
"""

from __future__ import annotations

from collections import deque


class AsyncGroup:
    """Operations that were committed together.

    Attributes:
        unread: How many have not read all of their source.
        unfinished: How many are not complete.
    """

    __slots__ = ("unfinished", "unread")

    def __init__(self) -> None:
        self.unread = 0
        self.unfinished = 0


class GroupSequence:
    """The groups of one thread, in order.

    Attributes:
        open: What the next commit will close.
        committed: Oldest first; complete ones are forgotten from the front.
    """

    __slots__ = ("committed", "open")

    def __init__(self) -> None:
        self.open = AsyncGroup()
        self.committed: deque[AsyncGroup] = deque()

    def commit(self) -> None:
        """Close the open group, which may be empty."""
        self.committed.append(self.open)
        self.open = AsyncGroup()

    def pending_before(self, allowed: int, reads_only: bool = False) -> int:
        """How many groups older than the `allowed` most recent are not complete (or have not been read)."""
        committed = self.committed
        while committed and not committed[0].unfinished:
            committed.popleft()
        old = len(committed) - allowed
        if old <= 0:
            return 0
        count = 0
        for index in range(old):
            group = committed[index]
            count += (group.unread if reads_only else group.unfinished) > 0
        return count
