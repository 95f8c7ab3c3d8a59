"""Step: one action of a plan on one queue, and its one-line text form.

[Note: what a step does to memory] All that follows a plan does so by the table EFFECTS. Lists that a step reads have to
be there when it starts; it takes bytes when it starts and frees them when it ends. The table leaves out:

- Moments: a compute step needs its chunks on the gpu, takes the tide's rise when it starts and frees the tide's fall
  when it ends.
- Contents: alloc zeroes the list that it takes. A copy (fetch, writeback, nvme_read, nvme_write) leaves in its target
  the contents that it read. cpu_add adds the gradient to grad32; with list=param it adds the last gradient, which lies
  in the host's working list and stays there. cpu_adam and gpu_adam also read the states, and leave updated parameters
  in the working list. After gather the chunk is whole on this gpu. After reduce_scatter the own slice is the reduced
  gradient.
- Stashes and borders: a stash, the activations that a block's forward keeps, is no chunk's list. Its bytes on the gpu
  are part of the tide; its room on the host is held throughout. So are the bytes that pipeline stages send
  ([Note: stashes], [Note: borders] in workload/workload.py).

[Note: several ranks] Every rank runs the same program. With Layout.ranks = P > 1 a chunk's list is this rank's slice,
1/P, and "remote" (beside "param") and "grad_remote" (beside "grad") are all others'. A chunk is read as a whole, and
its gradient arrives as a whole: in "param" and "remote" (in place, in the last micro-batch), in "grad" and
"grad_remote", or with those of other micro-batches in "grad32" and "grad32_remote". gather list=remote brings the
others' parameters; the own slice has to be current. Once the gradient is complete, reduce_scatter, with the list of the
others' slices, leaves the sum over all ranks in the own slice; with grad32 on the gpu, a reduced grad_remote is added
to it too. With Layout.ranks = 1 on several ranks every list is whole on every rank: reduce_scatter and then gather, of
the gradient's list, make a complete gradient the sum over all ranks.

The tide: before moment m the gpu holds peak(m-1) of non-model bytes, in m peak(m). A rise is taken when m starts, a
fall freed when m-1 ends; before the first moment comes the previous iteration's last.

[Note: parts of a step] The CPU may update a large chunk in parts, of elements `Layout.part_range` of every list. Three
kinds may be parts: the write-back of the last gradient, cpu_adam, and the fetch of the updated working list. They run
in order on their queue; the first takes memory, the last frees it, and the list is there after the last. `bytes` are
those of the part's elements.

Lists: "param" (working list; the gradient overwrites it in place in the last micro-batch), the optimizer's state lists
("param32", "momentum", "variance"), "grad" (a gradient on its way out, working dtype), "grad32" (gradients accumulated
over micro-batches; on the gpu for chunks whose Adam runs there), and those of others' slices (see above). "grad32" has
4 bytes per parameter, or those of the working list if `Layout.sum_bytes` says so.
`bytes` is the bytes on the link for copies (normally the payload; more if a policy moves a wider type), the whole chunk
(all slices) for gather and reduce_scatter, the payload for alloc, free and drop, the host memory traffic for cpu_add
and cpu_adam, the gpu memory traffic for gpu_adam, and 0 for compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, structs

from pstar_sim.errors import PlanError
from pstar_sim.python310 import StrEnum


class Queue(StrEnum):
    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    ADAM = "adam"
    NET = "net"
    NVME = "nvme"
    NVME_WRITE = "nvme_write"
    SEND = "send"
    RECEIVE = "receive"


class Kind(StrEnum):
    COMPUTE = "compute"
    FETCH = "fetch"
    WRITEBACK = "writeback"
    DROP = "drop"
    ALLOC = "alloc"
    FREE = "free"
    CPU_ADD = "cpu_add"
    CPU_UPDATE = "cpu_adam"
    GPU_UPDATE = "gpu_adam"
    GATHER = "gather"
    REDUCE_SCATTER = "reduce_scatter"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    STASH_OUT = "stash_out"
    STASH_IN = "stash_in"
    SEND = "send"
    RECEIVE = "receive"


class Place(StrEnum):
    GPU = "gpu"
    HOST = "host"
    NVME = "nvme"


ROUTES = {
    Kind.FETCH: "h2d",
    Kind.WRITEBACK: "d2h",
    Kind.STASH_IN: "h2d",
    Kind.STASH_OUT: "d2h",
    Kind.GATHER: "net",
    Kind.REDUCE_SCATTER: "net",
    Kind.NVME_READ: "nvme_read",
    Kind.NVME_WRITE: "nvme_write",
    Kind.SEND: "sent",
    Kind.RECEIVE: "received",
}
"""Kinds that move bytes -> the route of the bytes."""

COPIES = frozenset(kind for kind, route in ROUTES.items() if route in ("h2d", "d2h"))
"""Kinds that cross the link between host and gpu."""

DISK_COPIES = frozenset({Kind.NVME_READ, Kind.NVME_WRITE})

DISK_QUEUES = (Queue.NVME, Queue.NVME_WRITE)
"""The second has writes beside reads: [Note: reads beside writes] in machine.py."""

COUNTED = frozenset(ROUTES[kind] for kind in COPIES | DISK_COPIES)
"""Routes of copies that the executor counts where it makes them."""

UPDATES = frozenset({Kind.CPU_UPDATE, Kind.GPU_UPDATE})
"""Kinds of Adam. Each runs at the place where it reads the states."""


OTHERS = {"remote": "param", "grad_remote": "grad", "grad32_remote": "grad32"}
"""Lists of the other ranks' slices -> the list to which the slices belong ([Note: several ranks])."""


