"""Groups: which contenders are compared with each other, and which of them run at once. A group is as large as fits the
memory. The table's references are in every group, so that each peer is compared with steps of the very same minutes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ON_A_CARD", "TABLES", "Table", "merged", "next_group", "ratios", "tables_of"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Contenders of one table.

    contenders: keys of CONTENDERS.
    references: contenders that every group of the table has, as far as memory allows.
    beside: contender -> the contender of ours to compare it with, where that is not the first reference.
    """

    name: str
    contenders: tuple[str, ...]
    references: tuple[str, ...]
    beside: Mapping[str, str] = field(default_factory=dict)

    def counterpart(self, contender: str) -> str:
        return self.beside.get(contender, self.references[0])


_PEERS = ("zero2", "zero3", "zero3_twinflow", "fsdp2")

TABLES = (
    Table(
        name="everything resident",
        contenders=("ours", "ours_eager", "plain", *_PEERS),
        references=("ours", "plain"),
    ),
    Table(
        name="model data leave",
        contenders=("ours_half", "ours_away", *_PEERS),
        references=("ours_half", "ours_away"),
        beside={"zero3": "ours_away", "zero3_twinflow": "ours_away", "fsdp2": "ours_away"},
    ),
)
"""The tables on a CPU. In the first, our contenders keep everything resident, beside peers that offload all the same.
In the second, our contenders offload model data; each peer is compared with the contender of ours that keeps about as
much on the accelerator."""

ON_A_CARD = (
    Table(name="on a card", contenders=("ours", "ours_eager", "plain", *_PEERS), references=("ours", "plain")),
)


def tables_of(contenders: Sequence[str], device: str) -> list[Table]:
    """Returns the tables in which one of the requested contenders is ours or plain PyTorch, not a peer. If there is no
    such table, returns the first one."""
    tables = ON_A_CARD if device == "cuda" else TABLES
    return [table for table in tables if (set(table.contenders) - set(_PEERS)) & set(contenders)] or [tables[0]]


def next_group(
    pending: Sequence[str], references: Sequence[str], need_bytes: Mapping[str, int], room_bytes: int
) -> list[str]:
    """Returns the contenders to run at once now: the first of `pending` that fits, the references that fit beside it,
    and as many others of `pending` as the rest of the room holds. Empty if none of `pending` fits alone."""
    fitting = [name for name in pending if need_bytes[name] <= room_bytes]
    if not fitting:
        return []
    group = [next((name for name in fitting if name not in references), fitting[0])]
    for name in (*references, *fitting):
        if name not in group and sum(need_bytes[member] for member in (*group, name)) <= room_bytes:
            group.append(name)
    return [name for name in dict.fromkeys((*references, *pending)) if name in group]


def merged(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns one result per contender: times of all its groups, other figures of its first group. A failure counts if
    the contender never ran."""
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
    """Returns the step seconds of our contender over those of each other contender, "ours / plain" and so on, from the
    groups in which both ran. "medians" is the ratio of the medians over all rounds. "rounds" is the median over the
    rounds of the ratio of one round, which is not affected by noise that both saw."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for group in groups:
        times = {name: result.get("times_s", []) for name, result in group.items()}
        for mine in (name for name in times if name.startswith("ours")):
            for other in times:
                if other != mine:
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
