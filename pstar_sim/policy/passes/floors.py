"""How far ahead of its use a copy to the GPU may begin."""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.policy.passes.draft_rows import After, DraftRows


def fetch_floors(prefetch: str | int, served: Sequence[int], count: int) -> list[int | None]:
    """The position that must end before each copy starts, None if only room delays it, negative in the previous
    iteration (-1 its last).

    prefetch: "none" (or 0): after the position before the one served: copies and computing alternate; k: after the
        position before that of the k-th chunk before.
    served: by the copies, in order.
    """
    if prefetch == "edf":
        return [None] * len(served)
    ahead = 0 if prefetch == "none" else int(prefetch)
    floors: list[int | None] = []
    for i in range(len(served)):
        laps, j = divmod(i - ahead, len(served))
        floor = laps * count + served[j] - 1
        floors.append(floor if floor >= -count else None)
    return floors


class Floors:
    def __init__(self, rows: DraftRows) -> None:
        schedule = rows.schedule
        self._rows = rows
        self._count = len(schedule.positions)
        served = {(n, c) for c, n in schedule.updates.items()}
        for c in schedule.visits:
            served.update((stretch.first, c) for stretch in schedule.fetched(c))
        for c, stretches in schedule.sums.items():
            served.update((stretch.first, c) for stretch in stretches[1:])
        for c, stretches in schedule.whole.items():
            served.update((stretch.first, c) for stretch in stretches)
        order = sorted(served)
        self._floor_of = dict(zip(order, fetch_floors(schedule.prefetch, [n for n, _ in order], self._count)))
        self._earlier: list[tuple[int, int]] = []  # (row, position of the previous iteration that it waits for)

    def of(self, c: int, n: int) -> After:
        """What must end before chunk c may be copied for position n."""
        floor = self._floor_of[n, c]
        return ((self._rows.last_rows[floor], 0),) if floor is not None and floor >= 0 else ()

    def serve(self, c: int, n: int, row: int) -> None:
        floor = self._floor_of[n, c]
        if floor is not None and floor < 0:
            self._earlier.append((row, floor))

    def close(self) -> None:
        """The waits for positions of the previous iteration."""
        for row, floor in self._earlier:
            self._rows.wait(row, (self._rows.last_rows[floor + self._count], 1))
