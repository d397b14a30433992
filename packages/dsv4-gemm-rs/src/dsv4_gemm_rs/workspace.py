# SPDX-License-Identifier: Apache-2.0
"""The memory and the agreements behind `gemm_rs`: one per group and device, shared by every layer.

Contract: creation is collective and either succeeds on all ranks or raises the same error on all. All that
decides a path is agreed on then: sizes, path and deadline must be equal, capabilities count only if every
rank has them. After that each call is decided locally and alike. One stream, one order of calls on all
ranks; a second thread in the same workspace is refused.

A call that loses a peer ends by its deadline. The workspace then refuses further calls with the same error
(the epochs of the ranks have parted) until it is closed and created anew.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.backends import VirtualRank
from dsv4_symm_mem.communicator import (
    Communicator,
    ProcessGroupCommunicator,
    agree,
    communicator_of,
    require_equal,
)
from dsv4_symm_mem.errors import ArgumentError, ClosedError, GroupError, MismatchError, UnsupportedError
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import BF16_BYTES, ExchangeLayout, align_up, ceil_div, shard_length

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.dispatch import Decision, Gemm, Machine, Path, Problem, decide
from dsv4_gemm_rs.dispatch.plan import LaunchPlan, plan_launch
from dsv4_gemm_rs.environment import default_deadline, requested_path
from dsv4_gemm_rs.kernels.launch import warm_up
from dsv4_gemm_rs.schedule import LARGEST_TILE, SMALLEST_TILE
from dsv4_gemm_rs.weights import PreparedWeight, WeightKind

logger = logging.getLogger("dsv4_gemm_rs")

FUSED_ARCHS = frozenset({90})
"""Architectures with kernels in this version."""

_handles = itertools.count(1)
_workspaces: weakref.WeakValueDictionary[str, Workspace] = weakref.WeakValueDictionary()


def exchange_layout(world_size: int, max_tokens: int, n: int) -> ExchangeLayout:
    """The exchange block that holds any call of at most `max_tokens` rows and `n` columns, in any tile shape.

    Two banks of P-1 slots, each one shard of BF16 rounded up to the largest tile in both directions, and one
    flag per smallest tile: 2·S·(P-1)/P bytes for S = 2·max_tokens·n, and a little.
    """
    rows = shard_length(max_tokens, world_size)
    slot = align_up(rows, LARGEST_TILE.m) * align_up(n, LARGEST_TILE.n) * BF16_BYTES
    tiles = ceil_div(rows, SMALLEST_TILE.m) * ceil_div(n, SMALLEST_TILE.n)
    return ExchangeLayout(world_size, tiles, slot if world_size > 1 else 0)


@dataclass
class Counters:
    """What a workspace has done: calls by path, and how often each reason led to a fallback."""

    calls: Counter[str]
    fallbacks: Counter[str]

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Plain dictionaries, ready for JSON."""
        return {"calls": dict(self.calls), "fallbacks": dict(self.fallbacks)}


