"""How many chunks should be pinned and how many streamed: a roofline over both numbers, and which chunks these are.

[Note: the roofline] Let x be the share of the chunks (by parameters) that are pinned, z the share that is streamed, the
rest updated on the CPU. All three are spread evenly through the layers, so of every window's updates ([Note: update
windows] in pins.py) the CPU does the share 1 - x - z. One iteration takes at least: the compute queue's work and its
Adam steps; CPU Adam, in its windows and in all; the copies each way, with the states of streamed chunks once up and
once down, and with the chunks that cannot be kept between forward and backward a second time; on a half-duplex link
both ways together; and the traffic of host DRAM. From the turn of the last micro-batch on, everything that its backward
pass needs and that is not on the GPU has to come up. Behind a barrier all streamed chunks are updated before the next
forward: the part of their states that did not fit on the GPU before arrives while the compute queue waits. The roofline
ranks numbers of chunks and proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pstar_sim.policy.family.pins import PinFacts, pin_facts
from pstar_sim.policy.kit.job import Job
from pstar_sim.workload.workload import Phase

__all__ = ["ModeFacts", "Roofline", "interleave", "mode_facts", "roofline"]

Array = NDArray[np.float64]
SHARES = 33  # of CPU Adam, at which the window that binds is sought


@dataclass(frozen=True, kw_only=True)
class ModeFacts:
    """What the roofline needs to know of a job.

    pins: facts of the closed form for pins, chunks in order of first use.
    states_bytes: per chunk, bytes that come up for its update and go down after it. h2d, d2h, dram: bytes per second.
    dram_adam_bytes: DRAM traffic of one CPU update and of all its accumulations, per chunk.
    passing_bytes: GPU room that streaming one chunk takes, own use and copies.
    last_room_bytes: room at the last moment, nothing pinned.
    turn_s: when the last backward pass begins.
    net_s: least seconds of collectives.
    """

    pins: PinFacts
    states_bytes: Sequence[int]
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    dram_bytes_per_s: float
    duplex: bool
    dram_adam_bytes: Sequence[int]
    passing_bytes: int
    last_room_bytes: int
    turn_s: float
    net_s: float


def mode_facts(job: Job) -> ModeFacts:
    """The facts that the roofline over pinned and streamed chunks needs."""
    w, link = job.workload, job.cost.link
    states = [job.visiting_bytes(c) for c in job.candidates]
    last = w.micro_batches - 1
    turn = next(
        (i for i, m in enumerate(w.moments) if m.micro_batch == last and m.phase is not Phase.FWD), len(w.moments)
    )
    largest = max((job.sizes[c] for c in job.candidates), default=0)
    return ModeFacts(
        pins=pin_facts(job),
        states_bytes=states,
        h2d_bytes_per_s=link.h2d_bytes_per_s,
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        dram_bytes_per_s=job.machine.host.dram_bytes_per_s / job.machine.local_ranks,
        duplex=link.duplex,
        dram_adam_bytes=[job.cost.cpu_adam_bytes(c) for c in job.candidates],
        passing_bytes=max(states, default=0) + largest,
        last_room_bytes=job.machine.gpu_budget_bytes - job.small_bytes - job.tide[-1],
        turn_s=sum(job.cost.moments_s[:turn]),
        net_s=_least_net_s(job),
    )


def _least_net_s(job: Job) -> float:
    """Least seconds of collectives: each updated chunk is gathered once, and its gradient is summed in each
    micro-batch."""
    if job.ranks == 1:
        return 0.0
    each = sum(job.cost.collective_s(job.whole_bytes(c)) for c in job.candidates)
    return each * (1 + job.workload.micro_batches)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Closed-form seconds. Arrays have shape (len(pins), len(shares)): number of pinned chunks, share of the others
    that is streamed.

    seconds: seconds per iteration, the largest of several terms.
    floor_s: seconds without the terms of windows, which depend on where the modes lie (except the window of the last
        chunk), and with streamed parameters that need not come up again.
    """

    seconds: Array
    floor_s: Array


