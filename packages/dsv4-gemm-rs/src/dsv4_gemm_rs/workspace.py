# SPDX-License-Identifier: Apache-2.0
"""The memory and the agreements behind `gemm_rs`: one per group and device, shared by every layer.

Contract: creation is collective and either succeeds on all ranks or raises the same error on all. All that
decides a path is agreed on then: sizes, path, exchange and deadline must be equal, capabilities count only if
every rank has them, a user's own thresholds are rank 0's. After that each call is decided locally and alike.
One stream, one order of calls on all ranks; a second thread in the same workspace is refused.

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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from dsv4_symm_mem.accelerator import Accelerator, CudaAccelerator, accelerator_of
from dsv4_symm_mem.arena import SymmetricArena, SymmetricTensor
from dsv4_symm_mem.backends import VirtualRank
from dsv4_symm_mem.collectives.reduce_scatter import HOST_TILE
from dsv4_symm_mem.communicator import (
    Communicator,
    ProcessGroupCommunicator,
    agree,
    communicator_of,
    require_equal,
)
from dsv4_symm_mem.compiled import Tally
from dsv4_symm_mem.errors import (
    ArgumentError,
    ClosedError,
    ExchangeError,
    GroupError,
    MismatchError,
    UnsupportedError,
)
from dsv4_symm_mem.protocol.host import HostExchange
from dsv4_symm_mem.protocol.launch import LaunchExchange
from dsv4_symm_mem.protocol.layout import BF16_BYTES, ExchangeLayout, Strategy
from dsv4_symm_mem.protocol.tiles import TileGrid, TileShape

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.dispatch import Decision, Machine, Path, Problem, decide
from dsv4_gemm_rs.dispatch.decide import BLOCK_SCALED_ARCHS, strategy_obstacle
from dsv4_gemm_rs.dispatch.plan import LaunchPlan, plan_launch
from dsv4_gemm_rs.dispatch.rates import link_rate_of
from dsv4_gemm_rs.dispatch.thresholds import Table
from dsv4_gemm_rs.environment import MAX_DEADLINE, default_deadline, link_rate, requested_path
from dsv4_gemm_rs.kernels.families import FAMILIES, MULTICAST_FAMILIES
from dsv4_gemm_rs.kernels.launch import staging_bytes, warm_up
from dsv4_gemm_rs.quantize import quantize_mxfp8
from dsv4_gemm_rs.tuning.file import find
from dsv4_gemm_rs.weights import PreparedWeight, WeightKind

logger = logging.getLogger("dsv4_gemm_rs")

MAX_EXTENT = 1 << 24
"""Largest max_tokens and n: tile counts and row numbers then fit 32 bits in every kernel."""
FUSED_ARCHS = frozenset(FAMILIES)
"""Architectures with kernels in this version."""
MULTICAST_ARCHS = frozenset(MULTICAST_FAMILIES)
"""Those of them whose kernels can read sums through multicast."""

_handles = itertools.count(1)
_workspaces: weakref.WeakValueDictionary[str, Workspace] = weakref.WeakValueDictionary()


def exchange_layout(
    world_size: int, max_tokens: int, n: int, strategy: Strategy = Strategy.PUSH
) -> ExchangeLayout:
    """The exchange block that holds any call of at most `max_tokens` rows and `n` columns.

    Two banks of P-1 slots: 2·S·(P-1)/P bytes for S = 2·max_tokens·n, where every shard is rounded up to whole
    tiles of whichever shape of any architecture takes most. For few tokens that rounding (to at least 176
    rows) dominates. With `Strategy.MULTICAST` there are P in a bank, 2·S.
    """
    configs = {(config.tile_m, config.tile_n) for family in FAMILIES.values() for config in family}
    shapes = [HOST_TILE, *(TileShape(*shape) for shape in sorted(configs))]
    grids = [TileGrid(max_tokens, n, world_size, shape) for shape in shapes]
    tiles = max(grid.owned_tiles(0) for grid in grids)
    slot = max(grid.owned_tiles(0) * grid.tile_elements for grid in grids) * BF16_BYTES
    return ExchangeLayout(world_size, tiles, slot if world_size > 1 else 0, strategy)


@dataclass
class Counters:
    """What a workspace has done: calls by path, how often each reason led to a fallback, kernels made ready.

    Another workspace of the same process may have made kernels ready before; then this one made none.
    """

    calls: Counter[str]
    fallbacks: Counter[str]
    kernels: Tally

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain dictionaries, ready for JSON."""
        return {
            "calls": dict(self.calls),
            "fallbacks": dict(self.fallbacks),
            "kernels": self.kernels.as_dict(),
        }


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
        alone: An exchange of this rank with itself, for a kernel that only multiplies; None without kernels.
        overlaps: Whether fused kernels begin while the quantiser before them runs; not where ranks share a
            device, whose next call would take the place that another rank's kernel needs.
        counters: Calls by path, fallbacks by reason, kernels loaded and compiled.
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
        block: SymmetricTensor | None,
        link: float | None = None,
    ) -> None:
        self.communicator = communicator
        self.machine = machine
        self.requested = requested
        self.max_tokens = max_tokens
        self.n = n
        self.deadline = deadline
        self.counters = Counters(Counter(), Counter(), Tally())
        self.exchange: HostExchange | None = None
        self.launches: LaunchExchange | None = None
        self._arena = arena
        self._closed = False
        self._accelerator = accelerator_of(communicator)
        self._on_gpu = communicator.device.type == "cuda"
        self.overlaps = self._on_gpu and not _share_a_device(communicator)
        self._busy = threading.Lock()
        self._decisions: dict[Problem, Decision] = {}
        self._plans: dict[tuple[Problem, bool], LaunchPlan] = {}
        self._product_plans: dict[Problem, LaunchPlan] = {}
        self.alone: LaunchExchange | None = None
        if machine.arch in machine.fused_archs:
            self.alone = LaunchExchange.scratch(communicator.device, self._accelerator)
        if block is not None:
            layout = exchange_layout(communicator.size, max_tokens, n, machine.strategy)
            self.exchange = HostExchange(layout, block, communicator.rank, deadline)
            if machine.arch in machine.fused_archs:
                ctas = machine.multiprocessors if communicator.size > 1 else 0
                staging = staging_bytes(machine.arch, ctas, machine.strategy)
                if link is None:
                    link = 0.0 if _share_a_device(communicator) else link_rate_of(machine.arch)
                self.launches = LaunchExchange(
                    layout, block, communicator.rank, deadline, self._accelerator, staging, link
                )
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
        exchange: Strategy | str = Strategy.PUSH,
        batch_invariant: bool = False,
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
            exchange: "push", or "multicast" for fused kernels whose owners read sums through NVLink
                multicast; needs SM100 and multicast addresses on every rank, and is never chosen by itself.
            batch_invariant: Give a row of activations the same bits whatever M is and wherever the row
                stands. Our kernels multiply, and then exchange: calls are slower than fused ones. Needs a GPU
                that this version has kernels for.

        Raises:
            ArgumentError: An argument is out of range; local, before any communication.
            MismatchError: Ranks passed different arguments or run different versions; on every rank.
            GroupError: Something failed on some rank; the same text on every rank.
            UnsupportedError: The requested path, exchange or batch invariance cannot be had by this group; on
                every rank.
        """
        for name, value in (("max_tokens", max_tokens), ("n", n)):
            if not isinstance(value, int) or not 1 <= value <= MAX_EXTENT:
                raise ArgumentError(name, value, f"an integer from 1 to {MAX_EXTENT}")
        if not isinstance(sm_margin, int) or sm_margin < 0:
            raise ArgumentError("sm_margin", sm_margin, "a number of SMs, 0 or more")
        if deadline is not None and not _is_deadline(deadline):
            raise ArgumentError("deadline", deadline, f"seconds from 0 (none) to {MAX_DEADLINE:g}")
        try:
            given = None if path is None or path == "auto" else Path(path)
        except ValueError:
            raise ArgumentError("path", path, f"auto or one of {[p.value for p in Path]}") from None
        try:
            strategy = Strategy(exchange)
        except ValueError:
            raise ArgumentError("exchange", exchange, f"one of {[s.value for s in Strategy]}") from None
        communicator = communicator_of(group, device)
        # Ranks may differ in their environment, so what it says is read where all hear of a failure.
        switches = agree(
            communicator,
            "reading the environment",
            lambda: (requested_path(), default_deadline(), link_rate()),
        )
        requested = given if path is not None else switches[0]
        deadline = switches[1] if deadline is None else float(deadline)
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
                "exchange": strategy,
                "batch_invariant": batch_invariant,
                "version": __version__,
                "arch": _arch(accelerator_of(communicator)),
            },
        )
        thresholds = _thresholds(communicator)
        arena, block, obstacle = _create_arena(communicator, max_tokens, n, backend, strategy)
        try:
            machine = _machine(communicator, arena, sm_margin, strategy, thresholds, batch_invariant)
            # Equal facts on all ranks, so all raise or none does.
            _require_strategy(communicator, machine, requested, arena)
            if requested is not None or batch_invariant:
                decide(machine, Problem(0, n, 0, WeightKind.MXFP8), requested)

            def set_up() -> Workspace:
                # An emulator loads a kernel at its first launch without keeping others from running.
                on_gpu = communicator.device.type == "cuda"
                tally = Tally()
                if on_gpu and machine.symmetric and machine.arch in machine.fused_archs:
                    tally = warm_up(communicator.device, strategy)
                made = cls(
                    communicator, machine, requested, max_tokens, n, deadline, arena, block, switches[2]
                )
                made.counters.kernels = tally
                return made

            workspace = agree(communicator, "setting up a workspace", set_up)
        except BaseException as error:
            if arena is not None:
                arena.close(wait=False)
            if isinstance(error, UnsupportedError) and obstacle:
                raise UnsupportedError(f"{error} ({obstacle})") from None
            raise
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

    def obstacle(self, exchange: Strategy) -> str:
        """What would keep workspaces of this group from exchanging that way, or ""; collective."""
        return _strategy_obstacle(self.communicator, replace(self.machine, strategy=exchange), self._arena)

    def decide(self, problem: Problem) -> Decision:
        """Which path a call of this shape takes, and why; equal on all ranks."""
        decision = self._decisions.get(problem)
        if decision is None:
            decision = self._decisions[problem] = decide(self.machine, problem, self.requested)
        return decision

    def plan(self, problem: Problem, *, gathered: bool = False) -> LaunchPlan:
        """The launch of a call of this shape; equal on all ranks, remembered.

        `gathered` is for an all-reduce by the fused kernel itself, see `Exchange.MULTICAST`.
        """
        plan = self._plans.get((problem, gathered))
        if plan is None:
            plan = plan_launch(self.machine, problem, gathered=gathered)
            if self.exchange is not None:
                grid = TileGrid(problem.m, problem.n, self.world_size, plan.shape)
                grid.require_fits(self.exchange.layout)
            self._plans[problem, gathered] = plan
        return plan

    def product_plan(self, problem: Problem) -> LaunchPlan:
        """The launch of a product alone, by the fused kernel as if there were one rank; remembered."""
        plan = self._product_plans.get(problem)
        if plan is None:
            plan = plan_launch(replace(self.machine, world_size=1), problem)
            self._product_plans[problem] = plan
        return plan

    def warm_up(self, weight: PreparedWeight) -> None:
        """Make ready what calls with `weight` need beyond the workspace's own kernels; collective.

        To be called before the first call and before any graph capture: a first use loads code, which may
        wait for the GPU, and so must not happen while a kernel waits for a peer.

        Raises:
            GroupError: Some rank could not; the same text on every rank.
        """
        agree(self.communicator, "warming up", lambda: self._prepare(weight))

    def _prepare(self, weight: PreparedWeight) -> None:
        from dsv4_gemm_rs.fused import factors_of
        from dsv4_gemm_rs.operands import Operands
        from dsv4_gemm_rs.unfused import partial_product

        self.check()
        weight.check()
        x = torch.zeros(1, weight.k, dtype=torch.bfloat16, device=self.device)
        given = [Operands(x, None, weight, 1)]
        if weight.kind is WeightKind.MXFP8:
            quantised = quantize_mxfp8(x)
            given.append(Operands(quantised.data, quantised.scale, weight, 1))
        for operands, m in itertools.product(given, (1, self.max_tokens)):
            decision = self.decide(replace(operands.problem, m=m))
            if decision.path is Path.UNFUSED:
                partial_product(operands, decision.gemm, self)
            elif decision.path is Path.FUSED:
                factors_of(operands, self.machine.arch)
        if self._on_gpu:
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
        if self.exchange is not None and (self._accelerator is None or self.exchange.ended):
            self.exchange.check()

    @contextmanager
    def call(self, decision: Decision) -> Iterator[None]:
        """Account for one call, name it in an NVTX range on GPUs, and keep a second thread out of it."""
        if not self._busy.acquire(blocking=False):
            raise UnsupportedError(
                "this workspace is in a call on another thread; ranks need one order of calls"
            )
        try:
            self.counters.calls[decision.path.value] += 1
            for rejection in decision.rejected:
                self._count_fallback(rejection.path, rejection.reason, decision)
            with torch.cuda.nvtx.range(f"gemm_rs {decision.path.value}") if self._on_gpu else nullcontext():
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
        try:
            if self._on_gpu:
                # A kernel may still be using the exchange's memory; deadlines bound the wait.
                torch.cuda.synchronize(self.device)
            if self._arena is not None:
                self._arena.close(wait=wait)
        finally:
            self.exchange = self.launches = None

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # All ranks of a failed call leave with an ExchangeError, and a dead one never comes. After an error
        # of this rank's own, the others may be waiting for it in their close.
        self.close(wait=error_type is None or not issubclass(error_type, ExchangeError))


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
    communicator: Communicator, max_tokens: int, n: int, backend: str, strategy: Strategy
) -> tuple[SymmetricArena | None, SymmetricTensor | None, str]:
    nbytes = exchange_layout(communicator.size, max_tokens, n, strategy).total_bytes
    try:
        arena = SymmetricArena.create(communicator, nbytes, backend=backend)
    except MismatchError:
        raise
    except GroupError as error:
        # The same on every rank, so all of them go on without symmetric memory or all raise.
        if not isinstance(communicator, ProcessGroupCommunicator):
            raise
        return None, None, str(error)
    block = arena.allocate((nbytes,), torch.uint8, "exchange block")
    arena.verify()
    return arena, block, ""


def _require_strategy(
    communicator: Communicator, machine: Machine, requested: Path | None, arena: SymmetricArena | None
) -> None:
    """Refuse an exchange that was asked for and cannot be had, alike on every rank."""
    if machine.strategy is Strategy.PUSH:
        return
    why = _strategy_obstacle(communicator, machine, arena)
    if requested not in (None, Path.FUSED):
        why = f"path {requested.value!r} was requested, too, which pushes"
    if why:
        raise UnsupportedError(f"exchange {machine.strategy.value!r} was requested, but {why}")


def _strategy_obstacle(communicator: Communicator, machine: Machine, arena: SymmetricArena | None) -> str:
    """Why this group cannot exchange as `machine` says, with each rank's reason; empty if it can.

    Collective, and the same text on every rank.
    """
    why = strategy_obstacle(machine)
    if why and machine.arch in machine.multicast_archs:
        reasons = communicator.all_gather("" if arena is None else arena.multicast_reason)
        why += "".join(f"; rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    return why


def _thresholds(communicator: Communicator) -> Table:
    """Rank 0's own thresholds, for all ranks; collective."""
    arch = _arch(accelerator_of(communicator))
    if arch is None:
        return ()

    def look() -> Table:
        if communicator.rank:
            return ()
        found = find(arch)
        if found.obstacle:
            logger.warning("own thresholds: %s", found)
        return found.entries

    return communicator.all_gather(agree(communicator, "reading own thresholds", look))[0]


