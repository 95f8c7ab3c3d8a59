"""Every error that a user can cause derives from `PstarError`.

The command line prints its text as one line and exits with 2, 3 for an answer (`DoesNotFit`, `NothingFits`), or 143
(`Stopped`).
"""

from __future__ import annotations

from pstar_sim.units import format_bytes
from pstar_sim.words import letters, meant


class PstarError(Exception):
    """Base of every error that a user can cause and correct."""


class CannotPlan(PstarError):
    """No plan for this kind of machine or job, whatever its memory; the text names policy and reason."""


class CatalogError(PstarError):
    """A catalog entry with a missing, unknown or absurd field."""


class TraceError(PstarError):
    """A trace file that is truncated, foreign, newer, or inconsistent; the text names file and field."""


class PlanError(PstarError):
    """A plan that is malformed, fails a check, or is used on another model, dtype or machine."""


class FalseFigures(PlanError):
    """A plan whose steps are right but which states false figures."""

    def __init__(self, false: tuple[str, ...]) -> None:
        super().__init__("; ".join(false))
        self.false = false


class NothingFits(PlanError):
    """None of the policies, machines or variants fits; the text has each reason."""


class ModelError(PstarError):
    """A model that cannot be built, traced under fake tensors, or executed; the text names the module."""


class ContractError(PstarError):
    """A training loop did something that an offloaded optimizer cannot support; the text names the replacement."""


class WeightsError(PstarError):
    """A file or folder of weights that is truncated, corrupt, or for another model; the text names file and tensor."""


class CheckpointError(PstarError):
    """A checkpoint that is incomplete, for another model, from a newer version, or that could not be written."""


class DiskError(PstarError):
    """A folder of disks that cannot be used, or a transfer to or from it that failed; the text names folder and
    list."""


class Interrupted(PstarError):
    """Ctrl-C in the middle of an update: some values are from before it and some from after."""


class Stopped(PstarError):
    """A run that was asked to end, and has saved its checkpoint; the text says where."""


class OutOfMemory(PstarError):
    """An accelerator refused memory while a plan ran; torch.OutOfMemoryError is the same for CUDA.

    payload_bytes: of chunks.
    other_bytes: everything else.
    limit_bytes: None where the device does not say.

    The executor climbs its ladder (executor/off_plan/ladder.py); a user's loop sees the error only if no rung helps.
    """

    def __init__(
        self, *, what: str, asked_bytes: int, payload_bytes: int, other_bytes: int, limit_bytes: int | None
    ) -> None:
        from pstar_sim.units import format_bytes

        of = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
        super().__init__(
            f"out of accelerator memory: {what} asked for {format_bytes(asked_bytes)} beside "
            f"{format_bytes(payload_bytes)} of chunks and {format_bytes(other_bytes)} of other data{of}"
        )
        self.what = what
        self.asked_bytes = asked_bytes
        self.payload_bytes = payload_bytes
        self.other_bytes = other_bytes
        self.limit_bytes = limit_bytes


class RankLost(PstarError):
    """Another process of a run on several ranks has ended or cannot follow; the text names the process and its last
    words."""


class UnknownName(PstarError):
    """A name that no catalog, policy table or file knows; the text lists the nearest known names.

    otherwise: what to do if none is meant, at the text's end.
    guess: a similar name may be meant. NAdam is not Adam: all are listed.
    """

    def __init__(
        self, kind: str, name: str, known: tuple[str, ...], otherwise: str = "", *, guess: bool = True
    ) -> None:
        import difflib

        plain = {letters(other): other for other in known}
        asked = letters(name)
        begin = sorted(other for other in plain if asked and other.startswith(asked))
        within = {n: own.lower().split("-") if len(asked) < 3 else n for n, own in plain.items()}  # 7b is a part's name
        inside = sorted((n for n in plain if asked in within[n]), key=len)
        alike = difflib.get_close_matches(asked, plain, n=3, cutoff=0.4)
        near = [plain[n] for n in (begin or [*dict.fromkeys([*inside, *alike])])[:3]] if guess else []
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(known)[:20])}"
        hint = (meant(name) if guess else None) or hint
        super().__init__(f"unknown {kind} {name!r}; {hint}" + (f" ({otherwise})" if otherwise else ""))
        self.kind = kind
        self.name = name
        self.near = tuple(near)


class DoesNotFit(PstarError):
    """A policy cannot place this workload on this machine.

    place: "gpu", "host", "nvme", or "pinned" for host memory that is to be pinned.
    needed_bytes, available_bytes: in that place, at the moment that lacks most.
    what: what needs the room, one clause ("all param16 resident plus 14.2 GB of non-model data at moment 361").
    change: that would make it fit, if known ('with "pin_memory": false').
    """

    def __init__(
        self, *, policy: str, place: str, needed_bytes: int, available_bytes: int, what: str, change: str = ""
    ) -> None:
        short = needed_bytes - available_bytes
        needs, has = ("host is to pin", "can pin") if place == "pinned" else (f"{place} needs", "has")
        super().__init__(
            f"{policy} does not fit: {needs} {format_bytes(needed_bytes)} ({what}) "
            f"but {has} {format_bytes(available_bytes)}, short by {format_bytes(short)}"
        )
        self.policy = policy
        self.place = place
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.short_bytes = short
        self.what = what
        self.change = change

    def or_less(self, first: DoesNotFit | None) -> DoesNotFit:
        """The first, unless this names less of the same place."""
        less = first is None or (self.place == first.place and self.needed_bytes < first.needed_bytes)
        return self if less or first is None else first

    def restated(
        self,
        *,
        policy: str | None = None,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
        what: str | None = None,
        change: str | None = None,
    ) -> DoesNotFit:
        return DoesNotFit(
            policy=self.policy if policy is None else policy,
            place=self.place,
            needed_bytes=self.needed_bytes if needed_bytes is None else needed_bytes,
            available_bytes=self.available_bytes if available_bytes is None else available_bytes,
            what=self.what if what is None else what,
            change=self.change if change is None else change,
        )