def roofline(facts: ModeFacts, pins: Sequence[int], shares: Sequence[float]) -> Roofline:
    """The closed form of [Note: the roofline]."""
    f = facts.pins
    total_s = float(np.sum(f.moments_s))
    working, pinned = np.asarray(f.working_bytes, float), np.asarray(f.pinned_bytes, float)
    everything = max(1.0, float(working.sum()))
    first = np.concatenate(([0.0], np.cumsum(working))) / everything
    x = first[np.asarray(pins, dtype=int)][:, None]
    z = (1 - x) * np.asarray(shares, dtype=float)[None, :]
    cpu = 1 - x - z
    gpu_adam, adam = float(np.sum(f.gpu_adam_s)), float(np.sum(f.adam_s))
    add = float(np.sum(f.add_s))
    up, down = float(np.sum(f.up_s)), float(np.sum(f.down_s))
    states = float(np.sum(facts.states_bytes))
    states_up, states_down = states / facts.h2d_bytes_per_s, states / facts.d2h_bytes_per_s
    # Copies up: each unpinned chunk once, and again over every gap it cannot be kept.
    passing = np.where(z > 0, float(facts.passing_bytes), 0.0)
    left = np.maximum(0.0, f.room_bytes - x * pinned.sum() - passing)
    again = np.maximum(0.0, (1 - x) * everything - left) * f.gaps / everything * up
    h2d = (1 - x) * up + z * states_up + again
    held = np.maximum(0.0, f.room_bytes - x * pinned.sum())
    backward = facts.turn_s + np.maximum(0.0, (1 - x) * everything + z * states - held) / facts.h2d_bytes_per_s
    d2h = (1 - x) * down + z * states_down
    traffic = h2d * facts.h2d_bytes_per_s + d2h * facts.d2h_bytes_per_s + cpu * float(np.sum(facts.dram_adam_bytes))
    wait = np.zeros_like(z)
    if f.barrier:
        beside = np.maximum(0.0, facts.last_room_bytes - x * pinned.sum() - z * everything)
        wait = np.maximum(0.0, (z * states - beside) / facts.h2d_bytes_per_s - z * gpu_adam)
    terms = [total_s + (x + z) * gpu_adam + wait, cpu * adam + (1 - x) * add, traffic / facts.dram_bytes_per_s]
    terms += [d2h] if facts.duplex else []
    if not f.barrier:
        terms.append(backward)
    terms.append(np.full_like(z, facts.net_s))
    windows = _windows(facts)
    last = [np.where(cpu > 1e-9, span + cpu * adams + copies, 0.0) for span, adams, copies in windows[-1:]]
    least_up = h2d - z * up
    floor = np.stack(np.broadcast_arrays(*terms, *last, least_up if facts.duplex else least_up + d2h))
    window = np.zeros_like(z)
    for span, adams, copies in windows:
        np.maximum(window, np.where(cpu > 1e-9, span + cpu * adams + copies, 0.0), out=window)
    terms += [window, h2d if facts.duplex else h2d + d2h]
    table = np.stack(np.broadcast_arrays(*terms))
    return Roofline(np.asarray(table.max(axis=0)), np.asarray(floor.max(axis=0)))


def _windows(facts: ModeFacts) -> list[tuple[float, float, float]]:
    """(span, CPU Adam inside if all were updated on the CPU, copies) of the windows that can bind: the windows on the
    upper envelope of span + share * Adam, then the window of the last chunk."""
    f = facts.pins
    clock = np.concatenate(([0.0], np.cumsum(f.moments_s)))
    first, final = np.asarray(f.first), np.asarray(f.final)
    if not len(first):
        return []
    adam, down, up = np.asarray(f.adam_s), np.asarray(f.down_s), np.asarray(f.up_s)
    inside = first[None, :] <= first[:, None]
    if f.barrier:
        span = float(clock[-1]) - clock[first]
    else:
        inside &= final[None, :] >= final[:, None]
        span = np.maximum(0.0, clock[final + 1] - clock[first])
    adams = inside @ adam
    copies = up + (0.0 if f.barrier else down)
    value = span + copies
    chosen: set[int] = {int(np.argmax(value + share * adams)) for share in np.linspace(0.0, 1.0, SHARES)}
    chosen.add(len(first) - 1)
    return [(float(span[j]), float(adams[j]), float(copies[j])) for j in sorted(chosen)]


def interleave(
    order: Sequence[int], sizes: Sequence[int], pins: int, streams: int, head: int = 0, front: int = 0
) -> tuple[list[int], list[int]]:
    """(pinned, streamed) chunks of `order`: the first `front` are streamed and the next `head` pinned. The rest of
    `pins` and `streams` is taken from the chunks behind these, spread evenly by error diffusion and weighted by bytes,
    so that any run of layers has its share.

    sizes: bytes by chunk. The numbers are met as closely as unequal sizes allow, and never exceeded.
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
