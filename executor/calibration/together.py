"""Slow-downs of queues: every pair timed alone and side by side.

[Note: slow-downs] `compute_while_adam` = 1.25: while a CPU Adam runs, compute takes 1.25 times as long (cores, caches,
DRAM). The factor is for a partner that never pauses; the cost model scales it by the time in which the partner moves
bytes.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from executor.calibration.bench import Bench

Action = Callable[[], object]
Ended = tuple[float, float]
"""(time at which an action ended, its duration), both in seconds."""


def pace(rows: Sequence[Ended], begin_s: float, end_s: float) -> float:
    """Median seconds of actions that ended inside the window. Raises ValueError for fewer than two."""
    inside = [took_s for at_s, took_s in rows if begin_s <= at_s <= end_s]
    if len(inside) < 2:
        raise ValueError(f"{len(inside)} actions ended within {end_s - begin_s:.3g} s; watch for longer")
    return statistics.median(inside)


def watch(
    actions: Mapping[str, Action],
    window_s: float,
    *,
    enter: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    work_clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Of each kind while all run repeatedly, one thread per kind.

    The window begins when each has ended twice, and lasts `window_s` or until each has ended four times.

    enter: called first in each thread.
    work_clock: for an action's seconds, read in its own thread.
    """
    ended: dict[str, list[Ended]] = {name: [] for name in actions}
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(name: str) -> None:
        try:
            enter()
            while not stop.is_set():
                start_s = work_clock()
                actions[name]()
                took_s = work_clock() - start_s
                ended[name].append((clock(), took_s))
        except BaseException as error:  # raised later in the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,), name=f"calibrate-{name}", daemon=True) for name in actions]
    for thread in threads:
        thread.start()
    try:
        begin_s = _window(ended, failures, window_s, clock)
        end_s = clock()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return {name: pace(rows, begin_s, end_s) for name, rows in ended.items()}


def _window(
    ended: Mapping[str, Sequence[Ended]],
    failures: Sequence[BaseException],
    window_s: float,
    clock: Callable[[], float],
) -> float:
    while not failures and any(len(rows) < 2 for rows in ended.values()):
        time.sleep(0.002)
    begin_s = max(rows[1][0] for rows in ended.values()) if not failures else 0.0
    while not failures:
        late = any(sum(at_s >= begin_s for at_s, _ in rows) < 4 for rows in ended.values())
        if clock() - begin_s >= window_s and not late:
            break
        time.sleep(0.005)
    return begin_s


def slowdowns(
    actions: Mapping[str, Action], bench: Bench, watched: Callable[[Mapping[str, Action], float], dict[str, float]]
) -> dict[str, float]:
    """Returns "A_while_B" -> factor, at least 1, by which A takes longer while B runs, of medians over the rounds.

    Alone and side by side take turns, so that a busy spell affects both.

    watched: as `watch`.
    """
    alone: dict[str, list[float]] = defaultdict(list)
    paired: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(bench.effort.rounds):
        for name, action in actions.items():
            alone[name].append(watched({name: action}, bench.effort.window_s / 2)[name])
        for a, b in combinations(actions, 2):
            both = watched({a: actions[a], b: actions[b]}, bench.effort.window_s)
            paired[a, b].append(both[a])
            paired[b, a].append(both[b])
    return {
        f"{a}_while_{b}": max(1.0, statistics.median(times) / statistics.median(alone[a]))
        for (a, b), times in sorted(paired.items())
    }
