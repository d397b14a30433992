# SPDX-License-Identifier: Apache-2.0
"""Who runs next: seeded, random, over warps and asynchronous agents alike.

A turn is a burst of a random number of observable steps of one warp, or of steps of one agent. Between
two observable steps nobody can tell whether others ran, so nothing is lost by running them together; what
happens between observable steps of different agents is decided by the seed alone, and the same seed
replays the same run.

With `uneven`, CTAs or warps run apart: some, as the seed says, rest until nobody else can go on, then others
do. Left to chance alone, one warp is hardly ever ahead of all warps of another CTA, nor far behind all others
of its own.

Waiting costs nothing: a warp that blocks leaves the pool until its channel is woken. A warp that polls
memory (a load stronger than weak that reads what it read before, at every poll since the last news)
leaves the pool until one of the polled lines is written. Not running a spinning warp is a legal schedule;
running it would only spend the time. When nobody else can go on, the pollers run again and the clock
jumps, twice as far each time, so that a deadline in the program ends the wait; after `PATIENCE` rounds
without news it is a deadlock.

The clock counts a nanosecond per executed instruction and those jumps; no time is measured with it.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import TYPE_CHECKING, Any

from dsv4_ptx_emulator.errors import DeadlockError, DivergenceError, StepLimitError
from dsv4_ptx_emulator.machine.outcome import BRANCH, CONVERGE, EXIT, POLL, Blocked
from dsv4_ptx_emulator.machine.warp import Group, Warp

if TYPE_CHECKING:
    from dsv4_ptx_emulator.machine.agent import AsyncAgent
    from dsv4_ptx_emulator.machine.machine import Machine

PATIENCE = 56
"""Rounds of fruitless polling; the last jump is 2^56 ns, beyond any deadline."""

EPOCH = 1_000_000_000
"""The clock's first value: some programs take 0 for "not read yet"."""

MAX_BURST = 8
"""Observable steps of a turn, at most."""

PACES = (1.0, 1 / 8, 1 / 64)
"""Turns that an engine takes of those that come to it, where engines may be slow."""

PATIENCE_STEPS = 256
"""Steps after which a diverged warp's other lanes get a turn, whatever their pc."""

TURN_STEPS = 64
"""How long that turn is."""

RESTING = 2 / 3
"""Which part of the CTAs rests where they run apart."""

LONGEST_TURN = 4096
"""Instructions without an observable step after which a turn ends."""


class Uneven(Enum):
    """Who rests until nobody else can go on."""

    NOBODY = "nobody"
    CTAS = "CTAs"
    WARPS = "warps"
    """One of each CTA that has several: a lone one would rest for ever."""


