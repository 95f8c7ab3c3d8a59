"""How many chunks to pin and to stream: a roofline over both (`interleave` says which).

[Note: the roofline] Let x be the share of chunks (by parameters) that are pinned, z the share streamed; the CPU updates
the rest, 1 - x - z. All are spread evenly through the layers, so every window ([Note: update windows] in pins.py) has
the same share of CPU updates. An iteration takes at least each of: (1) the work of the compute queue with its Adam
steps; (2) CPU Adam, in each window and in total; (3) the copies in each direction, on a half-duplex link both
directions together; (4) the traffic of host DRAM; (5) reads and writes of the states on disks, those for which the host
has no room. Streamed states are copied up and down once. Chunks not kept between forward and backward come up again
after the turn. Behind a barrier streamed chunks are updated before the next forward, and compute waits for what of
their states did not fit earlier. It ranks numbers of chunks and proves nothing.

With several micro-batches, gradients of a share of the unpinned chunks add up on the GPU, streamed ones first, whose
sums take room. Where sums may spill, those without room beside the working lists go down and come up between two
micro-batches, which frees room at two turns, while giving up working lists costs the way up twice. All Adam lies
between the last micro-batch and the first, so `_in_turn_s` adds the seconds of the others and of the work between.
Other gradients go down in each micro-batch and the host adds them; a streamed chunk's sum then comes up with its
states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pstar_sim.policy.family.disks import beside_states_s, disk_s
from pstar_sim.policy.family.pins import PinFacts, pin_facts
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.update_windows import Inside
from pstar_sim.policy.passes.feasibility import host_room
from pstar_sim.workload.workload import Phase

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ModeFacts:
    """pins: of the closed form for pins, chunks in order of first use.
    states_bytes: per chunk, up for its update and down after it.
    sum_bytes: per chunk; 0 with one micro-batch.
    waits: bytes of a streamed chunk's waiting gradient, as a share of its sum.
    lists: times per iteration that a gradient goes down if its sum is not on the GPU.
    lists_streamed: of streamed chunks.
    sums: as in `Point`.
    drops_pinned: pinned ones drop working lists between last gradient and update.
    drops_streamed: behind a barrier all streamed ones do, otherwise those with their sum on the GPU.
    dram_bytes_per_s: the rank's part.
    dram_adam_bytes, dram_add_bytes: per chunk, of a CPU update and all adds on the host.
    dram_fold_bytes: of all adds that CPU Adam makes.
    passing_bytes: GPU room to stream a chunk: states and working list.
    last_room_bytes: room at the last moment with nothing pinned.
    host_room_bytes: for the chunks' lists.
    disk_room_bytes: for states without room on the host.
    disk_s, beside_states_s: per byte of states, and of other lists.
    turn_s: to the last backward pass.
    forward_s: of the first micro-batch.
    adds_before: share of adds on the GPU before the last micro-batch.
    """

    pins: PinFacts
    states_bytes: Sequence[int]
    sum_bytes: Sequence[int]
    waits: float
    lists: int
    lists_streamed: int
    sums: bool
    drops_pinned: bool
    drops_streamed: bool
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    dram_bytes_per_s: float
    duplex: bool
    dram_adam_bytes: Sequence[int]
    dram_add_bytes: Sequence[int]
    dram_fold_bytes: int
    passing_bytes: int
    last_room_bytes: int
    host_room_bytes: int
    disk_room_bytes: int
    disk_s: float
    beside_states_s: float
    turn_s: float
    first_s: float
    forward_s: float
    adds_before: float
    net_s: float


def mode_facts(job: Job) -> ModeFacts:
    w, link = job.workload, job.cost.link
    visiting = [job.visiting_bytes(c, held=job.sums_on_gpu) for c in job.candidates]
    states = [job.visiting_bytes(c, held=True) for c in job.candidates]
    last = w.micro_batches - 1
    turn = next(
        (i for i, m in enumerate(w.moments) if m.micro_batch == last and m.phase is not Phase.FWD), len(w.moments)
    )
    largest = max((job.sizes[c] for c in job.candidates), default=0)
    return ModeFacts(
        pins=pin_facts(job),
        states_bytes=states,
        sum_bytes=[all_bytes - state_bytes for all_bytes, state_bytes in zip(visiting, states)],
        waits=_share_that_waits(job),
        lists=1 if job.sums_on_gpu else w.micro_batches,
        lists_streamed=0 if job.sums_on_gpu else last + job.add_last,
        sums=job.may_sum,
        drops_pinned=job.drops_pinned_lists,
        drops_streamed=job.add_last or job.sums_on_gpu,
        h2d_bytes_per_s=link.h2d_bytes_per_s,
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        dram_bytes_per_s=job.machine.host.dram_bytes_per_s / job.machine.local_ranks,
        duplex=link.duplex,
        dram_adam_bytes=[job.cost.cpu_adam_bytes(c) for c in job.candidates],
        dram_add_bytes=[job.cost.cpu_add_bytes(c) * job.host_adds[c] for c in job.candidates],
        dram_fold_bytes=sum(job.cost.cpu_add_bytes(c) for c in job.candidates if job.folds[c]),
        passing_bytes=max(visiting, default=0) + largest,
        last_room_bytes=job.machine.gpu_budget_bytes - job.small_bytes - job.tide[-1],
        host_room_bytes=host_room(job),
        disk_room_bytes=job.machine.nvme_budget_bytes,
        disk_s=disk_s(job),
        beside_states_s=beside_states_s(job),
        turn_s=sum(job.cost.moments_s[:turn]),
        first_s=sum(s for s, m in zip(job.cost.moments_s, w.moments) if m.micro_batch == 0),
        forward_s=sum(s for s, m in zip(job.cost.moments_s, w.moments) if m.micro_batch == 0 and m.phase is Phase.FWD),
        adds_before=max(0, last - 1) / max(1, last),
        net_s=_least_net_s(job),
    )


def _share_that_waits(job: Job) -> float:
    if not job.may_wait:
        return 1.0
    first, sums = (sum(job.layout.payload_bytes(c, name) for c in job.candidates) for name in ("grad", "grad32"))
    return first / max(1, sums)


def _least_net_s(job: Job) -> float:
    """Each updated chunk is gathered once, its gradient summed in each micro-batch."""
    if job.ranks == 1:
        return 0.0
    return sum(job.gather_s[c] for c in job.candidates) * (1 + job.workload.micro_batches)


@dataclass(frozen=True, slots=True)
class Roofline:
    """(len(pins), len(shares), len(sums)): by pinned chunks, and shares of the others streamed and with sums on the
    GPU.

    seconds: inf where the GPU or the host lacks room.
    floor_s: without windows but the last chunk's, which depend on the chunks' modes, as if streamed parameters stayed
        between iterations.
    spilt: share of the chunks whose sums spill.
    """

    seconds: Array
    floor_s: Array
    spilt: Array

    def at(self, number: int) -> Roofline:
        only = slice(number, number + 1)
        return Roofline(self.seconds[only], self.floor_s[only], self.spilt[only])


def roofline(
    facts: ModeFacts,
    pins: Sequence[int],
    shares: Sequence[float],
    sums: Sequence[float] = (0.0,),
    *,
    spill: float = 0.0,
    in_turn: bool = True,
) -> Roofline:
    """[Note: the roofline].

    spill: share of the bytes without room between two micro-batches for which sums make room.
    in_turn: whether `_in_turn_s` counts.
    """
    f = facts.pins
    total_s = float(np.sum(f.moments_s))
    working, pinned = np.asarray(f.working_bytes, float), np.asarray(f.pinned_bytes, float)
    everything = max(1.0, float(working.sum()))
    first = np.concatenate(([0.0], np.cumsum(working))) / everything
    x = first[np.asarray(pins, dtype=int)][:, None, None]
    z = (1 - x) * np.asarray(shares, dtype=float)[None, :, None]
    summed = (1 - x) * np.asarray(sums, dtype=float)[None, None, :]  # streamed chunks first
    cpu = 1 - x - z
    summed_z = np.minimum(z, summed)
    summed_cpu = np.maximum(0.0, summed - summed_z)
    added = 1 - x - summed  # share whose gradients add up on the host
    gpu_adam, adam = float(np.sum(f.gpu_adam_s)), float(np.sum(f.adam_s))
    add, gpu_add = float(np.sum(f.add_s)), float(np.sum(f.gpu_add_s))
    up, down = float(np.sum(f.up_s)), float(np.sum(f.down_s))
    states, sum_bytes = float(np.sum(facts.states_bytes)), float(np.sum(facts.sum_bytes))
    visiting = z * states + (z - summed_z) * sum_bytes  # bytes
    # Room at the end of the last moment, and the sums that have no room there. Behind a barrier, working lists whose
    # gradient is in a sum are dropped.
    dropped = (x * facts.drops_pinned + (z if facts.drops_streamed else summed_z)) * f.barrier
    last = facts.last_room_bytes - x * pinned.sum() - (z - dropped) * everything - summed_z * sum_bytes
    visiting = visiting + (np.clip(-last, 0.0, summed_z * sum_bytes) if spill and f.barrier else 0.0)
    # Copies up: each unpinned chunk once, and again over every gap that it leaves.
    passing = np.where(z > 0, float(facts.passing_bytes), 0.0)
    beside = f.room_bytes - x * pinned.sum() - (summed_cpu + summed_z * facts.waits) * sum_bytes
    spilt = np.clip(spill * ((1 - x) * everything - beside), 0.0, summed * sum_bytes)
    beside = beside + spilt
    left = np.maximum(0.0, beside - passing)  # at the last turn, when states pass; other turns have more room
    again = np.maximum(0.0, (1 - x) * everything - left)
    if f.gaps > 1:
        again = again + np.maximum(0.0, (1 - x) * everything - np.maximum(0.0, beside)) * (f.gaps - 1)
    again = again / everything * up
    turn_up = np.maximum(0.0, (1 - x) * everything - np.maximum(0.0, beside))
    times = facts.lists - 1  # number of times that a sum is spilt
    h2d = (1 - x) * up + (visiting + times * spilt) / facts.h2d_bytes_per_s + again
    held = np.maximum(0.0, beside)
    adds_s = (x + summed) * gpu_add  # on the compute queue, in every micro-batch but the first
    adds_before_s = adds_s * facts.adds_before
    backward = (
        facts.turn_s
        + adds_before_s
        + np.maximum(0.0, (1 - x) * everything + visiting + spilt - held) / facts.h2d_bytes_per_s
    )
    d2h = (1 - x) * down + (visiting - (z - summed_z) * sum_bytes + times * spilt) / facts.d2h_bytes_per_s
    d2h = d2h + ((cpu - summed_cpu) * (facts.lists - 1) + (z - summed_z) * facts.lists_streamed) * down
    d2h = d2h + summed_cpu * (sum_bytes / facts.d2h_bytes_per_s - down)
    traffic = h2d * facts.h2d_bytes_per_s + d2h * facts.d2h_bytes_per_s
    traffic = traffic + cpu * float(np.sum(facts.dram_adam_bytes)) + added * float(np.sum(facts.dram_add_bytes))
    traffic = traffic + (cpu - summed_cpu) * float(facts.dram_fold_bytes)
    wait = np.zeros_like(z)
    if f.barrier:
        wait = np.maximum(0.0, (visiting - np.maximum(0.0, last)) / facts.h2d_bytes_per_s - z * gpu_adam)
    computed = total_s + (x + z) * gpu_adam + adds_s + wait
    folded = (cpu - summed_cpu) * float(np.sum(f.fold_s))
    terms = [computed, cpu * adam + added * add + folded, traffic / facts.dram_bytes_per_s]
    terms += [d2h] if facts.duplex else []
    if not f.barrier:
        terms.append(backward)
    if facts.sums and not f.barrier:
        terms.append(facts.turn_s + adds_before_s + _last_down_s(facts, cpu, z, summed_cpu, beside, x) - facts.first_s)
    terms.append(np.full_like(z, facts.net_s))
    never = 0.0 if spill or f.barrier else summed_z * sum_bytes  # sums that are never on the host
    over = (1 - x) * pinned.sum() - never - facts.host_room_bytes
    sunk = np.clip(over, 0.0, np.minimum((1 - x) * states, facts.disk_room_bytes))  # bytes of states on disks
    more = np.clip(over - sunk, 0.0, np.minimum((1 - x) * everything + added * sum_bytes, facts.disk_room_bytes - sunk))
    if facts.disk_room_bytes:
        terms.append(sunk * facts.disk_s + more * facts.beside_states_s)
    windows = _windows(facts)
    inside_s = adds_s if f.barrier else adds_before_s
    last_window = _longest(windows[-1:], inside_s, cpu)
    least_up = h2d - z * up
    floor = np.stack(np.broadcast_arrays(*terms, last_window, least_up if facts.duplex else least_up + d2h))
    terms += [_longest(windows, inside_s, cpu), h2d if facts.duplex else h2d + d2h]
    if facts.sums and in_turn:
        sent = z * states + (cpu - summed_cpu) * everything + summed_cpu * sum_bytes
        added_s = adds_s / times  # seconds per micro-batch, on the GPU
        up_rate, down_rate = facts.h2d_bytes_per_s, facts.d2h_bytes_per_s
        coming = (1 - x) * everything + visiting
        ahead = np.clip(last, 0.0, visiting)  # bytes copied up for updates behind a barrier that have room before it
        terms.append(
            _in_turn_s(
                facts,
                computed_s=(added_s, (x + z) * gpu_adam + wait),
                adam_s=cpu * adam + folded,
                up_s=(turn_up / up_rate, spilt / up_rate, (coming - ahead) / up_rate, ahead / up_rate),
                down_s=((1 - x - summed) * everything / down_rate, spilt / down_rate, sent / down_rate),
            )
        )
    seconds = np.stack(np.broadcast_arrays(*terms)).max(axis=0)
    short = over > sunk + more
    if len(sums) > 1:
        short = short | (beside < 0)
    seconds = np.where(short, np.inf, seconds)
    spilt_share = np.broadcast_to(spilt / max(1.0, sum_bytes), seconds.shape)
    return Roofline(np.asarray(seconds), np.asarray(floor.max(axis=0)), spilt_share)


def _longest(windows: Sequence[tuple[float, float, float]], inside_s: Array, cpu: Array) -> Array:
    longest = np.zeros_like(cpu + inside_s)
    for span, adams, copies in windows:
        longest = np.maximum(longest, np.where(cpu > 1e-9, span + inside_s + cpu * adams + copies, 0.0))
    return longest


def _in_turn_s(
    facts: ModeFacts,
    *,
    computed_s: tuple[Array, Array],
    adam_s: Array,
    up_s: tuple[Array, Array, Array, Array],
    down_s: tuple[Array, Array, Array],
) -> Array:
    """What cannot overlap: all micro-batches but the last, each with the forward behind it, and from the last to the
    next iteration all updates and the first forward, without a barrier the backward too.

    computed_s: besides the moments: a micro-batch's adds, and the updates.
    up_s: chunks that do not stay over a turn; a micro-batch's spilt sums; lists for the updates and the next iteration;
        what of these may come before the barrier.
    down_s: a micro-batch's gradients; its spilt sums; lists that leave in the last.
    """
    backward_s = facts.first_s - facts.forward_s
    (added_s, updates_s), (turn_s, spilt_up_s, last_up_s, ahead_s), (lists_s, spilt_down_s, last_down_s) = (
        computed_s,
        up_s,
        down_s,
    )
    forward_s, back_s = _most(facts.forward_s, turn_s), _most(backward_s + added_s, turn_s + spilt_up_s)
    each_s = _most(forward_s + back_s, lists_s + spilt_down_s)
    if facts.pins.barrier:
        last_s = _most(backward_s + added_s, turn_s + spilt_up_s + ahead_s, lists_s)
        last_s = last_s + _most(facts.forward_s + updates_s, adam_s, last_up_s)
    else:
        last_s = _most(facts.first_s + added_s + updates_s, adam_s, turn_s + last_up_s + ahead_s, last_down_s)
    return (facts.lists - 1) * each_s + last_s


def _most(*seconds: Array | float) -> Array:
    return np.asarray(np.stack(np.broadcast_arrays(*seconds)).max(axis=0), dtype=np.float64)


def _last_down_s(facts: ModeFacts, cpu: Array, z: Array, summed_cpu: Array, beside: Array, x: Array) -> Array:
    """Down before the next iteration's first micro-batch ends, for want of room beside the chunks: from the last turn
    on, gradients and sums for CPU Adam, and states and parameters of streamed chunks."""
    f = facts.pins
    working, states, sums = (float(np.sum(size)) for size in (f.working_bytes, facts.states_bytes, facts.sum_bytes))
    size = (cpu - summed_cpu + z) * working + summed_cpu * sums + z * states
    return (size - np.maximum(0.0, beside - (1 - x) * working)) / facts.d2h_bytes_per_s


def _windows(facts: ModeFacts) -> list[tuple[float, float, float]]:
    """(span, CPU Adam of all chunks inside, copies) of windows that can bind: the upper envelope of span + share *
    Adam, then the last chunk's."""
    f = facts.pins
    clock = np.concatenate(([0.0], np.cumsum(f.moments_s)))
    first, final = np.asarray(f.first), np.asarray(f.final)
    if not len(first):
        return []
    adam, down, up = np.asarray(f.adam_s), np.asarray(f.down_s), np.asarray(f.up_s)
    if f.barrier:
        span = float(clock[-1]) - clock[first]
    else:
        span = np.maximum(0.0, clock[final + 1] - clock[first])
    adams = Inside(first, None if f.barrier else final).sums(adam)
    copies = up + (0.0 if f.barrier else down)
    value = span + copies
    chosen = {*_highest(value, adams), len(first) - 1}
    return [(float(span[j]), float(adams[j]), float(copies[j])) for j in sorted(chosen)]


