"""The closed form: the bound for schedules that stream no chunk, exact over all numbers of pinned parameters.

[Note: the bound] Let x be the number of trainable parameters whose optimizer states stay on the gpu ("pinned"), relaxed
to a real number 0 <= x <= x_max. Their Adam runs on the gpu and their working list stays there too. Every other
trainable parameter that gets a gradient has, in each iteration, one copy down, one CPU Adam and one copy up. Let E be
the number of all parameters with a gradient, w the bytes of each in the working list, v the bytes of its states, C the
gpu budget, n_t the tide, K_t the payload bytes that moment t reads, and R the parameters per second of CPU Adam:

- x_max: at every moment v x + max(w x, K_t) <= C - n_t.
- compute: all moments, plus Adam on the gpu: sum c_t + x * traffic / HBM.
- adam: (E - x) / R.
- update windows: chunk j is first read in moment f_j, and its gradient is final after moment b_j. All chunks of J_j =
  {i: f_i <= f_j, b_i >= b_j} have copy down, Adam and copy up between the end of b_j and the next start of f_j. This
  window is T - span_j long (span_j = compute from f_j to the end of b_j). If not all of J_j is pinned: T >= span_j +
  (params(J_j) - x) / R + the shortest copy down + the shortest copy up. A copy down comes before the first Adam of the
  window, and a copy up after the last.
- d2h, h2d windows: the same with the copies as the serial resource: span_j + (bytes(J_j) - w x) / rate + the shortest
  Adam + the shortest copy in the other direction.
- parts: a large chunk may be updated in as many parts as `policy.passes.parts.parts_of` says, of which the shortest
  counts. A plan with more is outside of the bound.
- barrier (if no Adam may start before the optimizer step): T >= span from f_j to the end of the iteration + (params(f_i
  <= f_j) - x) / R + the shortest copy up; likewise with the copies up as the serial resource.
- d2h bytes: (E - x) w over the link's rate: each gradient goes down at least once.
- h2d bytes: (E - x) w, because each updated parameter comes up once; plus the copies at the turns m_1 < m_2 < ...: FWD
  to BWD of every micro-batch, and BWD to FWD between two. Let S_k be the bytes that are read up to m_k and again in
  (m_k, m_k+1]. At most C - n - (v + w) x unpinned bytes are resident during m_k. The rest, S_k + v x - (C - n), is
  copied up after m_k. These copies are not those of the first kind, which begin after the chunk's gradient is final and
  before its first read.
- stashes: under any plan each stash goes down once and comes up once per iteration, on the same two queues, in addition
  to all of the above. Its seconds in each direction are added to d2h bytes, h2d bytes and link, and its bytes twice to
  dram; not to windows, outside of which it may be copied.
- link (half duplex): the bytes of both directions, one after the other.
- dram: the copies' bytes and the traffic of CPU Adam over the host's DRAM bandwidth.

[Note: layer-major] All of this holds in any order of the moments. Only the number of turns depends on the order: a
layer-major iteration turns once, from its last forward to its first backward.

[Note: sums are not held] v does not count the sum of several micro-batches' gradients. A pinned chunk's sum need not
stay on the gpu: it may go down and come up between two backward passes, or be made on the host.

The bound is the least over x of the largest term, exact because terms are linear between the points where a window is
pinned entirely or a turn begins to overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pstar_sim.bounds.bound_facts import NAMES, Array, Bound, BoundFacts
from pstar_sim.bounds.windows import Windows, barrier_windows, update_windows


@dataclass(frozen=True)
class _BoundLine:
    """value + slope * x, for x in [from_x, until_x)."""

    name: str
    value: float
    slope: float
    from_x: float = -np.inf
    until_x: float = np.inf


def pinned_bound(facts: BoundFacts, barrier: bool, limit: float, *, clip: bool) -> Bound:
    x_max = min(facts.most_pinned(), limit)
    lines = _lines(facts, barrier, x_max, clip=clip)
    x, seconds = _least_maximum(lines, x_max)
    terms = {name: 0.0 for name in NAMES if any(line.name == name for line in lines)}
    for line in lines:
        if line.from_x <= x < line.until_x:
            terms[line.name] = max(terms[line.name], line.value + line.slope * x)
    binding = next(name for name in terms if terms[name] >= max(terms.values()) * (1 - 1e-9))
    return Bound(seconds=seconds, binding=binding, terms=terms, pinned_params=int(x), max_pinned_params=int(x_max))


def _lines(facts: BoundFacts, barrier: bool, x_max: float, *, clip: bool) -> list[_BoundLine]:
    gpu_s = facts.gpu_update_s
    lines = [_BoundLine("compute", float(facts.clock[-1]), gpu_s)]
    if barrier and facts.net.updates_s:
        lines.append(_BoundLine("barrier", facts.barrier_s(clip=clip), gpu_s))
    if facts.net.updates_s:
        lines.append(_BoundLine("net", float(facts.clock[-1]) + facts.net.lost * facts.net.updates_s, gpu_s))
    if facts.params.sum():
        lines += _update_lines(facts, barrier, clip=clip)
    return lines + _byte_lines(facts, x_max)


def _update_lines(facts: BoundFacts, barrier: bool, *, clip: bool) -> list[_BoundLine]:
    """Adam of what is not pinned, and the windows of all chunks and of all but small ones."""
    per_param_s = facts.cpu_update_s
    gpu_s = facts.gpu_update_s
    lines = [_BoundLine("adam", float(facts.params.sum()) * per_param_s, -per_param_s)]
    windows = [*update_windows(facts), *(barrier_windows(facts, clip=clip) if barrier else ())]
    for each in windows:
        lines += _window_lines(facts, each, per_param_s)
        if facts.net.updates_s:  # wherever the chunks are updated, then if the GPU updates them
            name = "barrier" if each.behind_barrier else "net"
            on_gpu_s = each.gpu_s(gpu_s) - float(facts.params.sum()) * gpu_s
            lines += [
                _BoundLine(name, float((each.span_s + each.net_s).max()), 0.0),
                _BoundLine(name, float(on_gpu_s.max()), gpu_s),
            ]
    return lines


def _byte_lines(facts: BoundFacts, x_max: float) -> list[_BoundLine]:
    """Sums of hinges max(0, S + v x - room). At a turn, other ranks' slices go first."""
    link = facts.cost.link
    total, total_bytes = float(facts.params.sum()), float(facts.bytes.sum())
    turns = [(turn.bytes - turn.others, turn.room) for turn in facts.turns()]
    grows = facts.states + facts.least_w - facts.most_w
    opens = [(room - size) / grows if grows > 0 else np.inf if size <= room else -np.inf for size, room in turns]
    cuts = sorted({0.0, *(x for x in opens if 0 < x < x_max)})
    rate_h2d, rate_d2h, dram = link.h2d_bytes_per_s, link.d2h_bytes_per_s, facts.dram_bytes_per_s
    pinned_w = float(facts.most_w)
    lines = [_BoundLine("d2h", total_bytes / rate_d2h + facts.stash_down_s, -pinned_w / rate_d2h)]
    if facts.net.updates_s:
        lines.append(_BoundLine("net", facts.net.updates_s, 0.0))
    for k, begin in enumerate(cuts):
        end = cuts[k + 1] if k + 1 < len(cuts) else np.inf
        begin = -np.inf if k == 0 else begin
        value, slope = total_bytes, -pinned_w
        for (size, room), x in zip(turns, opens):
            if x <= begin or x <= 0:
                value += size - room
                slope += max(0, grows)
        lines.append(_BoundLine("h2d", value / rate_h2d + facts.stash_up_s, slope / rate_h2d, begin, end))
        if not link.duplex:
            both = value / rate_h2d + total_bytes / rate_d2h + facts.stash_up_s + facts.stash_down_s
            lines.append(_BoundLine("link", both, slope / rate_h2d - pinned_w / rate_d2h, begin, end))
        traffic = value + total_bytes + total * facts.traffic + 2 * facts.stash_bytes
        lines.append(_BoundLine("dram", traffic / dram, (slope - pinned_w - facts.traffic) / dram, begin, end))
    return lines


