"""Plays an unrolled plan once, in a legal order: does each step find its lists, with the right contents?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pstar_sim.core.checker.unrolled import OTHERS, Unrolled, label
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Place, Step, part_counts
from pstar_sim.core.trips import TRIPS
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import MASTER_LIST


@dataclass(slots=True)
class _Content:
    """version: updates applied (parameters, states), or iteration (gradients).
    marks: (micro-batch, tensor) of each gradient, no longer a parameter of the working list.
    summed: over all ranks: "no", "slice" or "yes".
    filling: parts that a copy has brought, None once all are there.
    updating: parts that an update has done, None if none is under way.
    """

    version: int
    marks: set[tuple[int, int]] = field(default_factory=set)
    summed: str = "no"
    filling: int | None = None
    updating: int | None = None

    def copy(self) -> _Content:
        return _Content(self.version, set(self.marks), self.summed)


_Key = tuple[int, str, Place]
_Piece = tuple[_Key, int]
"""A list, and the number of the part of it."""
_FROM_TO = {
    Kind.FETCH: (Place.HOST, Place.GPU),
    Kind.WRITEBACK: (Place.GPU, Place.HOST),
    Kind.NVME_READ: (Place.NVME, Place.HOST),
    Kind.NVME_WRITE: (Place.HOST, Place.NVME),
}


def _key_name(key: _Key) -> str:
    return f"the {key[1]} list of chunk {key[0]} on the {key[2].value}"


class Walk:
    """takes: instance -> (place, bytes), without the tide.
    frees: instance -> (place, bytes).
    content: list -> None if no step has filled it.
    last_change: list -> latest instance that changed it.
    looks: list -> queue -> latest that read it since.
    finals: moment -> tensors whose gradient becomes final.
    expected: chunk -> (micro-batch, tensor) of an iteration's gradients.
    due: (chunk, micro-batch) -> its entries of `expected`.
    sums: chunks whose gradients add up on the gpu.
    whole_sums: those whose gradients do before they are summed over the ranks, and all on one.
    target: (chunk, micro-batch) -> list on the gpu where gradients arrive.
    lost_by: chunk -> words for the step that gave up its only current parameters.
    sent: chunk -> latest iteration in which a gradient went to the host outside a sum.
    """

    def __init__(self, plan: Plan, program: Unrolled) -> None:
        self.plan = plan
        self.program = program
        w, layout = plan.workload, plan.layout
        self.states = layout.state_lists
        self.content: dict[_Key, _Content | None] = {}
        for r in plan.initial:
            if r.chunk >= 0:
                layout.payload_bytes(r.chunk, r.list)
                fresh = r.list in ("param", "remote") or r.list in self.states
                self.content[r.chunk, r.list, r.place] = _Content(0) if fresh else None
        self.initial = frozenset(self.content)
        self.ranks = plan.machine.data_parallel_size
        self.sliced = layout.ranks > 1
        self.last_change: dict[_Piece, int] = {}
        self.looks: dict[_Piece, dict[int, int]] = {}
        self.takes: dict[int, tuple[Place, int]] = {}
        self.frees: dict[int, tuple[Place, int]] = {}

        # Gradients that become final in each moment: the last arrival of a tensor's gradient in its micro-batch.
        last: dict[tuple[int, int], int] = {}
        for m, tensors in enumerate(w.gradients):
            for t in tensors:
                last[w.moments[m].micro_batch, t] = m
        self.finals: list[list[int]] = [[] for _ in w.moments]
        self.expected: dict[int, set[tuple[int, int]]] = {}
        self.due: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for (u, t), m in last.items():
            self.finals[m].append(t)
            self.expected.setdefault(layout.chunk_of[t], set()).add((u, t))
            self.due.setdefault((layout.chunk_of[t], u), set()).add((u, t))
        self.lost_by: dict[int, str] = {}
        self.sent: dict[int, int] = {}
        self.parts = part_counts(plan.steps)
        self.sums = self._on_gpu("grad32")
        self.whole_sums = self._on_gpu("grad32_remote") if self.sliced else self.sums
        self.target = self._targets()

    def _on_gpu(self, list_name: str) -> frozenset[int]:
        chunks = {chunk for chunk, name, place in self.initial if name == list_name and place is Place.GPU}
        for step in self.plan.steps:
            if step.kind is Kind.ALLOC and step.place is Place.GPU and step.list == list_name:
                assert step.chunk is not None
                chunks.add(step.chunk)
        return frozenset(chunks)

    def _targets(self) -> dict[tuple[int, int], str]:
        allocs: dict[int, int] = {}
        for step in self.plan.steps:
            if step.kind is Kind.ALLOC and step.place is Place.GPU and step.list == "grad":
                assert step.chunk is not None
                allocs[step.chunk] = allocs.get(step.chunk, 0) + 1
        target: dict[tuple[int, int], str] = {}
        for chunk, marks in self.expected.items():
            batches = sorted({u for u, _ in marks})
            if chunk in self.whole_sums:
                lists = ["grad32"] * len(batches)
            elif (chunk, "grad", Place.GPU) in self.initial:
                lists = ["grad"] * len(batches)
            else:
                own = min(allocs.get(chunk, 0), len(batches))
                lists = ["grad"] * own + ["param"] * (len(batches) - own)
            target.update(((chunk, u), name) for u, name in zip(batches, lists))
        return target

    def run(self) -> None:
        program = self.program
        play: dict[Kind, Callable[[int, int, Step], None]] = {
            Kind.COMPUTE: self._compute,
            Kind.ALLOC: self._alloc,
            Kind.FREE: self._free,
            Kind.DROP: self._free,
            Kind.FETCH: self._copy,
            Kind.WRITEBACK: self._copy,
            Kind.CPU_ADD: self._add,
            Kind.CPU_UPDATE: self._adam,
            Kind.GPU_UPDATE: self._adam,
            Kind.GATHER: self._gather,
            Kind.REDUCE_SCATTER: self._reduce_scatter,
            Kind.NVME_READ: self._copy,
            Kind.NVME_WRITE: self._copy,
            **dict.fromkeys(TRIPS, self._nothing),
        }
        before: dict[_Key, object] = {}
        self._check_nothing_lost(-1)
        for k in range(program.iterations):
            for s in program.order[k * program.count : (k + 1) * program.count]:
                step = program.step(s)
                play[step.kind](s, k, step)
            self._check_cut(k)
            after = {key: self._relative(key, content, k) for key, content in self.content.items()}
            if k == program.iterations - 1 and after != before:
                odd = min(key for key in after if after[key] != before[key])
                raise PlanError(f"{_key_name(odd)} has other contents after each iteration")
            before = after

    def _relative(self, key: _Key, content: _Content | None, iteration: int) -> object:
        if content is None:
            return None
        version = content.version - iteration if key[0] in self.expected else content.version
        return version, frozenset(content.marks), content.summed

    def _check_cut(self, iteration: int) -> None:
        now = frozenset(self.content)
        if now == self.initial:
            self._check_no_divergence(iteration)
            self._check_nothing_lost(iteration)
            return
        extra, missing = sorted(now - self.initial), sorted(self.initial - now)
        what = []
        if extra:
            what.append(f"{_key_name(extra[0])} is left over ({len(extra)} in all)")
        if missing:
            what.append(f"{_key_name(missing[0])} is gone ({len(missing)} in all)")
        raise PlanError(f"not a steady state: after iteration {iteration} {' and '.join(what)}")

    def _check_no_divergence(self, iteration: int) -> None:
        """At the cut; between an update and its write-back copies of states may differ."""
        versions: dict[tuple[int, str], dict[Place, int]] = {}
        for (chunk, name, place), content in self.content.items():
            if name in self.states and content is not None:
                versions.setdefault((chunk, name), {})[place] = content.version
        for (chunk, name), copies in versions.items():
            if len(set(copies.values())) > 1:
                has = ", ".join(f"{version} updates on the {place.value}" for place, version in sorted(copies.items()))
                raise PlanError(
                    f"after iteration {iteration} the copies of the {name} list of chunk {chunk} diverge: {has}"
                )

    def _check_nothing_lost(self, iteration: int) -> None:
        """At the cut some place holds each chunk's current parameters, also of chunks never read, whose loss only a
        checkpoint would show."""
        for chunk in range(len(self.plan.layout.chunks)):
            wanted = iteration + 1 if chunk in self.expected else 0
            held = (self.content.get((chunk, "param", place)) for place in Place)
            if not any(c is not None and c.version == wanted and not c.marks for c in held):
                if chunk in self.lost_by:
                    raise PlanError(self.lost_by[chunk])
                name = self._name(self.plan.layout.chunks[chunk].slots[0].tensor)
                raise PlanError(
                    f"between two iterations no place holds the current parameters of chunk {chunk} ({name}, ...); "
                    "its param list belongs on the host, the gpu or the nvme"
                )

    # races

    def _pieces(self, s: int, key: _Key) -> Iterable[_Piece]:
        count = self.parts.get(key[0])
        if count is None:
            return ((key, 0),)
        part = self.program.step(s).part
        return ((key, n) for n in (range(count) if part is None else (part.number,)))

    def _look(self, s: int, key: _Key) -> None:
        for piece in self._pieces(s, key):
            self._look_at(s, piece)

    def _change(self, s: int, key: _Key) -> None:
        for piece in self._pieces(s, key):
            self._change_of(s, piece)

    def _look_at(self, s: int, key: _Piece) -> None:
        change = self.last_change.get(key)
        if change is not None and change != s and not self.program.precedes(change, s):
            self._race(change, s, key[0])
        self.looks.setdefault(key, {})[self.program.queue_of[s % self.program.count]] = s

    def _change_of(self, s: int, key: _Piece) -> None:
        change = self.last_change.get(key)
        if change is not None and change != s and not self.program.precedes(change, s):
            self._race(change, s, key[0])
        for look in self.looks.pop(key, {}).values():
            if look != s and not self.program.precedes(look, s):
                self._race(look, s, key[0])
        self.last_change[key] = s

    def _race(self, first: int, then: int, key: _Key) -> None:
        program = self.program
        a, b = program.step(first), program.step(then)
        back = program.iteration(then) - program.iteration(first)
        edge = f"{a.id}@-1" if back else f"{a.id}"
        raise PlanError(
            f"nothing makes {label(b)} wait for {label(a)}{' of the previous iteration' if back else ''}: both touch "
            f"{_key_name(key)}, and one of the two changes it; an edge after={edge} is missing"
        )

    # moves

    def _take(self, s: int, key: _Key) -> None:
        self._change(s, key)
        if key in self.content:
            raise PlanError(f"{label(self.program.step(s))} takes {_key_name(key)}, which is there already")
        self.content[key] = None
        self.takes[s] = (key[2], self.plan.layout.payload_bytes(key[0], key[1]))

    def _give(self, s: int, key: _Key) -> None:
        self._change(s, key)
        if key not in self.content:
            raise PlanError(f"{label(self.program.step(s))} frees {_key_name(key)}, which is not there")
        del self.content[key]
        self.frees[s] = (key[2], self.plan.layout.payload_bytes(key[0], key[1]))

    def _present(self, step: Step, key: _Key, why: str, tensor: int | None = None) -> _Content | None:
        """why: the message's verb, `tensor` its object."""
        if key not in self.content:
            what = "" if tensor is None else f"{self._name(tensor)} in "
            raise PlanError(f"{label(step)} {why} {what}{_key_name(key)}, which is not there")
        content = self.content[key]
        if content is not None:
            self._check_whole(step, why, key, content)
        return content

    def _check_whole(self, step: Step, why: str, key: _Key, content: _Content) -> None:
        wanted = self.parts.get(key[0], 1) if step.part is None else step.part.number + 1
        for verb, count in (("arrived", content.filling), ("been updated", content.updating)):
            own = verb == "been updated" and step.kind is Kind.CPU_UPDATE
            if count is not None and count < wanted - own:
                some = f"only {count} of {self.parts[key[0]]} parts have {verb}"
                raise PlanError(f"{label(step)} {why} {_key_name(key)}, of which {some}")

    def _name(self, tensor: int) -> str:
        return f"tensor {self.plan.workload.tensors[tensor].name!r}"

    # kinds of steps

    def _compute(self, s: int, k: int, step: Step) -> None:
        w, chunk_of = self.plan.workload, self.plan.layout.chunk_of
        assert step.moment is not None
        m = step.moment
        moment = w.moments[m]
        for t in w.reads[m]:
            chunk = chunk_of[t]
            for name in ("param", "remote") if self.sliced else ("param",):
                self._read(s, k, step, (chunk, name, Place.GPU), t)
        for t in self.finals[m]:
            own = self.target[chunk_of[t], moment.micro_batch]
            for name in (own, *(other for other, mine in OTHERS.items() if mine == own and self.sliced)):
                self._put_gradient(s, k, step, (chunk_of[t], name, Place.GPU), t)

    def _read(self, s: int, k: int, step: Step, key: _Key, t: int) -> None:
        self._look(s, key)
        content = self._present(step, key, "reads", t)
        if content is None:
            raise PlanError(f"{label(step)} reads {self._name(t)} in {_key_name(key)}, which nothing has filled")
        wanted = k if key[0] in self.expected else 0
        if content.version != wanted:
            raise PlanError(
                f"{label(step)} reads stale parameters: {_key_name(key)} has {content.version} updates where "
                f"iteration {k} needs {wanted}"
            )
        if content.marks and any((u, t) in content.marks for u in range(self.plan.workload.micro_batches)):
            raise PlanError(
                f"{label(step)} reads {self._name(t)} in {_key_name(key)} after its gradient has overwritten it"
            )

    def _put_gradient(self, s: int, k: int, step: Step, key: _Key, t: int) -> None:
        w = self.plan.workload
        assert step.moment is not None
        u = w.moments[step.moment].micro_batch
        self._change(s, key)
        content = self._present(step, key, "puts the gradient of", t)
        own = OTHERS.get(key[1], key[1])
        if own == "param":
            if content is None:
                raise PlanError(f"{label(step)} overwrites {_key_name(key)}, which nothing has filled")
            if any((v, t) in content.marks for v in range(w.micro_batches)):
                raise PlanError(
                    f"{label(step)} puts the gradient of {self._name(t)} of micro-batch {u} in {_key_name(key)} "
                    "over the gradient of an earlier micro-batch; it needs a grad list of its own (alloc)"
                )
        elif content is None or content.version != k or (own != "grad32" and any(v != u for v, _ in content.marks)):
            content = self.content[key] = _Content(k)
        if content.marks and content.summed != "no":
            raise PlanError(
                f"{label(step)} puts the gradient of {self._name(t)} in {_key_name(key)}, which holds the sum of "
                "earlier gradients over all ranks; a reduce_scatter belongs after the last gradient"
            )
        content.marks.add((u, t))

    def _nothing(self, s: int, k: int, step: Step) -> None:
        """What makes a trip is no list: trips.py proves its order."""

    def _alloc(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None and step.place is not None
        self._take(s, (step.chunk, step.list, step.place))

    def _free(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None
        place = Place.GPU if step.kind is Kind.DROP else step.place
        assert place is not None
        key = (step.chunk, step.list, place)
        content = self.content.get(key)
        self._give(s, key)
        if content is not None and (step.list == "param" or step.list in self.states):
            self._check_not_lost(step, key, content)
        elif content is not None and step.list == "remote" and content.marks:
            raise PlanError(f"{label(step)} gives up gradients that no reduce_scatter has summed over the ranks")

    def _check_not_lost(self, step: Step, key: _Key, content: _Content) -> None:
        """Another place holds the same or newer, or a sum the gradients. Parameters may also be given up until the
        update writes them anew from their masters: an earlier read finds nothing, and `_check_nothing_lost` finds what
        is never written."""
        for place in Place:
            other = self.content.get((key[0], key[1], place))
            if other is None:
                continue
            if other.version > content.version or (other.version == content.version and other.marks >= content.marks):
                return
        totals = [self.content.get((key[0], "grad32", place)) for place in Place]
        summed = any(t is not None and t.version == content.version and t.marks >= content.marks for t in totals)
        what = "gradients" if content.marks and not summed else "parameters" if key[1] == "param" else "states"
        words = f"{label(step)} gives up the only current copy of the {what} in {_key_name(key)}"
        masters = [self.content.get((key[0], MASTER_LIST, place)) for place in Place] if what == "parameters" else []
        if not any(master is not None and master.version == content.version for master in masters):
            raise PlanError(words)
        self.lost_by[key[0]] = words

    def _copy(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None
        there, here = _FROM_TO[step.kind]
        source, target = (step.chunk, step.list, there), (step.chunk, step.list, here)
        self._look(s, source)
        content = self._present(step, source, "copies")
        if content is None:
            raise PlanError(f"{label(step)} copies {_key_name(source)}, which nothing has filled")
        if target in self.content:
            self._change(s, target)
        else:
            self._take(s, target)
        if step.kind is Kind.WRITEBACK and content.marks and step.list != "grad32":
            self.sent[step.chunk] = content.version
        arrived = content.copy() if content.updating is None else _Content(content.version + 1)
        if step.part is not None and step.part.number:
            self._continue(step, target, arrived)
            return
        arrived.filling = None if step.part is None else 1
        self.content[target] = arrived

    def _continue(self, step: Step, target: _Key, arrived: _Content) -> None:
        """Raises PlanError if it is not the next part, or contents differ."""
        held = self.content[target]
        assert step.part is not None
        same = held is not None and (held.version, held.marks) == (arrived.version, arrived.marks)
        if held is None or not same or held.filling != step.part.number:
            raise PlanError(f"{label(step)} does not continue the copy of the part before it into {_key_name(target)}")
        held.filling = None if step.part.last else step.part.number + 1

    def _gather(self, s: int, k: int, step: Step) -> None:
        """Parameters (sliced layout), or the other slices of a gradient's sum (replicated)."""
        assert step.chunk is not None and step.list is not None
        target = (step.chunk, step.list, Place.GPU)
        if not self.sliced:
            self._change(s, target)
            content = self._present(step, target, "gathers")
            if content is None or content.summed != "slice":
                raise PlanError(f"{label(step)}: no reduce_scatter has summed a slice of {_key_name(target)} before")
            content.summed = "yes"
            return
        own = (step.chunk, "param", Place.GPU)
        self._look(s, own)
        content = self._present(step, own, "sends")
        if content is None or content.marks:
            raise PlanError(f"{label(step)} sends {_key_name(own)}, which does not hold parameters")
        if target in self.content:
            self._change(s, target)
        else:
            self._take(s, target)
        self.content[target] = _Content(content.version)

    def _reduce_scatter(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None
        chunk = step.chunk
        own = (chunk, OTHERS.get(step.list, step.list), Place.GPU)
        for key in {own, (chunk, step.list, Place.GPU)}:
            self._change(s, key)
            content = self._present(step, key, "reduces")
            marks = content.marks if content is not None and content.version == k else set()
            if not marks or content is None or content.summed != "no":
                raise PlanError(f"{label(step)} reduces {_key_name(key)}, which holds no gradient of this rank's")
            self._check_complete(step, "reduces", key, marks)
        mine = self.content[own]
        assert mine is not None
        if not self.sliced:
            mine.summed = "slice"
            return
        mine.summed = "yes"
        self._give(s, (chunk, step.list, Place.GPU))
        total = (chunk, "grad32", Place.GPU)
        if step.list == "grad_remote" and total in self.content:
            self._change(s, total)
            held = self._total(total, k)
            if held.marks & mine.marks:
                raise PlanError(f"{label(step)} adds a gradient to {_key_name(total)} a second time")
            held.marks |= mine.marks

    def _check_complete(self, step: Step, verb: str, key: _Key, marks: set[tuple[int, int]]) -> None:
        batches = {u for u, _ in marks}
        missing = set[tuple[int, int]]().union(*(self.due.get((key[0], u), ()) for u in batches)) - marks
        if missing:
            u, t = min(missing)
            raise PlanError(
                f"{label(step)} {verb} {_key_name(key)} before it is complete: the gradient of {self._name(t)} of "
                f"micro-batch {u} is not in it"
            )

    def _total(self, key: _Key, k: int) -> _Content:
        """Earlier iterations' contents count as an empty sum."""
        held = self.content[key]
        if held is None or held.version != k:
            held = self.content[key] = _Content(k, summed="yes")
        return held

    def _only_ours(self, content: _Content) -> bool:
        return self.ranks > 1 and bool(content.marks) and content.summed != "yes"

    def _add(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None
        grad, param = (step.chunk, "grad", Place.HOST), (step.chunk, "param", Place.HOST)
        total = (step.chunk, "grad32", Place.HOST)
        self._look(s, grad)
        source = param if step.list == "param" or (step.list != "grad" and grad not in self.content) else grad
        self._look(s, source)
        content = self._present(step, source, "adds")
        if content is None or content.version != k or not content.marks:
            raise PlanError(f"{label(step)} adds {_key_name(source)}, which holds no gradient of this iteration")
        if self._only_ours(content):
            raise PlanError(
                f"{label(step)} adds {_key_name(source)}, which no reduce_scatter has summed over the ranks"
            )
        self._check_complete(step, "adds", source, content.marks)
        if total in self.content:
            self._change(s, total)
        else:
            self._take(s, total)
        held = self._total(total, k)
        if held.marks & content.marks:
            batch = min(u for u, _ in content.marks)
            raise PlanError(f"{label(step)} adds the gradient of micro-batch {batch} a second time")
        held.marks |= content.marks
        if source is grad:
            self._give(s, grad)

    def _adam(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None
        place = Place.HOST if step.kind is Kind.CPU_UPDATE else Place.GPU
        chunk = step.chunk
        for name in self.plan.layout.states_of(chunk).names:
            key = (chunk, name, place)
            self._change(s, key)
            content = self._present(step, key, "needs")
            if content is None or content.version != k:
                raise PlanError(f"{label(step)} needs {_key_name(key)} as the last update left it, but it is not")
            self._updated(step, content)
        found = self._gradients(s, k, step, place)
        self._check_norm(k, step, place, found)
        self._check_sum_is_whole(k, step, place, found)
        missing = self.expected[chunk] - found
        if missing:
            u, t = min(missing)
            raise PlanError(
                f"{label(step)} does not find the gradient of {self._name(t)} of micro-batch {u} on the {place.value}:"
                f" it was not written back (or not added) before; {len(missing)} of {len(self.expected[chunk])} missing"
            )
        if step.completes:
            self.content[chunk, "param", place] = _Content(k + 1)
            self.lost_by.pop(chunk, None)
        elif (working := self.content[chunk, "param", place]) is not None:
            self._updated(step, working)

    def _updated(self, step: Step, content: _Content) -> None:
        content.updating = None if step.part is None or step.part.last else step.part.number + 1
        content.version += step.completes

    def _gradients(self, s: int, k: int, step: Step, place: Place) -> set[tuple[int, int]]:
        assert step.chunk is not None
        found: set[tuple[int, int]] = set()
        unsummed: list[_Key] = []
        for name in ("param", "grad", "grad32"):
            key = (step.chunk, name, place)
            self._change(s, key)
            content = self._present(step, key, "needs") if name == "param" else self.content.get(key)
            if content is not None and content.version == k:
                found |= content.marks
                unsummed += [key] if self._only_ours(content) else []
        if unsummed:
            raise PlanError(
                f"{label(step)} updates with the gradient in {_key_name(unsummed[0])}, which is this rank's own: a "
                f"reduce_scatter {'' if self.sliced else 'and a gather '}of it must come before"
            )
        return found

    def _check_sum_is_whole(self, k: int, step: Step, place: Place, found: set[tuple[int, int]]) -> None:
        """A sum on the gpu must not go down before the last gradient: on a sliced layout CPU Adam would add it, in
        seconds that neither cost model nor bounds count."""
        chunk = step.chunk
        if not (self.sliced and place is Place.HOST and chunk in self.sums):
            return
        total = self.content.get((chunk, "grad32", place))
        added = total.marks if total is not None and total.version == k else set()
        if found - added:
            u, t = min(found - added)
            raise PlanError(
                f"{label(step)}: the sum of gradients of chunk {chunk} left the gpu without the gradient of "
                f"{self._name(t)} of micro-batch {u}; add each gradient to grad32 on the gpu before its writeback"
            )

    def _check_norm(self, k: int, step: Step, place: Place, found: set[tuple[int, int]]) -> None:
        """The norm is taken of sums on the host, which need every gradient. (A sum made on the gpu may be there in
        between; the update then has all.)"""
        if not (self.plan.settings.clip and self.plan.workload.micro_batches > 1):
            return
        assert step.chunk is not None
        keys = [key for other in (Place.HOST, place) if (key := (step.chunk, "grad32", other)) in self.content]
        if place is Place.GPU and step.chunk in self.sums:
            return
        if place is Place.GPU and not keys:
            if self.sent.get(step.chunk) != k:
                return  # both gradients are on the gpu, where they are added up before the norm is taken
            raise PlanError(
                f"{label(step)}: a gradient of chunk {step.chunk} was on the host while another was on the gpu, so "
                "the norm misses their sum; with clipping and several micro-batches a cpu_add adds each gradient "
                "before any Adam"
            )
        totals = [total for key in keys if (total := self.content[key]) is not None and total.version == k]
        added = set[tuple[int, int]]().union(*(total.marks for total in totals))
        if found - added:
            u, t = min(found - added)
            raise PlanError(
                f"{label(step)}: the norm misses the gradient of {self._name(t)} of micro-batch {u}; with "
                "clipping and several micro-batches a cpu_add adds each gradient before any Adam"
            )