@dataclass(frozen=True, slots=True)
class Touch:
    """Taken or freed list of the step's chunk.

    place, list: None for the step's own.
    lenient: nothing happens to a list already there, or not there to be freed; else that is an error.
    only: for steps with one of these lists, None for all.
    but: not for steps with this list.
    """

    place: Place | None
    list: str | None = None
    lenient: bool = False
    only: frozenset[str] | None = None
    but: str | None = None

    def concerns(self, list_name: str | None) -> bool:
        return (self.only is None or list_name in self.only) and (self.but is None or list_name != self.but)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a kind of step takes when it starts and frees when it ends.

    reads: where the step's list (Adam: the working list and the states) has to be when it starts.
    """

    reads: Place | None = None
    takes: Touch | None = None
    frees: Touch | None = None


_OF_OTHERS = frozenset(OTHERS)

EFFECTS: dict[Kind, Effect] = {
    Kind.COMPUTE: Effect(),
    Kind.ALLOC: Effect(takes=Touch(None)),
    Kind.FREE: Effect(frees=Touch(None)),
    Kind.FETCH: Effect(reads=Place.HOST, takes=Touch(Place.GPU, lenient=True)),
    Kind.WRITEBACK: Effect(reads=Place.GPU, takes=Touch(Place.HOST, lenient=True)),
    Kind.DROP: Effect(frees=Touch(Place.GPU)),
    Kind.CPU_ADD: Effect(
        takes=Touch(Place.HOST, "grad32", lenient=True), frees=Touch(Place.HOST, "grad", lenient=True, but="param")
    ),
    Kind.CPU_UPDATE: Effect(reads=Place.HOST),
    Kind.GPU_UPDATE: Effect(reads=Place.GPU),
    Kind.GATHER: Effect(reads=Place.GPU, takes=Touch(Place.GPU, lenient=True, only=_OF_OTHERS)),
    Kind.REDUCE_SCATTER: Effect(reads=Place.GPU, frees=Touch(Place.GPU, only=_OF_OTHERS)),
    Kind.NVME_READ: Effect(reads=Place.NVME, takes=Touch(Place.HOST, lenient=True)),
    Kind.NVME_WRITE: Effect(reads=Place.HOST, takes=Touch(Place.NVME, lenient=True)),
    Kind.STASH_OUT: Effect(),
    Kind.STASH_IN: Effect(),
    Kind.SEND: Effect(),
    Kind.RECEIVE: Effect(),
}
"""[Note: what a step does to memory]"""


class Ref(Struct, frozen=True):
    """A step of this iteration (back 0) or the previous (1). Before the first, all count as done."""

    id: int
    back: int = 0

    def __str__(self) -> str:
        return f"{self.id}@-{self.back}" if self.back else str(self.id)


class Part(NamedTuple):
    """`number` (from 0) in `of` parts: [Note: parts of a step]."""

    number: int
    of: int

    @property
    def last(self) -> bool:
        return self.number + 1 == self.of

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class Step(Struct, frozen=True, kw_only=True):
    """One action.

    bytes: see the module's docstring.
    place: only for an alloc or a free.
    moment: for compute, what runs; for fetch, the first use; for writeback and Adam, the last gradient; for trips, the
        moment that makes or needs what moves.
    after: what has to end first.
    via: "pageable" for a copy of unpinned host memory, None for pinned, asynchronous; "unfused" for an update on the
        GPU with a kernel per operation.
    stash: index into the workload's stashes, of a send or receive into its borders.
    part: None for the whole ([Note: parts of a step]).
    """

    id: int
    queue: Queue
    kind: Kind
    bytes: int = 0
    chunk: int | None = None
    list: str | None = None
    place: Place | None = None
    moment: int | None = None
    after: tuple[Ref, ...] = ()
    via: str | None = None
    stash: int | None = None
    part: Part | None = None

    @property
    def completes(self) -> bool:
        return self.part is None or self.part.last

    def waiting_for(self, after: tuple[Ref, ...]) -> Step:
        return structs.replace(self, after=after)


def part_counts(steps: Iterable[Step]) -> dict[int, int]:
    """Chunk -> number of parts, for chunks updated in parts."""
    return {s.chunk: s.part.of for s in steps if s.part is not None and s.chunk is not None}


PAGEABLE = "pageable"
"""`Step.via` of a copy from or to host memory that is not pinned."""
UNFUSED = "unfused"
"""`Step.via` of an update on the GPU by kernels of one operation each."""


def to_text(step: Step) -> str:
    """Such as "12 h2d fetch chunk=3 list=param moment=15 bytes=67108864 after=4,9@-1"."""
    words = [str(step.id), step.queue.value, step.kind.value]
    for name in _READERS:
        value = getattr(step, name)
        if value is None or (name == "bytes" and value == 0) or (name == "after" and not value):
            continue
        words.append(f"{name}={','.join(map(str, value))}" if name == "after" else f"{name}={value}")
    return " ".join(words)


_Member = TypeVar("_Member", bound=Enum)


class _WrongWord(ValueError):
    def __init__(self, word: str, want: str) -> None:
        super().__init__(word, want)
        self.word = word
        self.want = want


def _natural(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise _WrongWord(name, "is not a whole number >= 0")
    return int(text)


def _member(members: type[_Member], what: str) -> Callable[[str, str], _Member]:
    known = {member.value: member for member in members}

    def read(name: str, text: str) -> _Member:
        if text not in known:
            raise _WrongWord(text, f"is not {what} ({', '.join(known)})")
        return known[text]

    return read


def _list_name(name: str, text: str) -> str:
    return text


def _via(name: str, text: str) -> str:
    if text not in (PAGEABLE, UNFUSED):
        raise _WrongWord(text, f"is not a way to copy or to update; via= takes {PAGEABLE!r} or {UNFUSED!r}")
    return text


_PART = re.compile(r"(\d+)/(\d+)", re.ASCII)


def _part(name: str, text: str) -> Part:
    match = _PART.fullmatch(text)
    part = Part(int(match[1]), int(match[2])) if match else None
    if part is None or not part.number < part.of >= 2:
        raise _WrongWord(text, 'is not a part such as "0/8", the first of eight')
    return part


_REF = re.compile(r"(\d+)(?:@-(1))?")


def _after(name: str, text: str) -> tuple[Ref, ...]:
    refs = []
    for each in text.split(","):
        match = _REF.fullmatch(each)
        if match is None:
            raise _WrongWord(each, 'is not a step id such as "7" or "7@-1"')
        refs.append(Ref(int(match[1]), 1 if match[2] else 0))
    return tuple(refs)


_queue, _kind = _member(Queue, "a queue"), _member(Kind, "a kind of step")
_READERS: dict[str, Callable[[str, str], Any]] = {
    "chunk": _natural,
    "list": _list_name,
    "stash": _natural,
    "place": _member(Place, "a place"),
    "moment": _natural,
    "part": _part,
    "bytes": _natural,
    "via": _via,
    "after": _after,
}
"""Field of a line -> function that reads its text; the name of the field is for messages."""


def from_text(line: str) -> Step:
    """Exactly reverses `to_text`. Raises PlanError naming the line and the wrong word."""
    try:
        return _read(line)
    except _WrongWord as wrong:
        raise PlanError(f"step {line!r}: {wrong.word!r} {wrong.want}") from None


def _read(line: str) -> Step:
    words = line.split()
    if len(words) < 3:
        raise _WrongWord(line, "needs at least an id, a queue and a kind")
    queue, kind = _queue("", words[1]), _kind("", words[2])
    seen: dict[str, Any] = {}
    for word in words[3:]:
        name, _, text = word.partition("=")
        if not text or name not in _READERS or name in seen:
            raise _WrongWord(word, f"is not one of {', '.join(f + '=' for f in _READERS)} given once")
        seen[name] = _READERS[name](name, text)
    return Step(id=_natural(words[0], words[0]), queue=queue, kind=kind, **seen)