def _machine(
    communicator: Communicator,
    arena: SymmetricArena | None,
    sm_margin: int,
    strategy: Strategy,
    thresholds: Table,
    batch_invariant: bool,
) -> Machine:
    mine = {
        "flashinfer": _flashinfer_multiplies(accelerator_of(communicator)),
        "multicast": arena is not None and not arena.multicast_reason,
        "multiprocessors": _multiprocessors(communicator, sm_margin),
    }
    everyone = communicator.all_gather(mine)
    multiprocessors = min(facts["multiprocessors"] for facts in everyone)
    accelerator = accelerator_of(communicator)
    if accelerator is not None and multiprocessors < 1:
        raise UnsupportedError(f"{communicator.size} ranks and sm_margin={sm_margin} leave a rank no SM")
    return Machine(
        arch=_arch(accelerator),
        world_size=communicator.size,
        multicast=all(facts["multicast"] for facts in everyone),
        symmetric=arena is not None,
        process_group=isinstance(communicator, ProcessGroupCommunicator),
        flashinfer=all(facts["flashinfer"] for facts in everyone),
        multiprocessors=multiprocessors,
        fused_archs=FUSED_ARCHS,
        emulated=accelerator is not None and accelerator.emulated,
        strategy=strategy,
        multicast_archs=MULTICAST_ARCHS,
        shared=_share_a_device(communicator) and isinstance(accelerator, CudaAccelerator),
        table=thresholds,
        batch_invariant=batch_invariant,
    )


