"""Who is alive at once: as many contenders as memory holds, ours and the reference in every group, so that each peer is
compared with steps of the very same minutes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["groups_of", "merged", "ratios"]

ALWAYS = ("ours", "plain")


def groups_of(names: Sequence[str], need_bytes: Mapping[str, int], room_bytes: int) -> list[list[str]]:
    """Groups that each fit the room (at least one contender beside ALWAYS in each, fit or not); every name is in one,
    ALWAYS in all."""
    always = [name for name in names if name in ALWAYS]
    others = [name for name in names if name not in ALWAYS]
    base_bytes = sum(need_bytes.get(name, 0) for name in always)
    groups: list[list[str]] = []
    for name in others:
        for group in groups:
            if base_bytes + sum(need_bytes.get(member, 0) for member in (*group, name)) <= room_bytes:
                group.append(name)
                break
        else:
            groups.append([name])
    return [[*always, *group] for group in groups or [[]]]


def merged(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """One result a contender: times of every group it was in, the rest of the first; a failure counts if it never
    ran."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name, result in group.items():
            before = found.get(name)
            if before is None or "failed" in before:
                found[name] = dict(result)
            elif "failed" not in result:
                times_s = [*before["times_s"], *result["times_s"]]
                median_s = statistics.median(times_s)
                tokens = before["tokens_per_s"] * before["median_s"]
                before |= {"times_s": times_s, "median_s": median_s, "tokens_per_s": tokens / median_s}
    return found


def ratios(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Step of ours over that of each other, "ours / plain" and so on, from the groups in which both ran: "medians" of
    both over all rounds, and the median over the rounds of the ratio of one round ("rounds"), which noise that both saw
    leaves alone."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for group in groups:
        times = {name: result.get("times_s", []) for name, result in group.items()}
        for mine in ("ours", "ours_eager"):
            for other in times:
                if mine in times and other != mine:
                    pairs.setdefault((mine, other), []).extend(zip(times[mine], times[other]))
    return {
        f"{mine} / {other}": {
            "medians": statistics.median(a for a, _ in both) / statistics.median(b for _, b in both),
            "rounds": statistics.median(a / b for a, b in both),
            "number": len(both),
        }
        for (mine, other), both in pairs.items()
        if both
    }
