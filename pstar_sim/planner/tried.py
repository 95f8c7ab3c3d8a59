from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pstar_sim.python310 import StrEnum
from pstar_sim.units import format_bytes, format_s

MOST_NAMED = 4


class WayOutcome(StrEnum):
    PLANNED = "planned"
    NO_ROOM = "does not fit"
    COMPUTING = "computing takes longer"  # than the best plan, its stashes included
    BOUND = "its bound is too high"
    CAPPED = "not tried"  # it might have been the best


@dataclass(frozen=True, kw_only=True)
class Cap:
    """Why a way that might be best was not planned: `policy` plans at most so many `ways`, and `alike` of the same
    micro-batches."""

    policy: str
    ways: int
    alike: int

    def __str__(self) -> str:
        return (
            f"{self.policy} plans at most {self.ways} ways, at most {self.alike} with equal micro-batches, "
            "and besides those that another policy plans faster"
        )


@dataclass(frozen=True, kw_only=True)
class Tried:
    """seconds: per iteration; a lower bound if not planned; None if it does not fit.

    stashes: whether computing waits for any stash.
    cap: why a way that might be best was not planned.
    """

    outcome: WayOutcome
    seconds: float | None = None
    place: str | None = None
    short_bytes: int | None = None
    stashes: bool = False
    chunk_bytes: int | None = None
    cap: Cap | None = None

    def to_json(self) -> dict[str, object]:
        said = {key: value for key, value in asdict(self).items() if value is not None and value is not False}
        return {**said, "outcome": self.outcome.value}

    def __str__(self) -> str:
        seconds = format_s(self.seconds or 0.0)
        if self.outcome is WayOutcome.PLANNED:
            return seconds
        if self.outcome is WayOutcome.NO_ROOM:
            return f"does not fit: short by {self.short_bytes} bytes of the {self.place}"
        if self.outcome is WayOutcome.COMPUTING:
            what = "computing and its stashes alone take" if self.stashes else "computing alone takes"
            return f"not planned: {what} {seconds}"
        if self.outcome is WayOutcome.BOUND:
            size = format_bytes(self.chunk_bytes or 0)
            return f"not planned: no plan of it with chunks of {size} takes less than {seconds}"
        return f"not tried: {self.cap}; its bound is {seconds}"


def tried_of(value: object) -> dict[str, Tried] | None:
    """By way; None for anything but what `Tried.to_json` wrote: files are not trusted."""
    if not isinstance(value, Mapping):
        return None
    try:
        return {str(way): _one(said) for way, said in value.items()}
    except (TypeError, ValueError):
        return None


def _one(said: object) -> Tried:
    if not isinstance(said, Mapping):
        raise TypeError
    cap = said.get("cap")
    made = Tried(
        **{**said, "outcome": WayOutcome(str(said.get("outcome"))), "cap": Cap(**cap) if cap is not None else None}
    )
    if made.outcome is not WayOutcome.NO_ROOM and not isinstance(made.seconds, int | float):
        raise TypeError
    if made.outcome is WayOutcome.BOUND and not isinstance(made.chunk_bytes, int):
        raise TypeError
    return made


def tried_text(tried: Mapping[str, Tried], chosen: str = "") -> str:
    """The planned ways with their seconds, and the number of the others, with the reasons.

    chosen: is left out.
    """

    def of(*outcomes: WayOutcome) -> list[Tried]:
        return [row for row in tried.values() if row.outcome in outcomes]

    others = [f"{way}: {row}" for way, row in tried.items() if row.outcome is WayOutcome.PLANNED and way != chosen]
    skipped, capped, short = of(WayOutcome.COMPUTING, WayOutcome.BOUND), of(WayOutcome.CAPPED), of(WayOutcome.NO_ROOM)
    parts = others[:MOST_NAMED]
    if len(others) > MOST_NAMED:
        parts.append(f"{len(others) - MOST_NAMED} more planned")
    if skipped:
        parts.append(f"{len(skipped)} promise too little")
    if capped:
        parts.append(_capped_text(capped))
    if short:
        parts.append(f"{len(short)} do not fit")
    return "; ".join(parts)


def _capped_text(capped: Sequence[Tried]) -> str:
    """Such as "3 not tried (optimal plans at most 5 ways ...; their bounds are 1.1 s to 2.0 s)"."""
    first, last = (format_s(row.seconds or 0.0) for row in (capped[0], capped[-1]))
    bounds = f"its bound is {first}" if len(capped) == 1 else f"their bounds are {first} to {last}"
    return f"{len(capped)} not tried ({capped[0].cap}; {bounds})"
