"""From how many tokens on the copies of a model's layers to the GPU hide behind its computation.

[Note: what hides] Where no layer stays on the GPU, each pass brings all of them, at the width in which they are stored;
of experts all, whichever the tokens choose. The GPU never waits for the link if the layers compute as long as they take
to come, by the cost model: about a + b * tokens >= bytes / link rate, where a is dequantisation and launches. Where a
part of the layers stays, fewer tokens do. Embeddings and head are no layers. Rule of thumb: docs/how-to/qlora.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from msgspec import structs

from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.layout import build_layout
from pstar_sim.cost import CostModel
from pstar_sim.units import format_bytes, format_s
from pstar_sim.workload.experts import use_probability
from pstar_sim.workload.mixing import block_runs
from pstar_sim.workload.presets import can_vary, variant
from pstar_sim.workload.workload import Workload

_Seconds = tuple[float, float]  # of a forward pass and of a backward pass
_CLOSE = 0.01  # of a number of tokens, at which the search ends
_MOST_JOBS = 12


@dataclass(frozen=True, kw_only=True)
class Hiding:
    """[Note: what hides]

    tokens: of a pass of this job: a micro-batch, or all where a layer runs all micro-batches before the next.
    layers_bytes: what each pass brings.
    transfer_s: of these bytes.
    forward_s, backward_s: in which the layers compute.
    forward_tokens, backward_tokens: the least number with which a pass hides the copies.
    outside_s: of copies of embeddings, head and what else lies outside the layers.
    experts_used: share of the routed experts that a pass is expected to use if all choices are equally likely; None
        without experts.
    """

    tokens: int
    layers_bytes: int
    transfer_s: float
    forward_s: float
    backward_s: float
    forward_tokens: int
    backward_tokens: int
    outside_s: float
    experts_used: float | None = None

    @property
    def from_tokens(self) -> int:
        return max(self.forward_tokens, self.backward_tokens)

    @property
    def hides(self) -> bool:
        return self.tokens >= self.from_tokens

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "from_tokens": self.from_tokens, "hides": self.hides}

    @property
    def words(self) -> str:
        """One sentence."""
        tokens = (
            f"from {self.from_tokens:,} tokens per pass on" if self.from_tokens > 1 else "with any number of tokens"
        )
        used = "" if self.experts_used is None else f"{self.experts_used * 100:.4g} %"
        experts = f"; it brings all experts, and uses {used} if all are equally likely" if used else ""
        return (
            f"Copies of layers hide behind compute {tokens} ({self.tokens:,} here): {format_bytes(self.layers_bytes)} "
            f"take {format_s(self.transfer_s)}, a pass computes {format_s(min(self.forward_s, self.backward_s))}"
            f"{experts}."
        )

    @property
    def lines(self) -> list[str]:
        """The formula with its figures."""
        ways = (("forward", self.forward_s, self.forward_tokens), ("backward", self.backward_s, self.backward_tokens))
        came = f"{format_bytes(self.layers_bytes)} of layers come in {format_s(self.transfer_s)}"
        lines = [f"{came}, if none stays; hidden where a pass computes as long: a + b x tokens >= bytes / link rate"]
        lines += [
            f"{name}: {format_s(seconds)} with {self.tokens:,} tokens, as long as the copies from {least:,} on"
            for name, seconds, least in ways
        ]
        if self.outside_s:
            lines.append(f"embeddings and head, where they do not stay: {format_s(self.outside_s)} of copies beside")
        return lines


def hiding(workload: Workload, machine: Machine) -> Hiding | None:
    """None without layers that are worth moving, and for a model without experts that is trained whole, whose
    gradients, states and updates decide.

    The number of tokens of a preset is that of the cost model within 1 %, in sequences no longer than the job's; of
    a trace, seconds count as proportional to tokens.
    """
    entry = model_entry(workload.model) if can_vary(workload) else None
    experts = entry.experts if entry is not None else None
    if experts is None and not any(t.frozen for t in workload.tensors):
        return None
    layers_bytes, transfer_s, outside_s = _transfer(workload, machine)
    if not layers_bytes:
        return None
    passes = workload.micro_batches if workload.order.of_loop else 1
    tokens = workload.batch * workload.sequence * workload.micro_batches // passes
    forward_s, backward_s = compute_s = tuple(sum(row) / passes for row in _blocks_s(workload, machine))
    elsewhere = None if entry is None else _Elsewhere(workload, machine, entry)
    forward_tokens, backward_tokens = (
        _least(transfer_s, tokens, compute_s[way], way, elsewhere) for way in range(len(compute_s))
    )
    return Hiding(
        tokens=tokens,
        layers_bytes=layers_bytes,
        transfer_s=transfer_s,
        forward_s=forward_s,
        backward_s=backward_s,
        forward_tokens=forward_tokens,
        backward_tokens=backward_tokens,
        outside_s=outside_s,
        experts_used=None if experts is None else use_probability(experts, tokens),
    )


def _least(transfer_s: float, tokens: int, compute_s: float, way: int, elsewhere: _Elsewhere | None) -> int:
    """By the secant of the last two numbers of tokens.

    compute_s: of so many tokens.
    way: 0 forward, 1 backward.
    """
    at, seconds = tokens, compute_s
    wanted = at * transfer_s / seconds
    for _ in range(_MOST_JOBS):
        if elsewhere is None:
            break
        last_at, last_s = at, seconds
        at, both = elsewhere.compute_s(round(wanted))
        seconds = both[way]
        if at == last_at or seconds == last_s:
            break
        before = wanted
        wanted = max(1.0, at + (transfer_s - seconds) * (at - last_at) / (seconds - last_s))
        if abs(wanted / before - 1) < _CLOSE:
            break
    return math.ceil(wanted)


class _Elsewhere:
    """The layers of a preset with other numbers of tokens. Layers repeat after a period, so one period is written."""

    def __init__(self, workload: Workload, machine: Machine, entry: ModelEntry) -> None:
        every = int(workload.recompute.rpartition("-")[2]) if workload.checkpointing and workload.recompute else 1
        self.period = math.lcm(entry.full_every or 1, every)
        self.first = entry.experts.dense_layers if entry.experts is not None else 0
        self.shape = structs.replace(entry, layers=min(entry.layers, self.first + self.period))
        self.workload, self.machine, self.layers = workload, machine, entry.layers
        self._known: dict[tuple[int, int], _Seconds] = {}

    def compute_s(self, tokens: int) -> tuple[int, _Seconds]:
        """(tokens, seconds) of about so many, in as few sequences as are no longer than the job's."""
        longest = self.workload.sequence
        batch = max(1, -(-tokens // longest))
        sequence = longest if self.shape.image else max(1, round(tokens / batch))
        if (batch, sequence) not in self._known:
            job = variant(self.workload, batch=batch, sequence=sequence, micro_batches=1, shape=self.shape)
            forward, backward = _blocks_s(job, self.machine)
            self._known[batch, sequence] = self._all(forward), self._all(backward[::-1])
        return batch * sequence, self._known[batch, sequence]

    def _all(self, blocks_s: Sequence[float]) -> float:
        first, period = self.first, self.period
        return sum(blocks_s[n if n < first else first + (n - first) % period] for n in range(self.layers))


def _transfer(w: Workload, m: Machine) -> tuple[int, float, float]:
    """Bytes and seconds of all layers, and seconds of the rest; several ranks bring a slice each, and gather them
    meanwhile."""
    ranks = m.data_parallel_size
    layout = build_layout(w, ranks=ranks)
    cost = CostModel(w, m, layout)
    small = {chunk.index for chunk in layout.chunks if chunk.small}
    blocks: dict[str, set[int]] = {}
    for block, _, run in block_runs(w):
        read = (t for moment in run for t in w.reads[moment] if layout.chunk_of[t] not in small)
        blocks.setdefault(block or "", set()).update(read)

    def copy_s(size: int) -> float:
        return cost.transfer_s(-(-size // ranks), "h2d")

    sizes = {block: sum(w.tensors[t].bytes for t in read) for block, read in blocks.items()}
    outside_s = copy_s(sizes.pop("", 0))
    layers_bytes = sum(sizes.values())
    copied_s = sum(map(copy_s, sizes.values()))
    read_s = layers_bytes / ranks * m.local_ranks / m.host.dram_bytes_per_s
    gathered_s = cost.collective_s(layers_bytes) if ranks > 1 else 0.0
    return layers_bytes, max(copied_s, read_s, gathered_s), outside_s


def _blocks_s(w: Workload, m: Machine) -> tuple[list[float], list[float]]:
    moments_s = CostModel(w, m, build_layout(w)).moments_s
    rows: tuple[list[float], list[float]] = ([], [])
    for block, forward, run in block_runs(w):
        if block is not None:
            rows[not forward].append(sum(moments_s[moment] for moment in run))
    return rows