def _window_lines(facts: BoundFacts, windows: Windows, per_param_s: float) -> list[_BoundLine]:
    """One per distinct end, the largest that ends there or later: a resource's windows have one slope, and a line ends
    where its window is pinned entirely."""
    link, w = facts.cost.link, float(facts.most_w)
    slopes = {"adam": -per_param_s, "h2d": -w / link.h2d_bytes_per_s, "d2h": -w / link.d2h_bytes_per_s}
    order = np.argsort(windows.params, kind="stable")
    ends = windows.params[order]
    seconds = windows.seconds(adam_s=per_param_s, up=link.h2d_bytes_per_s, down=link.d2h_bytes_per_s)
    lines: list[_BoundLine] = []
    for resource, value in seconds.items():
        best = np.maximum.accumulate(value[order][::-1])[::-1]
        keep = np.append(best[1:] < best[:-1], True)  # a line below a later-ending line adds nothing
        name = "barrier" if windows.behind_barrier else resource
        lines += [
            _BoundLine(name, float(v), slopes[resource], until_x=float(e)) for v, e in zip(best[keep], ends[keep])
        ]
    return lines


def _least_maximum(lines: list[_BoundLine], x_max: float) -> tuple[float, float]:
    """(x, value) over [0, x_max], exact; where lines end, the infimum counts."""
    edges = sorted({0.0, x_max, *(e for line in lines for e in (line.from_x, line.until_x) if 0 < e < x_max)})
    pieces = list(pairwise(edges)) if len(edges) > 1 else [(0.0, 0.0)]
    value = np.array([line.value for line in lines])
    slope = np.array([line.slope for line in lines])
    begin = np.array([line.from_x for line in lines])
    end = np.array([line.until_x for line in lines])
    best = (0.0, np.inf)
    if len(edges) > 1:  # at x_max, the windows that end there are pinned
        at_end = (begin <= x_max) & (x_max < end)
        best = (x_max, float((value + slope * x_max)[at_end].max()))
    for low, high in pieces:
        live = (begin <= low) & (low < end)
        v, s = value[live], slope[live]
        at_low, at_high = v + s * low, v + s * high
        if np.minimum(at_low, at_high).max() < best[1]:
            x, found = _least_of_piece(v, s, low, high)
            if found < best[1]:
                best = (x, found)
    return best


def _least_of_piece(value: Array, slope: Array, low: float, high: float) -> tuple[float, float]:
    """(x, value) of lines that all hold on [low, high]: down from `low` along the highest."""
    x = low
    while True:
        y = value + slope * x
        top = y.max()
        at_top = y >= top - 1e-12 * max(1.0, abs(top))
        steepest = slope[at_top].max()
        if steepest >= 0 or x >= high:
            return x, float(top)
        # Descend on the line that is highest just right of x until another line crosses it.
        own = int(np.flatnonzero(at_top)[np.argmax(slope[at_top])])
        rising = slope > slope[own]
        if not rising.any():
            x = high
            continue
        cross = (value[own] - value[rising]) / (slope[rising] - slope[own])
        nearest = cross[cross > x + 1e-12 * max(1.0, abs(x))]
        x = min(high, float(nearest.min())) if nearest.size else high