def _highest(value: Array, slope: Array) -> Iterator[int]:
    j = int(np.lexsort((slope, value))[-1])
    yield j
    while len(steeper := np.flatnonzero(slope > slope[j])):
        shares = (value[j] - value[steeper]) / (slope[steeper] - slope[j])  # from these shares on, they are higher
        k = int(np.lexsort((-slope[steeper], shares))[0])
        if shares[k] > 1.0:
            return
        j = int(steeper[k])
        yield j


def interleave(
    order: Sequence[int], sizes: Sequence[int], pins: int, streams: int, head: int = 0, front: int = 0
) -> tuple[list[int], list[int]]:
    """(pinned, streamed) chunks of `order`: the first `front` streamed, the next `head` pinned, others by error
    diffusion, weighted by bytes, so that every run of layers has its share. Numbers are met as nearly as sizes allow,
    never exceeded.
    """
    front = min(front, streams, len(order))
    head = min(head, pins, len(order) - front)
    streamed, pinned = list(order[:front]), list(order[front : front + head])
    rest = order[front + head :]
    whole = float(sum(sizes[c] for c in rest))
    if not whole:
        return pinned, streamed
    left_pin, left_stream = pins - head, streams - front
    want_pin, want_stream = left_pin / len(rest), left_stream / len(rest)
    owed_pin = owed_stream = 0.5 * whole / len(rest)  # bytes that should have been taken by now
    for c in rest:
        size = sizes[c]
        owed_pin += want_pin * size
        owed_stream += want_stream * size
        may_pin = left_pin > 0 and owed_pin >= size * (1 - 1e-9)
        may_stream = left_stream > 0 and owed_stream >= size * (1 - 1e-9)
        if may_pin and (owed_pin >= owed_stream or not may_stream):
            pinned.append(c)
            owed_pin -= size
            left_pin -= 1
        elif may_stream:
            streamed.append(c)
            owed_stream -= size
            left_stream -= 1
    return pinned, streamed
