# SPDX-License-Identifier: Apache-2.0
"""Every error the packages raise on purpose, one class per thing a caller can do about it.

An argument error names the argument, its value and what was expected, and is raised before anything is
launched. An error that concerns a group carries the same text on every rank, so that all of them stop
together instead of one raising and the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping


class Dsv4Error(Exception):
    """Base of every error raised on purpose by the dsv4 packages."""


class ArgumentError(Dsv4Error, ValueError):
    """A caller's argument is unusable.

    Attributes:
        argument: Name of the parameter as in the public signature.
        value: The offending value, or the part of it that matters (a shape, a dtype), not a whole tensor.
        expected: What would have been accepted.
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        self.argument = argument
        self.value = value
        self.expected = expected
        super().__init__(f"{argument}: got {value!r}, expected {expected}")


class StaleWeightError(Dsv4Error, RuntimeError):
    """A prepared weight's source changed after preparation; prepare it again."""


class ClosedError(Dsv4Error, RuntimeError):
    """An arena or a workspace was used after `close()`."""


class UnsupportedError(Dsv4Error, RuntimeError):
    """This machine, group or build cannot do what was asked; the text says which of them and why."""


class GroupError(Dsv4Error, RuntimeError):
    """A collective step failed on at least one rank; raised with the same text on every rank of the group.

    Attributes:
        failures: What went wrong, by rank; ranks that succeeded are absent.
    """

    def __init__(self, step: str, failures: Mapping[int, str]) -> None:
        self.step = step
        self.failures = dict(failures)
        causes = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(self.failures.items()))
        super().__init__(f"{step} failed on {len(self.failures)} rank(s) ({causes})")


class MismatchError(GroupError):
    """Ranks of one group passed different values for something that must agree."""


class ExchangeError(Dsv4Error, RuntimeError):
    """A call ended without its peers' data; its output is filled with NaN and the workspace is unusable.

    Attributes:
        rank: The rank that reports.
        blamed: The rank held responsible. Survivors of one failure agree on it once all of them have
            ended; one that asks before may still hear of a rank that was itself kept waiting.
        epoch: Number of the failed call on this workspace, counted from 1.
    """

    def __init__(self, message: str, *, rank: int, blamed: int, epoch: int) -> None:
        self.rank = rank
        self.blamed = blamed
        self.epoch = epoch
        super().__init__(message)


class PeerTimeoutError(ExchangeError):
    """A peer's message missed the deadline; names the rank, the tile, the value seen and wanted."""


class PeerAbortError(ExchangeError):
    """Another rank ended this call and said whom it blames."""


class CallMismatchError(ExchangeError):
    """A peer took part in the same call with another shape, tile or operation."""
