"""Workloads and machines for tests, random or with figures to work out by hand, and `check_policy` for a user's policy.

All randomness is the caller's `random.Random`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pstar_sim.catalog.machine import Fabric, Gpu, Host, Link, Machine, Nvme, Rank
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.dtypes import DTYPES, MASTER, NATIVE, WORKING
from pstar_sim.errors import DoesNotFit, PlanError, PstarError
from pstar_sim.sim.play import Jitter, play
from pstar_sim.units import MIB, format_bytes
from pstar_sim.workload.workload import (
    Moment,
    Phase,
    Tensor,
    Use,
    UseKind,
    Workload,
    repeat_micro_batch,
)

__all__ = [
    "PolicyReport",
    "chain_workload",
    "check_once",
    "check_policy",
    "random_jitter",
    "random_machine",
    "random_ranks",
    "random_settings",
    "random_workload",
    "round_machine",
]


def chain_workload(
    layers: int,
    params_per_layer: int,
    *,
    tensors_per_layer: int = 1,
    flops: int = 1_000_000_000,
    tide_bytes: int | Sequence[int] = 0,
    checkpointing: bool = False,
    micro_batches: int = 1,
    dtype: str = WORKING,
    forward_s: float | None = None,
) -> Workload:
    """A chain of equal layers, each with a FWD and a BWD moment (with checkpointing RECOMPUTE before BWD), and the
    optimizer step.

    params_per_layer is divided into `tensors_per_layer` equal tensors. Each moment reads all its layer's tensors;
    gradients arrive in BWD.

    flops: of FWD or RECOMPUTE (BWD twice that, the optimizer step none).
    forward_s: measured seconds of these; the workload is then recorded (on "virtual").
    tide_bytes: every moment's, or one per moment of a micro-batch and the optimizer step (2 layers + 1, with
        checkpointing 3 layers + 1).

    Raises ValueError for parameters that tensors do not divide, or a tide of another length.
    """
    numel, rest = divmod(params_per_layer, tensors_per_layer)
    if rest or numel < 1:
        raise ValueError(f"{params_per_layer} parameters do not divide into {tensors_per_layer} equal tensors")
    width = DTYPES[dtype].bytes
    tensors = tuple(
        Tensor(name=f"layers.{i}.weight{j}", shape=(numel,), dtype=dtype, bytes=numel * width)
        for i in range(layers)
        for j in range(tensors_per_layer)
    )
    opened = _opened(layers, checkpointing)
    peaks = [tide_bytes] * (len(opened) + 1) if isinstance(tide_bytes, int) else list(tide_bytes)
    if len(peaks) != len(opened) + 1:
        raise ValueError(f"the tide has {len(peaks)} figures; {layers} layers have {len(opened) + 1} moments")

    moments: list[Moment] = []
    uses: list[Use] = []
    for m, (event, phase, layer) in enumerate(opened):
        mine = range(layer * tensors_per_layer, (layer + 1) * tensors_per_layer)
        factor = 2 if phase is Phase.BWD else 1
        size = params_per_layer * width
        moments.append(
            Moment(
                name=f"{event}:layers.{layer}",
                phase=phase,
                module=f"layers.{layer}",
                micro_batch=0,
                flops=flops * factor,
                bytes_read=size * factor,
                bytes_written=0,
                start_bytes=min(peaks[m], peaks[m - 1]),
                peak_bytes=peaks[m],
                end_bytes=min(peaks[m], peaks[m + 1]),
                duration_s=None if forward_s is None else forward_s * factor,
            )
        )
        uses += _uses(m, mine, mine if phase is Phase.BWD else ())
    moments.append(
        _step(
            start_bytes=min(peaks[-1], peaks[-2]),
            peak_bytes=peaks[-1],
            end_bytes=min(peaks[-1], peaks[0]),
            duration_s=None if forward_s is None else 0.0,
        )
    )
    workload = Workload(
        model=f"chain-{layers}x{params_per_layer}",
        dtype=dtype,
        batch=1,
        sequence=1,
        micro_batches=1,
        checkpointing=checkpointing,
        attention="none",
        source="preset" if forward_s is None else "recorded",
        tensors=tensors,
        moments=tuple(moments),
        uses=tuple(uses),
        recorded_on=None if forward_s is None else "virtual",
    )
    return repeat_micro_batch(workload, micro_batches)


def round_machine(
    *,
    gpu_memory_bytes: int = 2**30,
    host_memory_bytes: int = 2**30,
    h2d_bytes_per_s: float = MIB,
    d2h_bytes_per_s: float | None = None,
    pageable_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
    duplex: bool = True,
    hbm_bytes_per_s: float = 28 * MIB,
    flops_per_s: Mapping[str, float] | float = 1e12,
    dram_bytes_per_s: float = 1e12,
    cores: int = 1,
    adam_params_per_s: float = MIB,
    ranks: int = 1,
    peer_bytes_per_s: float | None = None,
    peer_latency_s: float = 0.0,
    nvme_memory_bytes: int | None = None,
    nvme_read_bytes_per_s: float = 8 * MIB,
    nvme_write_bytes_per_s: float = 4 * MIB,
    nvme_latency_s: float = 0.0,
    measured: bool = True,
    name: str = "virtual",
) -> Machine:
    """A chain with 2**20 bf16 parameters per layer has round seconds.

    Copying a layer (2 MiB) takes 2 s either way, its Adam 1 s on CPU and GPU; DRAM and compute do not count. With
    forward_s=1.0 in `chain_workload`, every duration is whole.

    gpu_memory_bytes: of each, all usable.
    host_memory_bytes, dram_bytes_per_s, adam_params_per_s: of the node.
    d2h_bytes_per_s: by default the rate of h2d.
    flops_per_s: by dtype, or for bf16, fp16 and fp32.
    ranks: GPUs with equal shares of the batch.
    peer_bytes_per_s: between GPUs, None: no link.
    nvme_memory_bytes: of the node, with its rates, None: no disks.
    """
    rates = flops_per_s if isinstance(flops_per_s, Mapping) else dict.fromkeys(NATIVE, flops_per_s)
    gpu = Gpu(
        name=name,
        memory_bytes=gpu_memory_bytes,
        usable_bytes=gpu_memory_bytes,
        context_bytes=0,
        hbm_bytes_per_s=hbm_bytes_per_s,
        flops_per_s=dict(rates),
        measured=measured,
        source="by hand",
    )
    link = Link(
        name=name,
        h2d_bytes_per_s=h2d_bytes_per_s,
        d2h_bytes_per_s=h2d_bytes_per_s if d2h_bytes_per_s is None else d2h_bytes_per_s,
        pageable_bytes_per_s=pageable_bytes_per_s,
        latency_s=latency_s,
        duplex=duplex,
        measured=measured,
        source="by hand",
    )
    host = Host(
        name=name,
        memory_bytes=host_memory_bytes,
        reserved_bytes=0,
        dram_bytes_per_s=dram_bytes_per_s,
        cores=cores,
        adam_params_per_s=adam_params_per_s,
        measured=measured,
        source="by hand",
    )
    peer = None
    if peer_bytes_per_s is not None:
        peer = Fabric(
            name=name, bytes_per_s=peer_bytes_per_s, latency_s=peer_latency_s, measured=measured, source="by hand"
        )
    nvme = None
    if nvme_memory_bytes is not None:
        nvme = Nvme(
            name=name,
            memory_bytes=nvme_memory_bytes,
            read_bytes_per_s=nvme_read_bytes_per_s,
            write_bytes_per_s=nvme_write_bytes_per_s,
            latency_s=nvme_latency_s,
            measured=measured,
            source="by hand",
        )
    rank = Rank(gpu=gpu, link=link, batch_share=1 / ranks)
    return Machine(name=name, ranks=(rank,) * ranks, host=host, peer=peer, nvme=nvme)


def _opened(layers: int, checkpointing: bool) -> list[tuple[str, Phase, int]]:
    """(event, phase, layer) without the optimizer step."""
    opened: list[tuple[str, Phase, int]] = [("begin", Phase.FWD, i) for i in range(layers)]
    for i in reversed(range(layers)):
        if checkpointing:
            opened.append(("begin", Phase.RECOMPUTE, i))
        opened.append(("grad", Phase.BWD, i))
    return opened


def random_workload(
    seed: int | random.Random,
    *,
    layers: int | None = None,
    micro_batches: int | None = None,
    checkpointing: bool | None = None,
    dtype: str | None = None,
    tied: bool | None = None,
    frozen: bool | None = None,
    unused: bool | None = None,
) -> Workload:
    """A small model of random shape (1-8 layers, 1-4 micro-batches), the same for the same seed: an embedding, layers
    of one to three matrices and small tensors, and a head. Sometimes the head is tied, or there is a very large tensor,
    a frozen layer, two optimizer groups, a layer used twice or a tensor never read. None is chosen at random;
    `unused=False` and the like leave a feature out."""
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)

    def decide(wanted: bool | None, probability: float) -> bool:
        drawn = rng.random() < probability
        return drawn if wanted is None else wanted

    layers = rng.randint(1, 8) if layers is None else layers
    micro_batches = rng.choice((1, 1, 2, 3, 4)) if micro_batches is None else micro_batches
    checkpointing = decide(checkpointing, 0.5)
    dtype = rng.choice((WORKING, *NATIVE)) if dtype is None else dtype
    is_tied = decide(tied, 0.3)
    has_frozen = decide(frozen, 0.3)
    has_unused = decide(unused, 0.15)
    two_groups = rng.random() < 0.3
    shared_layer = rng.randrange(layers) if layers > 1 and rng.random() < 0.2 else None
    uniform = rng.random() < 0.3
    drawn = _Drawn(rng=rng, dtype=dtype, two_groups=two_groups, uniform=uniform, unit=rng.randint(MIB // 4, 2 * MIB))

    size = drawn.matrix(rng.choice((1.0, 1.0, 3.0)))
    embedding = drawn.add("embed.weight", size, is_frozen=has_frozen and rng.random() < 0.3)
    rows = [drawn.layer(i, is_frozen=has_frozen and i < layers - 1 and rng.random() < 0.4) for i in range(layers)]
    if shared_layer is not None:
        rows[shared_layer] = rows[(shared_layer + 1) % layers]
    head = embedding
    if is_tied:
        drawn.add("head.weight", drawn.tensors[embedding].numel, tied_to=embedding)
    else:
        head = drawn.add("head.weight", drawn.matrix())
    if has_unused:
        drawn.add("spare.weight", drawn.matrix())

    table = _random_table(rng, embedding, rows, head, checkpointing=checkpointing)
    moments, uses = _random_moments(rng, table, drawn.tensors)
    workload = Workload(
        model="random",
        dtype=dtype,
        batch=rng.randint(1, 8),
        sequence=rng.choice((1, 16, 128)),
        micro_batches=1,
        checkpointing=checkpointing,
        attention="none",
        source="preset",
        tensors=tuple(drawn.tensors),
        moments=tuple(moments),
        uses=tuple(uses),
    )
    return repeat_micro_batch(workload, micro_batches)


@dataclass(kw_only=True)
class _Drawn:
    """uniform: matrices are alike, as in a real transformer.
    unit: mean elements of a matrix.
    two_groups: biases have their own.
    """

    rng: random.Random
    dtype: str
    two_groups: bool
    uniform: bool
    unit: int
    tensors: list[Tensor] = field(default_factory=list)

    def matrix(self, scale: float = 1.0) -> int:
        return max(1, round((self.unit if self.uniform else self.unit * self.rng.uniform(0.5, 2.0)) * scale))

    def add(self, name: str, numel: int, *, is_frozen: bool = False, tied_to: int | None = None) -> int:
        """Returns its index."""
        rows = next(r for r in (64, 16, 4, 1) if numel % r == 0)
        group = 1 if self.two_groups and name.endswith("bias") else 0
        shape = (rows, numel // rows) if rows > 1 else (numel,)
        size = 0 if tied_to is not None else numel * DTYPES[self.dtype].bytes
        self.tensors.append(
            Tensor(name=name, shape=shape, dtype=self.dtype, bytes=size, frozen=is_frozen, tied_to=tied_to, group=group)
        )
        return len(self.tensors) - 1

    def layer(self, i: int, *, is_frozen: bool) -> list[int]:
        """One to three matrices and small tensors; returns indices."""
        rng, name = self.rng, f"layers.{i}"
        row: list[int] = []
        if rng.random() < 0.5:
            row.append(self.add(f"{name}.norm.weight", rng.randint(16, 4096), is_frozen=is_frozen))
        for j in range(rng.randint(1, 3)):
            oversize = rng.random() < 0.05
            size = self.matrix(rng.uniform(3.0, 6.0) if oversize else 1.0)
            row.append(self.add(f"{name}.weight{j}", size, is_frozen=is_frozen))
            if rng.random() < 0.4:
                row.append(self.add(f"{name}.weight{j}.bias", rng.randint(16, 4096), is_frozen=is_frozen))
        return row


class _Opened(NamedTuple):
    """(event, tensors read, tensors whose gradient arrives, relative work)."""

    event: str
    module: str
    phase: Phase
    reads: list[int]
    gradients: list[int]
    work: int


def _random_table(
    rng: random.Random, embedding: int, rows: Sequence[list[int]], head: int, *, checkpointing: bool
) -> list[_Opened]:
    """Of one micro-batch.

    head: the embedding if tied.
    """
    table = [
        _Opened("begin", "<root>", Phase.FWD, [], [], 0),
        _Opened("begin", "embed", Phase.FWD, [embedding], [], 0),
    ]
    for i, row in enumerate(rows):
        table.append(_Opened("begin", f"layers.{i}", Phase.FWD, row, [], 1))
        if rng.random() < 0.3:
            table.append(_Opened("end", f"layers.{i}", Phase.FWD, [], [], 0))
    table.append(_Opened("begin", "head", Phase.FWD, [head], [], 1))
    table.append(_Opened("grad", "head", Phase.BWD, [head], [] if head == embedding else [head], 2))
    for i, row in reversed(list(enumerate(rows))):
        if checkpointing:
            table.append(_Opened("begin", f"layers.{i}", Phase.RECOMPUTE, row, [], 1))
        late = row[: rng.randint(0, len(row) - 1)] if rng.random() < 0.4 else []
        table.append(_Opened("grad", f"layers.{i}", Phase.BWD, row, [t for t in row if t not in late], 2))
        if late:
            table.append(_Opened("grad", f"layers.{i}.norm", Phase.BWD, late, late, 0))
    table.append(_Opened("grad", "embed", Phase.BWD, [], [embedding], 0))
    table.append(_Opened("backward-end", "<root>", Phase.BWD, [], [], 0))
    return table


def _random_moments(
    rng: random.Random, table: Sequence[_Opened], tensors: Sequence[Tensor]
) -> tuple[list[Moment], list[Use]]:
    """The tide rises over FWD and falls over BWD, with spikes."""
    base = rng.choice((0, rng.randint(0, MIB)))
    per_layer = rng.randint(0, 4 * MIB) if rng.random() < 0.8 else rng.randint(0, 32 * MIB)
    level = base
    moments: list[Moment] = []
    uses: list[Use] = []
    for m, (event, module, phase, reads, gradients, work) in enumerate(table):
        start = level
        if m == len(table) - 1:
            level = base
        elif phase is Phase.FWD:
            level += round(per_layer * rng.uniform(0.5, 1.0)) if work else 0
        elif phase is Phase.RECOMPUTE:
            level += rng.randint(0, per_layer)
        else:
            level = max(base, level - round(per_layer * rng.uniform(0.5, 1.5)))
        peak = max(start, level) + rng.choice((0, 0, rng.randint(0, per_layer), rng.randint(0, 8 * MIB)))
        moments.append(
            Moment(
                name=event if event == "backward-end" else f"{event}:{module}",
                phase=phase,
                module=module,
                micro_batch=0,
                flops=work * rng.randint(10**8, 10**10),
                bytes_read=sum(tensors[t].bytes for t in reads) + rng.randint(0, MIB),
                bytes_written=rng.randint(0, MIB),
                start_bytes=start,
                peak_bytes=peak,
                end_bytes=level,
            )
        )
        uses += _uses(m, reads, [t for t in gradients if not tensors[t].frozen])
    moments.append(_step(start_bytes=base, peak_bytes=base + rng.choice((0, rng.randint(0, MIB))), end_bytes=base))
    return moments, uses


def _uses(moment: int, reads: Iterable[int], gradients: Iterable[int]) -> list[Use]:
    read = [Use(moment=moment, tensor=t, kind=UseKind.READ) for t in reads]
    return read + [Use(moment=moment, tensor=t, kind=UseKind.GRADIENT) for t in gradients]


def _step(*, start_bytes: int, peak_bytes: int, end_bytes: int, duration_s: float | None = None) -> Moment:
    return Moment(
        name="step",
        phase=Phase.ADAM,
        module="<root>",
        micro_batch=0,
        flops=0,
        bytes_read=0,
        bytes_written=0,
        start_bytes=start_bytes,
        peak_bytes=peak_bytes,
        end_bytes=end_bytes,
        duration_s=duration_s,
    )


def random_machine(rng: random.Random, workload: Workload) -> Machine:
    """One GPU, from too little for the worst moment to enough for all data; sometimes too little host memory, and rates
    such that each resource binds somewhere."""
    width = DTYPES[workload.dtype].bytes
    share = rng.choice((0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.5, 5.0, 10.0)) * rng.uniform(0.8, 1.2)
    gpu_bytes = workload.peak_non_model_bytes + int(share * workload.params * width)
    host_bytes = int(workload.params * 24 * (rng.uniform(0.3, 1.0) if rng.random() < 0.15 else 2.0)) + MIB
    rate = 10 ** rng.uniform(11, 14)
    gpu = Gpu(
        name="random",
        memory_bytes=gpu_bytes,
        usable_bytes=gpu_bytes,
        context_bytes=0,
        hbm_bytes_per_s=10 ** rng.uniform(10, 12),
        flops_per_s={dtype: rate / 2 if dtype == MASTER else rate for dtype in DTYPES},
        measured=rng.random() < 0.5,
        source="random",
    )
    link = Link(
        name="random",
        h2d_bytes_per_s=10 ** rng.uniform(8, 11),
        d2h_bytes_per_s=10 ** rng.uniform(8, 11),
        latency_s=rng.choice((0.0, 1e-5)),
        duplex=rng.random() < 0.8,
        measured=True,
        source="random",
    )
    host = Host(
        name="random",
        memory_bytes=host_bytes,
        reserved_bytes=0,
        dram_bytes_per_s=10 ** rng.uniform(9, 12),
        cores=8,
        adam_params_per_s=10 ** rng.uniform(7, 10),
        measured=True,
        source="random",
    )
    return Machine(name="random", ranks=(Rank(gpu=gpu, link=link),), host=host)


def random_ranks(rng: random.Random, machine: Machine, count: int) -> Machine:
    """With a larger host, PCIe switches and a peer link or not, one node or two."""
    if count == 1:
        return machine
    rank = machine.ranks[0]
    sharing = rng.choice((None, 2, count))
    fabric = Fabric(name="random", bytes_per_s=10 ** rng.uniform(8, 11), latency_s=1e-5, measured=True, source="random")
    nodes = 2 if count % 2 == 0 and rng.random() < 0.3 else 1
    local = count // nodes
    return replace(
        machine,
        ranks=tuple(
            replace(rank, batch_share=1 / count, root=None if sharing is None else i % local // sharing)
            for i in range(count)
        ),
        host=replace(machine.host, memory_bytes=machine.host.memory_bytes * local),
        peer=fabric if rng.random() < 0.7 else None,
        nodes=nodes,
        network=fabric if nodes > 1 else None,
        root_bytes_per_s=None if sharing is None else rank.link.h2d_bytes_per_s * rng.uniform(0.5, 3),
    )


def random_settings(rng: random.Random) -> Settings:
    """Step or eager, clipping or not, a chunk size given in one of three."""
    return Settings(
        update=rng.choice(("step", "eager")),
        clip=rng.random() < 0.4,
        chunk_bytes=rng.choice((None, None, rng.randint(MIB // 2, 8 * MIB))),
    )


def random_jitter(rng: random.Random, plan: Plan) -> Jitter:
    """Each queue is slower or faster by a factor up to 10, each step by another up to 4."""
    pace = {queue: 10 ** rng.uniform(-1, 1) for queue in sorted({step.queue for step in plan.steps})}
    queue_of = {step.id: step.queue for step in plan.steps}
    return lambda step, iteration: pace[queue_of[step]] * 4 ** rng.uniform(-1, 1)


@dataclass(frozen=True, kw_only=True)
class PolicyReport:
    """The result of `check_policy`.

    fitted: with a plan, proved and played; others raised DoesNotFit. 0: nothing was checked.
    """

    policy: str
    examples: int
    fitted: int

    def __str__(self) -> str:
        return f"{self.policy}: {self.fitted} of {self.examples} random jobs fitted, every plan is correct"


def check_policy(
    policy: Callable[[Workload, Machine, Settings], Plan], *, examples: int = 50, seed: int = 0
) -> PolicyReport:
    """Checker and simulator on `examples` random workloads, machines and settings.

    A plan has to be for the job, the same in two calls, proved by `check_plan`, and within budgets when played with the
    cost model's and random durations. DoesNotFit has to name
    more bytes than there are.

    Raises PstarError with the example's seed and fault; `check_policy(policy, examples=1, seed=SEED)` repeats it.
    """
    name = getattr(policy, "__name__", None) or repr(policy)
    fitted = 0
    for number in range(seed, seed + examples):
        try:
            rng = random.Random(f"check_policy {number}")
            workload = random_workload(rng)
            machine = random_machine(rng, workload)
            fitted += check_once(policy, workload, machine, random_settings(rng), rng=rng)
        except Exception as error:
            what = str(error) if isinstance(error, PstarError) else f"{type(error).__name__}: {error}"
            raise PstarError(f"policy {name!r}, seed {number}: {what}") from error
    return PolicyReport(policy=name, examples=examples, fitted=fitted)


def check_once(
    policy: Callable[[Workload, Machine, Settings], Plan],
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    rng: random.Random,
) -> bool:
    """As `check_policy`, on one job; was there a plan?

    For property-based tests, whose strategies draw jobs and shrink failures. Raises PlanError for a fault; the policy's
    errors pass.
    """
    try:
        plan = policy(workload, machine, settings)
    except DoesNotFit as error:
        if error.needed_bytes <= error.available_bytes:
            raise PlanError(
                f"DoesNotFit says that {error.needed_bytes} bytes of the {error.place} are needed and "
                f"{error.available_bytes} are there: that would fit"
            ) from error
        return False
    if not isinstance(plan, Plan):
        raise PlanError(f"a policy returns a Plan, not {type(plan).__name__}")
    if plan.settings != settings:
        raise PlanError(f"the plan was made for {plan.settings}, not for the given settings, {settings}")
    again = policy(workload, machine, settings)
    if (again.steps, again.initial, again.modes) != (plan.steps, plan.initial, plan.modes):
        raise PlanError("a policy is a pure function: called twice, it made two different plans")
    proved = plan.check(workload, machine)
    budgets = {"gpu": plan.gpu_budget_bytes, "host": plan.host_budget_bytes}
    for jitter in (None, random_jitter(rng, plan)):
        timeline = play(plan, jitter=jitter, max_iterations=4)
        for place, budget in budgets.items():
            peak = timeline.peak_bytes[place]
            if peak > min(budget, proved.peak_bytes[place]):
                raise PlanError(
                    f"the {place} held {format_bytes(peak)} in the simulator; the budget is {format_bytes(budget)}, "
                    f"the checker proved at most {format_bytes(proved.peak_bytes[place])}"
                )
    return True
