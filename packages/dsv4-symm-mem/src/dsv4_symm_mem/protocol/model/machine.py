# SPDX-License-Identifier: Apache-2.0
"""A scenario under a set of rules, compiled: programs, and where flags and slots lie.

Levels. A wait's level is its place in (token, own tile by index, gathered tile by index). By rule ii a rank
that is stuck at some level holds up only waits of a higher level or of a later call. Hence, among all waits
of the survivors of one death, the smallest (epoch, level) is a wait for the dead rank itself: were its
source alive, that rank would be stuck at a smaller one. That is why abort words are ordered by it.
"""

from __future__ import annotations

from dsv4_symm_mem.protocol.layout import BANKS
from dsv4_symm_mem.protocol.model.program import Area, Place, Places, Step, compile_programs
from dsv4_symm_mem.protocol.model.scenario import Rules, Scenario
from dsv4_symm_mem.protocol.model.state import Action, Frame, Rank, State, Worker
from dsv4_symm_mem.protocol.words import MULTICAST, bank_of, epoch_of, signal


class Machine:
    """What stays the same in all states of one exploration.

    Attributes:
        scenario: What is run.
        rules: The rules in force.
        programs: The workers' steps, by [rank][call][worker].
        places: The places in use, by number.
        sequences: For each rank, the numbers of the calls in the order in which it launches them.
        capacity: Workers that a rank's device holds at once.
        starts_at_once: A launched call's workers all run; else each needs a place of its own first.
    """

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.scenario = scenario
        self.rules = rules
        places = Places()
        self.programs = compile_programs(scenario, rules, places)
        self.places = places.in_order()
        self._numbers = {place: number for number, place in enumerate(self.places)}
        calls = list(range(len(scenario.calls)))
        swapped = [call for pair in range(0, len(calls), 2) for call in reversed(calls[pair : pair + 2])]
        self.sequences = [
            calls if rules.one_stream or rank == 0 else swapped for rank in range(scenario.world_size)
        ]
        self.capacity = (scenario.places or scenario.workers) - (not rules.co_resident)
        self.starts_at_once = self.capacity >= scenario.workers and not scenario.overlap

    def initial(self) -> State:
        """No call launched, no flag raised."""
        workspaces = 1 + max(call.workspace for call in self.scenario.calls)
        rank = Rank(False, 0, (0,) * workspaces, (), ((),) * self.scenario.workers)
        empty = (0,) * (BANKS * len(self.places))
        return State((rank,) * self.scenario.world_size, empty, empty)

    def finished(self, rank: Rank) -> bool:
        """Nothing is left to do for this rank: dead, all calls done, or the rest refused after an abort."""
        return rank.dead or (
            not rank.frames and (rank.launched == len(self.scenario.calls) or rank.abort is not None)
        )

    def locate(self, state: State, action: Action) -> tuple[Rank, Frame, Worker, Step]:
        """The rank, frame, worker and step that `action` concerns."""
        rank = state.ranks[action.rank]
        frame = rank.frames[action.frame]
        worker = frame.workers[action.worker]
        return rank, frame, worker, self.programs[action.rank][frame.call][action.worker][worker.step]

    def cell(self, place: int, epoch: int) -> int:
        """Index of a place in the state's flags and slots in call `epoch`."""
        return place * BANKS + (bank_of(epoch) if self.rules.two_banks else 0)

    def receiver(self, cell: int) -> int:
        """The rank that reads a cell's flag, and its slot but for what comes back to the source."""
        return self.places[cell // BANKS].receiver

    def reader(self, cell: int, source: int) -> int:
        """The rank for which what `source` has stored in a cell's slot is meant."""
        place = self.places[cell // BANKS]
        return place.receiver if source == place.source else place.source

    def home(self, cell: int, call: int) -> int:
        """The rank in whose memory `call` keeps a cell's slot."""
        place = self.places[cell // BANKS]
        return place.source if self.is_multicast(call) else place.receiver

    def partials(self, call: int, owner: int, index: int) -> list[int]:
        """Numbers of the places of every rank's partial of a tile, in rank order."""
        workspace = self.scenario.calls[call].workspace
        area = Area.PARTIAL
        return [
            self._numbers[Place(workspace, owner, source, area, index)]
            for source in range(self.scenario.world_size)
        ]

    def is_multicast(self, call: int) -> bool:
        """Whether partials of a call stay with their source."""
        return self.scenario.calls[call].operation in MULTICAST

    def flag_value(self, rank: int, call: int, epoch: int) -> int:
        """What a raised flag holds in a call that `rank` counts as `epoch`."""
        if not self.rules.epoch_in_flag:
            use_of_bank = (epoch - 1) // (BANKS if self.rules.two_banks else 1)
            return 1 - (use_of_bank & 1)
        signature = self.scenario.calls[call].signatures[rank] if self.rules.signature_in_flag else 0
        return signal(epoch, signature)

    def mismatches(self, seen: int, wanted: int) -> bool:
        """A flag is raised for the wanted call, by a rank that takes it for another."""
        return self.rules.epoch_in_flag and seen != wanted and epoch_of(seen) == epoch_of(wanted)

    def row(self, workspace: int, receiver: int, source: int) -> list[int]:
        """Numbers of the places that `source` writes at `receiver`."""
        return [
            number
            for number, place in enumerate(self.places)
            if (place.workspace, place.receiver, place.source) == (workspace, receiver, source)
        ]