class Workspace:
    """Symmetric memory, exchange and agreed facts of one rank; made by `Workspace.create`.

    Attributes:
        max_tokens: Largest M of a call.
        n: Largest N of a call.
        machine: What the group has; equal on all ranks.
        requested: The path that was asked for, or None.
        deadline: Seconds after which a wait for a peer ends; 0 for never.
        exchange: This rank's end of the exchange as the host drives it, or None without symmetric memory.
        launches: The same as kernels take it, or None without symmetric memory or kernels for the device.
        counters: Calls by path and fallbacks by reason.
        order: A one-element tensor that torch operators declare as written, so that compilers keep the order
            of calls; its value means nothing.
        handle: Name by which torch operators refer to this object.
    """

    def __init__(
        self,
        communicator: Communicator,
        machine: Machine,
        requested: Path | None,
        max_tokens: int,
        n: int,
        deadline: float,
        arena: SymmetricArena | None,
    ) -> None:
        self.communicator = communicator
        self.machine = machine
        self.requested = requested
        self.max_tokens = max_tokens
        self.n = n
        self.deadline = deadline
        self.counters = Counters(Counter(), Counter())
        self.exchange: HostExchange | None = None
        self.launches: LaunchExchange | None = None
        self._arena = arena
        self._closed = False
        self._busy = threading.Lock()
        self._decisions: dict[Problem, Decision] = {}
        self._plans: dict[tuple[int, int, int], LaunchPlan] = {}
        if arena is not None:
            layout = exchange_layout(communicator.size, max_tokens, n)
            block = arena.allocate((layout.total_bytes,), torch.uint8, "exchange block")
            arena.verify()
            self.exchange = HostExchange(layout, block, communicator.rank, deadline)
            if machine.arch in machine.fused_archs:
                self.launches = LaunchExchange(layout, block, communicator.rank, deadline)
        self.order = torch.zeros(1, dtype=torch.int32, device=communicator.device)
        self.handle = f"workspace-{next(_handles)}"
        _workspaces[self.handle] = self

    @classmethod
    def create(
        cls,
        group: Communicator | dist.ProcessGroup,
        *,
        max_tokens: int,
        n: int,
        device: torch.device | str | None = None,
        backend: str = "auto",
        path: Path | str | None = None,
        deadline: float | None = None,
        sm_margin: int = 0,
    ) -> Workspace:
        """Create the group's workspaces; collective.

        Args:
            group: A process group or a rank of a `VirtualGroup`; never implied.
            max_tokens: Largest M of any call, at least 1.
            n: Largest N of any call, at least 1.
            device: This rank's device; default the group's.
            backend: Symmetric-memory back end, see `SymmetricArena.create`.
            path: The only acceptable path; default `DSV4_GEMM_RS_PATH`, else the best one for each call.
            deadline: Seconds a wait for a peer may last, 0 for ever; default `DSV4_GEMM_RS_DEADLINE`,
                else 30.
            sm_margin: SMs that the kernels leave free for others that spin on side streams, such as NCCL's.

        Raises:
            ArgumentError: An argument is out of range; local, before any communication.
            MismatchError: Ranks passed different arguments or run different versions; on every rank.
            GroupError: Something failed on some rank; the same text on every rank.
            UnsupportedError: The requested path cannot be had by this group; on every rank.
        """
        for name, value in (("max_tokens", max_tokens), ("n", n)):
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(name, value, "an integer of at least 1")
        if not isinstance(sm_margin, int) or sm_margin < 0:
            raise ArgumentError("sm_margin", sm_margin, "a number of SMs, 0 or more")
        if deadline is None:
            deadline = default_deadline()
        if not 0 <= deadline < float("inf"):
            raise ArgumentError("deadline", deadline, "a number of seconds, 0 for no deadline")
        try:
            requested = requested_path() if path is None else None if path == "auto" else Path(path)
        except ValueError as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError("path", path, f"auto or one of {[p.value for p in Path]}") from None
        communicator = communicator_of(group, device)
        require_equal(
            communicator,
            "creating a workspace",
            {
                "max_tokens": max_tokens,
                "n": n,
                "backend": backend,
                "path": requested,
                "deadline": deadline,
                "sm_margin": sm_margin,
                "version": __version__,
                "arch": _arch(communicator.device),
            },
        )
        arena, obstacle = _create_arena(communicator, max_tokens, n, backend)
        machine = _machine(communicator, arena, sm_margin)
        if machine.symmetric and machine.arch in machine.fused_archs:
            agree(communicator, "preparing the kernels", lambda: warm_up(communicator.device))
        workspace = cls(communicator, machine, requested, max_tokens, n, deadline, arena)
        try:
            if requested is not None:
                # Equal facts on all ranks, so all raise or none does.
                workspace.decide(Problem(0, n, 0, WeightKind.MXFP8))
        except UnsupportedError as error:
            workspace.close()
            raise UnsupportedError(f"{error} ({obstacle})" if obstacle else str(error)) from None
        if obstacle and communicator.rank == 0:
            logger.warning("no symmetric memory, exchanging through the process group instead: %s", obstacle)
        return workspace

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks P."""
        return self.communicator.size

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.communicator.device

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group behind the workspace; None for virtual ranks."""
        communicator = self.communicator
        return communicator.group if isinstance(communicator, ProcessGroupCommunicator) else None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def decide(self, problem: Problem) -> Decision:
        """Which path a call of this shape takes, and why; equal on all ranks."""
        decision = self._decisions.get(problem)
        if decision is None:
            decision = self._decisions[problem] = decide(self.machine, problem, self.requested)
        return decision

    def plan(self, m: int, n: int, k: int) -> LaunchPlan:
        """The launch of a call of this shape; equal on all ranks, remembered."""
        plan = self._plans.get((m, n, k))
        if plan is None:
            plan = plan_launch(m, n, k, self.world_size, self.machine.multiprocessors)
            self._plans[m, n, k] = plan
        return plan

    def warm_up(self, weight: PreparedWeight) -> None:
        """Make ready what calls with `weight` need beyond the workspace's own kernels; collective.

        To be called before the first call and before any graph capture: a first use loads code, which may
        wait for the GPU, and so must not happen while a kernel waits for a peer.

        Raises:
            GroupError: Some rank could not; the same text on every rank.
        """
        decision = self.decide(Problem(1, weight.n, weight.k, weight.kind))
        agree(self.communicator, "warming up", lambda: self._prepare(weight, decision))

    def _prepare(self, weight: PreparedWeight, decision: Decision) -> None:
        if decision.gemm in (Gemm.BF16, Gemm.FUSED_SM90):
            weight.bf16()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self) -> None:
        """Raise what ended an earlier call, if anything did; after CUDA graph replays this is where it shows.

        On a GPU this tells what kernels have reported so far, without waiting for them: synchronise first to
        be sure about all of them.

        Raises:
            ExchangeError: A call ended without its peers' data.
            ClosedError: The workspace was closed.
        """
        if self._closed:
            raise ClosedError("this workspace was closed")
        if self.launches is not None:
            self.launches.check()
        elif self.exchange is not None:
            self.exchange.check()

    @contextmanager
    def call(self, decision: Decision) -> Iterator[None]:
        """Account for one call and keep a second thread out of it."""
        if not self._busy.acquire(blocking=False):
            raise UnsupportedError(
                "this workspace is in a call on another thread; ranks need one order of calls"
            )
        try:
            self.counters.calls[decision.path.value] += 1
            for rejection in decision.rejected:
                self._count_fallback(rejection.path, rejection.reason, decision)
            yield
        finally:
            self._busy.release()

    def _count_fallback(self, path: Path, reason: str, decision: Decision) -> None:
        if reason not in self.counters.fallbacks and self.rank == 0:
            logger.warning("not %s: %s; taking %s", path.value, reason, decision.path.value)
        self.counters.fallbacks[reason] += 1

    def close(self, *, wait: bool = True) -> None:
        """Free the symmetric memory; collective, idempotent. `wait=False` when a rank is known to be dead."""
        if self._closed:
            return
        self._closed = True
        self.exchange = self.launches = None
        if self._arena is not None:
            self._arena.close(wait=wait)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # After an error on this rank the others may never reach the meeting point.
        self.close(wait=error_type is None)


