"""The draft while passes write it.

[Note: passes] A pass writes one concern of an iteration: working lists, collectives, stashes, gradients, updates.
`before(n)` writes what brings lists for position n, and returns what the position waits for; `behind(n, here)` what
follows the position's row `here`. Positions with rows are named: at most, most passes write none. `close()` adds edges
over the border once all rows are written, and CPU Adam. Passes find each other's rows by meaning (`DraftRows`). A
module's `room` gives the bytes, per block or position, that it needs beside working lists, before a policy decides
which chunks stay.

[Note: keys] Of a queue's ready rows, the smallest key goes first. To the GPU: the position served, then the chunk. To
the host: -2 for drops; -1 for stashes out, because a forward pass waits for them; 0 for gradients of early
micro-batches; 1 for last gradients and updated states, then by `Schedule.down`; 2 for parameters that stay, behind all
states, if `Schedule.states_first`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pstar_sim.core.draft import Charge, DraftRow
from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.kit.schedule import Schedule

After = tuple[tuple[int, int], ...]
"""(row, iterations back) pairs for which a row waits."""


class Pass(Protocol):
    """[Note: passes]

    before_at, behind_at: positions of `before` and `behind`.
    """

    @property
    def before_at(self) -> Iterable[int]: ...

    @property
    def behind_at(self) -> Iterable[int]: ...

    def before(self, n: int) -> Sequence[int]: ...

    def behind(self, n: int, here: int) -> None: ...


class DraftRows:
    """end_of: position -> row.
    last_rows: position -> last compute row before the next.
    fetch_of: chunk -> position and row of its latest.
    release_of: (chunk, list) -> last row that freed it on the GPU.
    others_release_of: chunk -> last row that freed others' slices.
    sum_of: chunk -> sum of its last gradient.
    add_of: chunk -> add of its latest gradient on the host, or copy there.
    last_adds: those of last gradients, if clipping needs their norm.
    send_of: chunk -> write-back of its last gradient to CPU Adam.
    host_left_by: (chunk, list) on disks that makes trips -> last row that freed it on the host.
    first_drop_of: streamed chunk that stays -> drop of its parameters.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._charges = schedule.job.charges
        self.rows: list[DraftRow] = []
        self.end_of: list[int] = []
        self.last_rows: list[int] = []
        self.fetch_of: dict[int, tuple[int, int]] = {}
        self.release_of: dict[tuple[int, str], int] = {}
        self.others_release_of: dict[int, int] = {}
        self.sum_of: dict[int, int] = {}
        self.add_of: dict[int, int] = {}
        self.last_adds: list[int] = []
        self.send_of: dict[int, int] = {}
        self.host_left_by: dict[tuple[int, str], int] = {}
        self.first_drop_of: dict[int, int] = {}
        self.gpu_update_of: dict[int, int] = {}
        self.cpu_update_of: dict[int, int] = {}
        self._last_computed = -1
        self._number = 0

    def add(
        self,
        queue: Queue,
        kind: Kind,
        chunk: int = -1,
        list_name: str = "param",
        moment: int = -1,
        *,
        charge: Charge | None = None,
        after: After = (),
        key: tuple[float, ...] | None = None,
        behind: int | None = None,
        use: int | None = None,
        is_position: bool = False,
        block: int = -1,
        stash: int = -1,
        gated: bool = False,
    ) -> int:
        """charge: of a row that handles no list."""
        here = len(self.rows)
        if charge is None:
            charge = self._charges.of(kind, chunk, list_name)
        self.rows.append(
            DraftRow(
                queue, kind, chunk, list_name, moment, charge, after, key, behind, use, is_position, block, stash, gated
            )
        )
        if queue is Queue.COMPUTE:
            self._last_computed = here
        return here

    def charge_of_update(self, kind: Kind, chunk: int) -> Charge:
        """Of the update of a chunk that is not resident."""
        return self._charges.of_update(kind, chunk, folds=self.schedule.folds(chunk))

    def writeback(
        self, chunk: int, list_name: str, moment: int, after: After, key: tuple[float, ...], drop: bool
    ) -> int:
        """drop: from the GPU at once.

        Returns the copy's row.
        """
        down = self.add(Queue.D2H, Kind.WRITEBACK, chunk, list_name, moment, after=after, key=key)
        if drop:
            self.release_of[chunk, list_name] = self.add(Queue.D2H, Kind.DROP, chunk, list_name, moment, behind=down)
        return down

    def drop(self, chunk: int, list_name: str, moment: int) -> int:
        """As soon as the compute queue's latest row has ended."""
        return self.add(Queue.COMPUTE, Kind.DROP, chunk, list_name, moment, behind=self._last_computed)

    def wait(self, row: int, *after: tuple[int, int]) -> None:
        """Let a row wait for rows of the previous iteration."""
        self.rows[row].after += after

    def host_left(self, chunk: int, list_name: str) -> After:
        """A wait for the row that freed the list on the host, if one has."""
        left = self.host_left_by.get((chunk, list_name))
        return () if left is None else ((left, 0),)

    def next_number(self) -> float:
        """Rows that send or add go as they become ready."""
        self._number += 1
        return float(self._number)

    def end(self, here: int) -> None:
        self.end_of.append(here)

    def leave(self) -> None:
        self.last_rows.append(self._last_computed)

    def moment_of(self, n: int) -> int:
        """The moment that a copy for position n serves."""
        job, position = self.schedule.job, self.schedule.positions[n]
        return job.blocks[position.block].first if position.block >= 0 else job.uses.last_gradient(position.chunk)

    def down_key(self, chunk: int) -> tuple[float, ...]:
        """Of a last gradient's or updated list's copy to the host."""
        number, schedule = self.next_number(), self.schedule
        return (1.0, float(schedule.job.uses.first_use(chunk)) if schedule.down == "edf" else number)


def ends_of(refs: Iterable[int]) -> After:
    """An `after` that waits for these rows of the same iteration."""
    return tuple([(row, 0) for row in refs])