def _flashinfer_multiplies(accelerator: Accelerator | None) -> bool:
    """Whether FlashInfer's block-scaled product can be called here: versions before 0.6 have none."""
    if accelerator is None or accelerator.emulated or accelerator.arch not in BLOCK_SCALED_ARCHS:
        return False
    try:
        from flashinfer import mm_mxfp8  # noqa: F401
    except Exception as error:
        # Whatever a broken installation raises, PyTorch multiplies, too.
        if find_spec("flashinfer") is not None:
            logger.warning("FlashInfer is installed, but its mm_mxfp8 cannot be used: %s", error)
        return False
    return True


def _multiprocessors(communicator: Communicator, sm_margin: int) -> int:
    """SMs for one rank's kernels: virtual ranks share a CUDA device, and all must be resident at once."""
    accelerator = accelerator_of(communicator)
    if accelerator is None:
        return 0
    count = accelerator.multiprocessors - sm_margin
    shared = _share_a_device(communicator) and isinstance(accelerator, CudaAccelerator)
    return count // communicator.size if shared else count


def _share_a_device(communicator: Communicator) -> bool:
    return isinstance(communicator, VirtualRank) and communicator.size > 1


def _is_deadline(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= MAX_DEADLINE


def _arch(accelerator: Accelerator | None) -> int | None:
    return None if accelerator is None else accelerator.arch