class Scheduler:
    """Runs a machine.

    Args:
        machine: The machine.
        seed: Decides every interleaving.
        max_steps: Instructions after which a run is given up.

    Attributes:
        slow_engines: Whether asynchronous agents are slow at times, as the seed says: what they still have to
            write stays invisible for as long as nobody waits for it.
        uneven: Who rests until the others cannot go on.
        rng: All that is random comes from here.
        steps: Instructions executed so far.
    """

    def __init__(self, machine: Machine, seed: int, max_steps: int) -> None:
        self.machine = machine
        self.rng = random.Random(seed)
        self.slow_engines = False
        self.uneven = Uneven.NOBODY
        self.steps = 0
        self.max_steps = max_steps
        self._pool: list[Any] = []
        self._members: set[int] = set()
        self._agents: dict[int, AsyncAgent] = {}
        self._waiting: dict[Any, list[Warp]] = {}
        self._parked: dict[int, Warp] = {}
        self._pollers: dict[int, Warp] = {}
        self._rests: dict[int, bool] = {}
        self._resting_warp: dict[int, Warp] = {}
        self._resting: list[Warp] = []
        self._paces: dict[int, float] = {}
        self._fruitless = 0
        self._jumped = EPOCH

    def clock(self) -> int:
        """Nanoseconds: executed instructions, and jumps while everybody waits. Never the same twice."""
        self._jumped += 1
        return self._jumped + self.steps

    def add(self, warp: Warp) -> None:
        """A warp was created, or can go on."""
        self._pool.append(warp)

    def activate(self, agent: AsyncAgent) -> None:
        """The agent may have something to do; harmless if it is active already."""
        key = id(agent)
        if key not in self._members:
            self._members.add(key)
            self._agents[key] = agent
            self._pool.append(agent)

    def wake(self, channel: Any) -> None:
        """Let everybody who waits on `channel` try again."""
        for warp in self._waiting.pop(channel, ()):
            self._retry(warp, channel)

    def run(self) -> None:
        """Run until nothing is left to do.

        Raises:
            DeadlockError: Somebody is left who can never go on.
            StepLimitError: `max_steps` were executed.
            ProgramError: Whatever the program did wrong.
        """
        pool, rng = self._pool, self.rng
        rand = rng.random
        while True:
            if not pool:
                if self._stir():
                    continue
                return
            at = int(rand() * len(pool))
            chosen = pool[at]
            if chosen.__class__ is Warp:
                if self.uneven is not Uneven.NOBODY and self._is_to_rest(chosen):
                    self._drop(at, chosen)
                    self._resting.append(chosen)
                elif self._run_warp(chosen, 1 + int(rand() * MAX_BURST)):
                    self._drop(at, chosen)
            elif self.slow_engines and len(pool) > 1 and rand() >= self._pace(chosen):
                continue
            elif not self._run_agent(chosen):
                self._drop(at, chosen)
                self._members.discard(id(chosen))
                self._paces.pop(id(chosen), None)
            if self.steps > self.max_steps:
                raise StepLimitError(f"{self.steps} steps executed\n  " + "\n  ".join(self.report()))

    def report(self) -> list[str]:
        """One line for whatever is not done: warps and agents."""
        lines = [
            line
            for launch in self.machine.running()
            for cta in launch.resident
            for warp in cta.warps
            if warp.live_bits
            for line in warp.waits()
        ]
        lines += [text for agent in self._agents.values() if (text := agent.describe())]
        queued = [launch for launch in self.machine.launches if launch.state == "queued"]
        lines += [f"{launch.describe()} waits for its turn" for launch in queued]
        return lines

    def _drop(self, at: int, chosen: Any) -> None:
        """Take `chosen` out of the pool; it was picked at `at`, and the pool has only grown since."""
        pool = self._pool
        last = pool.pop()
        if last is not chosen:
            pool[at] = last

    def _is_to_rest(self, warp: Warp) -> bool:
        """Whether the warp, or its CTA, rests, until all rest or wait and it is decided anew."""
        key = id(warp.cta)
        if self.uneven is Uneven.WARPS:
            if len(warp.cta.warps) == 1:
                return False
            resting = self._resting_warp.get(key)
            if resting is None:
                resting = self._resting_warp[key] = warp.cta.warps[
                    int(self.rng.random() * len(warp.cta.warps))
                ]
            return resting is warp
        rests = self._rests.get(key)
        if rests is None:
            rests = self._rests[key] = self.rng.random() < RESTING
        return rests

    def _pace(self, agent: AsyncAgent) -> float:
        """Which part of its turns a slow engine takes, until it has nothing to do."""
        pace = self._paces.get(id(agent))
        if pace is None:
            pace = self._paces[id(agent)] = PACES[int(self.rng.random() * len(PACES))]
        return pace

    def _run_agent(self, agent: AsyncAgent) -> bool:
        first = self.steps
        more = True
        for _ in range(1 + int(self.rng.random() * MAX_BURST)):
            more = agent.ready()
            if not more:
                break
            agent.step(self.rng)
            self.steps += 1
        if self.steps > first:
            self._fruitless = 0
            for hook in self.machine.quantum_hooks:
                hook(agent, first, self.steps - first)
        return more

    def _run_warp(self, warp: Warp, burst: int) -> bool:
        """Run a turn; returns whether the warp leaves the pool."""
        program = warp.program
        steps, stops, weights = program.steps, program.stops, program.weights
        first = self.steps
        count = 0
        leave = False
        while True:
            if warp.others:
                self._regroup(warp)
            pc = warp.pc
            outcome = steps[pc](warp)
            count += weights[pc]
            if outcome is None:
                warp.pc = pc + 1
                if stops[pc]:
                    burst -= 1
                    if burst <= 0:
                        break
                continue
            if outcome is BRANCH:
                if count > LONGEST_TURN:
                    break
                continue
            if outcome is EXIT:
                if self._exit(warp):
                    leave = True
                    break
                continue
            count = self._interrupted(warp, outcome, pc, count)
            if count < 0:
                count = -count - 1
                leave = warp.parked
                break
        warp.executed += count
        self.steps = first + count
        if not warp.polling:
            self._fruitless = 0
        if self.machine.quantum_hooks:
            for hook in self.machine.quantum_hooks:
                hook(warp, first, count)
        return leave

    def _interrupted(self, warp: Warp, outcome: Any, pc: int, count: int) -> int:
        """The step blocked, yielded or polled: `count` to go on with other lanes, else -count - 1."""
        if isinstance(outcome, Blocked):
            count -= warp.program.weights[pc]
            if warp.wait is None or warp.wait.channel != outcome.wait.channel:
                for hook in self.machine.block_hooks:
                    hook(warp, outcome.wait, warp.program.line_of(pc))
            self._waiting.setdefault(outcome.wait.channel, []).append(warp)
            warp.wait = outcome.wait
            if self._switch(warp, False):
                return count
            warp.parked = True
            self._parked[id(warp)] = warp
            return -count - 1
        if outcome is CONVERGE:
            count -= warp.program.weights[pc]
            if self._switch(warp, True):
                return count
            if any(group.wait for group in warp.others):
                warp.parked = True
                self._parked[id(warp)] = warp
                return -count - 1
            self._stuck(warp)
        warp.pc = pc + 1
        if warp.others and self._switch(warp, False):
            warp.patience = -TURN_STEPS
        elif outcome is POLL:
            self._poll(warp)
        return -count - 1

    def _poll(self, warp: Warp) -> None:
        memory = self.machine.global_memory
        written = [key for key, (addresses, raw) in warp.polls.items() if not memory.holds(addresses, raw)]
        if written:
            # The next round of the loop sees it; what is no part of the loop any more is forgotten.
            for key in written:
                del warp.polls[key]
            warp.polling = False
            warp.stale = 0
            return
        warp.parked = True
        self._pollers[id(warp)] = warp

        def news() -> None:
            if self._pollers.pop(id(warp), None) is not None:
                warp.parked = False
                self._fruitless = 0
                self._pool.append(warp)

        for addresses, _ in warp.polls.values():
            memory.watch(addresses, news)

    def _regroup(self, warp: Warp) -> None:
        """Merge groups that are at the same pc, then let the lowest pc run, or another when patience ends."""
        bits, pc = warp.active_bits, warp.pc
        merged = False
        for group in warp.others[:]:
            if group.pc == pc:
                bits |= group.bits
                warp.others.remove(group)
                merged = True
        if merged:
            warp.set_active(bits)
        if warp.patience < 0:
            warp.patience += 1
            return
        able = [group for group in warp.others if group.wait is None and not group.converging]
        if not able:
            return
        if warp.patience == 1:
            warp.patience = -TURN_STEPS
            self._load(warp, able[int(self.rng.random() * len(able))], Group(pc, warp.active_bits))
            return
        warp.patience = warp.patience - 1 if warp.patience else PATIENCE_STEPS
        lowest = min(able, key=_pc)
        if lowest.pc < pc:
            self._load(warp, lowest, Group(pc, warp.active_bits))

    def _switch(self, warp: Warp, converging: bool) -> bool:
        """Put the running group aside and run another; False if no other can run."""
        able = [group for group in warp.others if group.wait is None and not group.converging]
        if not able:
            return False
        aside = Group(warp.pc, warp.active_bits)
        aside.wait, aside.converging = warp.wait, converging
        self._load(warp, min(able, key=_pc), aside)
        return True

    def _load(self, warp: Warp, group: Group, aside: Group | None) -> None:
        warp.others.remove(group)
        if aside is not None:
            warp.others.append(aside)
        warp.pc = group.pc
        warp.wait = group.wait
        warp.set_active(group.bits)

    def _exit(self, warp: Warp) -> bool:
        """Active lanes have exited; returns whether it was the last of the warp."""
        warp.wait = None
        warp.live_bits &= ~warp.active_bits
        for group in warp.others:
            group.converging = False
        if warp.others:
            able = [group for group in warp.others if group.wait is None]
            self._load(warp, min(able or warp.others, key=_pc), None)
            return False
        warp.active_bits = 0
        self.machine.warp_exited(warp)
        return True

    def _retry(self, warp: Warp, channel: Any) -> None:
        if warp.wait is not None and warp.wait.channel == channel:
            warp.wait = None
        for group in warp.others:
            if group.wait is not None and group.wait.channel == channel:
                group.wait = None
        if warp.parked:
            warp.parked = False
            self._parked.pop(id(warp), None)
            self._pollers.pop(id(warp), None)
            self._fruitless = 0
            self._pool.append(warp)

    def _stir(self) -> bool:
        """The pool is empty: who rested goes on, queued launches begin, pollers poll, or it is a deadlock."""
        self._rests.clear()
        self._resting_warp.clear()
        if self._resting:
            self._pool += self._resting
            self._resting.clear()
            return True
        if self.machine.begin_launches():
            return True
        ready = [agent for agent in self._agents.values() if agent.ready()]
        for agent in ready:
            self.activate(agent)
        if ready:
            return True
        self._agents = {key: agent for key, agent in self._agents.items() if agent.describe()}
        if self._pollers and self._fruitless < PATIENCE:
            self._fruitless += 1
            self._jumped += 1 << self._fruitless
            for warp in self._pollers.values():
                warp.parked = False
                self._pool.append(warp)
            self._pollers.clear()
            self.machine.global_memory.watched.clear()
            return True
        waiting = self.report()
        if not waiting:
            return False
        raise DeadlockError("nobody can go on:", waiting)

    def _stuck(self, warp: Warp) -> None:
        places = "; ".join(
            f"lanes {bits:#010x} at line {warp.program.line_of(pc)} ({warp.program.opcode_of(pc)})"
            for pc, bits in [(warp.pc, warp.active_bits), *((group.pc, group.bits) for group in warp.others)]
        )
        raise DivergenceError(
            f"lanes of one warp wait for each other at different instructions: {places}",
            line=warp.line,
            where=warp.describe(),
        )


def _pc(group: Group) -> int:
    return group.pc