def workspace_of(handle: str) -> Workspace:
    """The workspace that `handle` refers to.

    Raises:
        ClosedError: It no longer exists.
    """
    workspace = _workspaces.get(handle)
    if workspace is None:
        raise ClosedError(f"no workspace has the handle {handle!r} any more")
    return workspace


def _create_arena(
    communicator: Communicator, max_tokens: int, n: int, backend: str
) -> tuple[SymmetricArena | None, str]:
    nbytes = exchange_layout(communicator.size, max_tokens, n).total_bytes
    try:
        return SymmetricArena.create(communicator, nbytes, backend=backend), ""
    except MismatchError:
        raise
    except GroupError as error:
        # The same on every rank, so all of them go on without symmetric memory or all raise.
        if not isinstance(communicator, ProcessGroupCommunicator):
            raise
        return None, str(error)


def _machine(communicator: Communicator, arena: SymmetricArena | None, sm_margin: int) -> Machine:
    mine = {
        "flashinfer": find_spec("flashinfer") is not None,
        "multicast": arena is not None and not arena.multicast_reason,
        "multiprocessors": _multiprocessors(communicator, sm_margin),
    }
    everyone = communicator.all_gather(mine)
    return Machine(
        arch=_arch(communicator.device),
        world_size=communicator.size,
        multicast=all(facts["multicast"] for facts in everyone),
        symmetric=arena is not None,
        process_group=isinstance(communicator, ProcessGroupCommunicator),
        flashinfer=all(facts["flashinfer"] for facts in everyone),
        multiprocessors=min(facts["multiprocessors"] for facts in everyone),
        fused_archs=FUSED_ARCHS,
    )


def _multiprocessors(communicator: Communicator, sm_margin: int) -> int:
    """SMs for one rank's kernels: virtual ranks share a device, and all of them must be resident at once."""
    if communicator.device.type != "cuda":
        return 0
    count = torch.cuda.get_device_properties(communicator.device).multi_processor_count - sm_margin
    return count // communicator.size if isinstance(communicator, VirtualRank) else count


def _arch(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
