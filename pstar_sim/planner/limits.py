"""The largest model and the largest batch that a machine can train, by policy.

Only memory counts. [Note: an upper bound of any model] The working list and the states of every parameter lie
somewhere: w + s bytes per parameter, on GPUs, hosts and disks together; weights lie on the host while they are loaded.
No search goes beyond. The least memory that a policy needs grows with depth and with batch, except where the chunk size
changes. So the search asks next where a line through the needs of refused depths meets the machine's bytes; without a
line, half way. It ends when L fits and L + 1 does not, after few plans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial

from msgspec import structs

from pstar_sim.arguments import flag, function, instance, text, whole
from pstar_sim.bounds.shares import any_job, tightest
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import MOST_WIDTH, ModelEntry, count_params, model_entry, model_names
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Settings
from pstar_sim.core.workspace import bytes_of_all
from pstar_sim.dtypes import BASES, DTYPES, STORAGE
from pstar_sim.errors import CannotPlan, DoesNotFit, ModelError, PstarError, UnknownName
from pstar_sim.planner.asked import asked_policies, settings_of
from pstar_sim.planner.balance import chooses, roomiest_job
from pstar_sim.planner.batch_shares import least_batch, machine_of, of_shares, share_out, shares_of_batch
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.memory_needs import shortage, with_room
from pstar_sim.planner.nearest import Elsewhere, nearest
from pstar_sim.planner.stages_degrees import recomputing_all, ways_of
from pstar_sim.planner.stages_shortages import stages_shortage
from pstar_sim.policy.kit.sharing import plan_once
from pstar_sim.policy.registry import Policy, built_in, can, find_policy, policy_name
from pstar_sim.python310 import Unpack
from pstar_sim.workload.axes import Axes, AxesGiven
from pstar_sim.workload.kernels import kernels_text
from pstar_sim.workload.loading import Loading, loading_of
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.presets import has_kernels, kernels_of, without_autocast
from pstar_sim.workload.workload import Workload

"""Workloads of one job, by shape and by sequences of one rank."""

MOST_BATCH = 1 << 20
MOST_LAYERS = 1 << 13
MOST_ON_DISKS = 1 << 10  # layers, if GPU and host hold fewer: a plan has a hundred thousand steps
MOST_PLANNED = 1 << 7  # layers of an answer that plans confirm: those of deeper models take seconds each
ABOVE = 2  # depths above the answer of which plans are made where disks are nearly full: one may fit above a refusal


@dataclass(frozen=True, kw_only=True)
class Limit:
    """value: layers, or sequences per micro-batch of all ranks; 0 if not even 1 fits.
    catalog_model, catalog_params: the largest model of the catalog that fits.
    short_of: the place of one rank that is short for one more layer or sequence.
    reason: why one more layer or sequence does not fit. A policy that cannot plan for such a machine has only a reason.
    """

    policy: str
    value: int
    params: int | None = None
    catalog_model: str | None = None
    catalog_params: int | None = None
    short_of: str | None = None
    short_bytes: int | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Limits(Collection):
    """what: "layers" or "batch".

    rows: one per policy, in the order asked for.
    most_params: that all GPUs and hosts could hold, None for a batch ([Note: an upper bound of any model]).
    """

    what: str
    of: str
    machine: Machine
    settings: Settings
    rows: tuple[Limit, ...]
    kernels: str = ""
    most_params: int | None = None
    job: Mapping[str, object] = field(default_factory=dict)

    def __getitem__(self, policy: str) -> Limit:
        known = {row.policy: row for row in self.rows}
        if text("policy", policy, "the name of one that was asked about") not in known:
            raise UnknownName("policy", policy, tuple(known))
        return known[policy]

    def to_json(self) -> list[dict[str, object]]:
        return [{**row.to_json(), "kernels": self.kernels} for row in self.rows]


def deeper(like: str | ModelEntry, layers: int, *, hidden: int | None = None, heads: int | None = None) -> ModelEntry:
    """With another hidden size, feed-forward and key-value widths change in proportion, and heads keep their width (or
    number `heads`).

    Raises PstarError for a hidden size that the heads do not divide.
    """
    entry = model_entry(like) if isinstance(like, str) else like
    width = entry.hidden if hidden is None else hidden
    if width < 1 or layers < 1:
        raise PstarError(f"hidden = {width}, layers = {layers}: a model needs at least 1 of each")
    if heads is None:
        heads = entry.heads if width == entry.hidden else max(1, round(width / entry.head_dim))
        while heads > 1 and width % heads:
            heads -= 1
    if heads < 1 or width % heads:
        raise PstarError(f"hidden = {width} is not a multiple of heads = {heads}; give heads that divide it")
    groups = entry.heads // entry.kv_heads
    kv_heads = heads if groups == 1 else max(1, heads // groups)
    if heads % kv_heads:
        kv_heads = heads
    made = structs.replace(
        entry,
        name=f"{entry.family} {layers} x {width}",
        layers=layers,
        hidden=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=round(entry.ffn * width / entry.hidden),
        aliases=(),
    )
    return structs.replace(made, params=count_params(made))


@without_garbage_collection()
def max_model(
    machine: Machine | str,
    *,
    batch: int,
    seq: int,
    like: str = "12B",
    hidden: int | None = None,
    heads: int | None = None,
    policies: Iterable[str | Policy] | str | None = None,
    settings: Settings | None = None,
    micro_batches: int = 1,
    loading: Loading | str | None = None,
    catalog: bool = True,
    near: Mapping[str, int] | None = None,
    parallel: str | Parallelism | None = None,
    on_policy: Callable[[str, int, int], None] | None = None,
    **axes: Unpack[AxesGiven],
) -> Limits:
    """Returns the deepest model of a family that each policy can train.

    batch: sequences per micro-batch, of all ranks together.
    seq: tokens per sequence.
    like: model of the catalog whose family is tried: its shape with other numbers of layers.
    hidden, heads: of all models tried; None: those of `like`. Other widths change in proportion to the hidden size.
    policies, settings: as in `compare`.
    loading: as in `fits`.
    catalog: whether to find the largest model of the catalog, too.
    near: policy -> the number of layers at which the search begins.
    parallel: "auto" or "all" for the ways to spread a model over the GPUs, or one of them, such as "tp=2,pp=4"; None:
        data parallelism alone.
    on_policy: called before each policy, with the policy, its number and the number of policies.
    axes: as in `preset`; without dtype, that of the machine's GPU.

    Raises PstarError for a hidden size that the heads do not divide and for a batch that the ranks cannot share. Raises
    UnknownName for unknown names.
    """
    machine, settings = machine_of(machine), settings_of(settings)
    loading = loading_of(loading)
    flag("catalog", catalog)
    job = Job(model=like, batch=batch, seq=seq, micro_batches=micro_batches, **axes)
    for what, width in (("hidden", hidden), ("heads", heads)):
        if width is not None:
            whole(what, width, most=MOST_WIDTH)
    if near is not None:
        instance("near", near, dict, "a dict")
    if on_policy is not None:
        function("on_policy", on_policy)
    asked = asked_policies(policies)
    entry = model_entry(like)
    _check_positions(entry, seq, job)
    flavour = kernels_of(entry, job.kernels)
    shares = shares_of_batch(batch, machine) if parallel is None else []
    working, adapter = job.dtype_on(machine), job.adapter
    base = next((base for base in BASES if base == job.given.get("base")), None)
    models = _Models(
        machine=machine,
        entry=entry,
        hidden=hidden,
        heads=heads,
        shares=tuple(shares),
        job=job,
        dtype=working,
        least_bytes=STORAGE[base or working].bytes_per_param + (0 if adapter else job.states.least_bytes_per_param),
        loaded_bytes=0.0 if parallel else _loaded_bytes(loading, working, base, machine),
    )
    ask = _asker(machine, settings, loading)

    def room(policy: str | Policy, shape: ModelEntry) -> Refusal | None:
        if parallel is None:
            return ask(policy, models.of(shape, policy))
        ways, left_out = ways_of(job, machine, parallel, shape=shape)
        if not ways:
            return CannotPlan("; ".join(left_out))
        ways = recomputing_all(ways)  # which keep least
        if shape.layers < (least := min(way.parallelism.pipeline for way in ways)):
            shape = models.shape(least)  # a shallower model has the limits of one with a layer per stage
        return stages_shortage(job, machine, policy, ways, settings, shape=shape, loading=loading)

    def confirmed(policy: str | Policy, limit: tuple[int, Refusal | None]) -> tuple[int, Refusal | None]:
        if parallel is not None or not limit[0] or not models.takes_plans(limit[0], policy):
            return limit
        planned = _planner(policy, machine, settings, loading)
        return _confirmed(limit, lambda n: planned(models.of(models.shape(n), policy)), models.most_layers(policy))

    found = _limits(
        asked,
        lambda policy, n: room(policy, models.shape(n)),
        models.most_layers,
        confirmed=confirmed,
        first=entry.layers,
        near=near,
        from_others=machine.nvme is not None,
        on_policy=on_policy,
    )
    names = _known_models(seq, job) if catalog else []
    rows = [_depth_row(policy, layers, error, models, names, room) for policy, (layers, error) in zip(asked, found)]
    shape = models.shape(1)
    if parallel is None and not all(row.value for row in rows):
        rows = _with_nearest_yes(rows, asked, found, models.of(shape), machine, settings, loading, shape)
    return Limits(
        what="layers",
        of=f"{shape.family} models of hidden size {shape.hidden}, {shape.heads} heads, sequence {seq}, batch {batch}"
        + (f" x {job.micro_batches}" if (job.micro_batches or 1) > 1 else "")
        + f", {working}"
        + f", {kernels_text(flavour)}"
        + "".join(f", {words}" for words in replace(job, dtype=None, kernels=None).words)
        + (f", parallel {parallel}" if parallel else ""),
        machine=machine,
        settings=settings,
        rows=tuple(rows),
        kernels=flavour,
        most_params=models.within(disks=False),
        job={"seq": seq, "batch": batch, "micro_batches": micro_batches, "dtype": working, "loading": str(loading)}
        | ({} if parallel is None else {"parallel": str(parallel)}),
    )


@dataclass(frozen=True, kw_only=True)
class _Models:
    """entry: the model `like` of the family.
    least_bytes: what a parameter takes in all places together.
    loaded_bytes: on each host while weights are loaded, or 0.
    """

    machine: Machine
    entry: ModelEntry
    hidden: int | None
    heads: int | None
    shares: tuple[int, ...]
    job: Job
    dtype: str
    least_bytes: float
    loaded_bytes: float
    made: dict[tuple[ModelEntry, bool], Workload] = field(default_factory=dict)

    def shape(self, layers: int) -> ModelEntry:
        return deeper(self.entry, layers, hidden=self.hidden, heads=self.heads)

    def of(self, shape: ModelEntry, policy: str | Policy | None = None) -> Workload:
        """Of the rank with the hardest share, or of the shares that leave most room where the policy takes any."""
        roomy = policy is not None and self.machine.mixed and chooses(policy)
        if (shape, roomy) not in self.made:

            def share_of(batch: int) -> Workload:
                return self.job.write(shape, batch, self.dtype)

            if roomy:
                workload = roomiest_job(sum(self.shares), self.machine, share_of)
            else:
                ranked = of_shares(self.shares, share_of)
                workload = ranked[0] if len(set(self.shares)) == 1 else tightest(ranked, self.machine)
            self.made[shape, roomy] = workload
        return self.made[shape, roomy]

    def within(self, *, disks: bool) -> int:
        return int(bytes_of_all(self.machine, disks=disks) // self.least_bytes)

    def loaded(self, policy: str | Policy) -> int:
        if not self.loaded_bytes or can(policy).counts_host:
            return sys.maxsize
        through_host = int(self.machine.host_budget_bytes // self.loaded_bytes)
        if not self.machine.unified:
            return through_host
        gpus_bytes = self.machine.gpu_budget_bytes * self.machine.world_size
        return max(through_host, int(gpus_bytes // self.least_bytes))  # what is all on GPUs is loaded there

    def most_params(self, policy: str | Policy) -> int:
        """By [Note: an upper bound of any model]."""
        return min(self.within(disks=can(policy).disks), self.loaded(policy))

    def layers(self, params: int) -> int:
        one, two = count_params(self.shape(1)), count_params(self.shape(2))
        return max(0, (params - one) // (two - one) + 1)

    def held_layers(self, policy: str | Policy) -> int:
        # one more than can be loaded is asked about, for the reason
        held = self.layers(self.within(disks=can(policy).disks)), self.layers(self.loaded(policy)) + 1
        return min(MOST_LAYERS, *held)

    @property
    def asked_layers(self) -> int:
        return max(MOST_ON_DISKS, self.layers(self.within(disks=False)))

    def most_layers(self, policy: str | Policy) -> int:
        return min(self.held_layers(policy), self.asked_layers)

    def takes_plans(self, layers: int, policy: str | Policy) -> bool:
        able = can(policy)
        on_disks = self.machine.nvme is not None and able.disks and not able.counts_host
        return on_disks and layers <= MOST_PLANNED and 2 * layers > self.layers(self.within(disks=True))


def _loaded_bytes(loading: Loading, working: str, base: str | None, machine: Machine) -> float:
    widths = [DTYPES[loading.dtype or working].bytes, *([] if base is None else [STORAGE[base].bytes_per_param])]
    return min(widths) * loading.of_rank(machine.local_ranks, machine.local_ranks) / machine.local_ranks


def _depth_row(
    policy: str | Policy,
    layers: int,
    error: Refusal | None,
    models: _Models,
    names: Sequence[str],
    room: Callable[[str | Policy, ModelEntry], Refusal | None],
) -> Limit:
    row = _limit(policy, layers, error)
    if layers:
        row = replace(row, params=models.shape(layers).params)
    if error is None and layers == models.asked_layers < models.held_layers(policy):
        row = replace(row, reason=f"depths of more than {layers:,} layers are not asked about")
    small = (name for name in names if model_entry(name).params <= models.most_params(policy))
    unable = not layers and isinstance(error, CannotPlan)
    best = next((name for name in small if _has_room(room, policy, model_entry(name), unable=unable)), None)
    return row if best is None else replace(row, catalog_model=best, catalog_params=model_entry(best).params)


def _has_room(
    room: Callable[[str | Policy, ModelEntry], Refusal | None], policy: str | Policy, known: ModelEntry, *, unable: bool
) -> bool:
    """False, too, for a model that the job cannot have, such as one without the modules that an adapter names."""
    try:
        # one without a plan for the job, whatever the depth, is asked about few layers first
        if unable and isinstance(room(policy, deeper(known, min(2, known.layers))), CannotPlan):
            return False
        return room(policy, known) is None
    except ModelError:
        return False


def _check_positions(entry: ModelEntry, seq: int, axes: Axes) -> None:
    if entry.family == "vit" or entry.takes(seq):
        return
    able = sorted(_known_models(seq, axes), key=lambda name: abs(model_entry(name).params - entry.params))
    raise PstarError(
        f"seq is {seq}, but models like {entry.name} have learned {entry.max_seq} positions; give --like (like=) "
        f"{', '.join(able[:3])} or another model that takes {seq}"
    )


def _known_models(seq: int, axes: Axes) -> list[str]:
    entries = [model_entry(name) for name in model_names()]
    able = [entry for entry in entries if entry.takes(seq) and entry.family != "vit"]
    able = [entry for entry in able if axes.kernels is None or has_kernels(entry, axes.kernels)]
    able = [entry for entry in able if axes.autocast is None or not without_autocast(entry, axes)]
    return [entry.name for entry in sorted(able, key=lambda entry: -entry.params)]


@without_garbage_collection()
def max_batch(
    machine: Machine | str,
    write: Callable[[int], Workload | Sequence[Workload]],
    *,
    policies: Iterable[str | Policy] | str | None = None,
    settings: Settings | None = None,
    loading: Loading | str | None = None,
    on_policy: Callable[[str, int, int], None] | None = None,
) -> Limits:
    """Returns the most sequences per micro-batch, of all GPUs together, with which each policy can train.

    write: returns the workload of a batch of all GPUs together, such as `lambda batch: ps.preset("12B", batch=batch,
        seq=1024)`, or those of the ranks.
    policies, settings, loading: as in `fits`.
    """
    machine, settings = machine_of(machine), settings_of(settings)
    loading = loading_of(loading)
    function("write", write)
    if on_policy is not None:
        function("on_policy", on_policy)
    unit = least_batch(machine)

    @cache
    def at(units: int, roomy: bool = False) -> Workload:
        workload = write(units * unit)
        job_of = any_job(workload, machine) if roomy and isinstance(workload, Workload) else None
        if job_of is None or not isinstance(workload, Workload):
            return share_out(workload, machine).workload
        return roomiest_job(workload.batch, machine, job_of)

    ask = _asker(machine, settings, loading)
    asked = asked_policies(policies)
    found = _limits(
        asked,
        lambda policy, n: ask(policy, at(n, machine.mixed and chooses(policy))),
        lambda policy: MOST_BATCH,
        first=1,
        on_policy=on_policy,
    )
    rows = [_limit(policy, value * unit, error) for policy, (value, error) in zip(asked, found)]
    w = at(1)
    rows = _with_nearest_yes(rows, asked, found, w, machine, settings, loading)
    return Limits(
        what="batch",
        of=f"{w.model}, sequence {w.sequence}, {w.dtype}"
        + (f", {w.micro_batches} micro-batches" if w.micro_batches > 1 else "")
        + ("" if w.checkpointing else ", no checkpointing")
        + (f", {kernels_text(w.kernels)}" if w.kernels else "")
        + "".join(f", {words}" for words in (w.notes, w.optimizer.words) if words),
        machine=machine,
        settings=settings,
        rows=tuple(rows),
        kernels=w.kernels,
        job={"seq": w.sequence, "micro_batches": w.micro_batches, "dtype": w.dtype, "loading": str(loading)},
    )


Refusal = DoesNotFit | CannotPlan
AskOne = Callable[[str | Policy, int], Refusal | None]
"""Returns why the policy has no room for n layers or sequences, None if it has room."""


def _asker(
    machine: Machine, settings: Settings, loading: Loading
) -> Callable[[str | Policy, Workload], Refusal | None]:
    def ask(policy: str | Policy, workload: Workload) -> Refusal | None:
        try:
            return shortage(policy, workload, machine, settings, loading=loading, others=None)
        except CannotPlan as error:
            return error

    return ask


def _planner(
    policy: str | Policy, machine: Machine, settings: Settings, loading: Loading
) -> Callable[[Workload], Refusal | None]:
    # as `fits` and `compare` ask
    function = find_policy(policy) if isinstance(policy, str) else policy

    def ask(workload: Workload) -> Refusal | None:
        try:
            with_room(partial(plan_once, function, workload), policy, workload, machine, settings, loading=loading)
        except (DoesNotFit, CannotPlan) as error:
            return error
        return None

    return ask


def _confirmed(
    found: tuple[int, Refusal | None], ask: Callable[[int], Refusal | None], most: int
) -> tuple[int, Refusal | None]:
    largest, error = found  # the limit near it with which `ask` agrees is the answer
    refused, stride = 0, 1
    while largest and (refusal := ask(largest)) is not None:
        refused, error = largest, refusal
        largest, stride = max(0, largest - stride), 2 * stride
    if refused:
        largest, between = _largest(ask, refused - 1, least=largest)
        return largest, between or error
    n = largest
    while n < min(largest + ABOVE, most):
        n += 1
        if (refusal := ask(n)) is None:
            largest, error = n, None
        elif n == largest + 1:
            error = refusal
    return largest, error


def _limits(
    policies: Sequence[str | Policy],
    ask: AskOne,
    most_of: Callable[[str | Policy], int],
    *,
    first: int,
    near: Mapping[str, int] | None = None,
    from_others: bool = False,
    confirmed: Callable[[str | Policy, tuple[int, Refusal | None]], tuple[int, Refusal | None]] | None = None,
    on_policy: Callable[[str, int, int], None] | None = None,
) -> list[tuple[int, Refusal | None]]:
    """A policy that tries others comes last: it fits wherever another does."""
    found: dict[str, tuple[int, Refusal | None]] = {}
    for number, policy in enumerate(sorted(policies, key=lambda policy: can(policy).tries_others)):
        if on_policy is not None:
            on_policy(policy_name(policy), number, len(policies))
        most = most_of(policy)
        guess = (near or {}).get(policy_name(policy))
        others = {name: limit for name, limit in found.items() if name in built_in()}
        known = [largest for largest, _ in others.values()] if from_others else []
        deepest = max(known, default=0)
        least = deepest if can(policy).tries_others else 0
        limit = _largest(partial(ask, policy), most, first=deepest or first, near=guess, known=known, least=least)
        if can(policy).tries_others:
            limit = _others_go_on(limit, others, lambda name: partial(ask, name), most)
        found[policy_name(policy)] = limit if confirmed is None else confirmed(policy, limit)
    return [found[policy_name(policy)] for policy in policies]


def _others_go_on(
    found: tuple[int, Refusal | None],
    known: Mapping[str, tuple[int, Refusal | None]],
    ask_of: Callable[[str], Callable[[int], Refusal | None]],
    most: int,
) -> tuple[int, Refusal | None]:
    """The limit of its own modes, or a higher one of another policy:

    known: limits of others, asked whether one more fits.
    """
    largest, error = max((found, *known.values()), key=lambda limit: limit[0])  # its own if the limits are equal
    for other in built_in():
        if can(other).tries_others or other in known or error is None:
            continue
        ask = ask_of(other)
        if ask(largest + 1) is None:
            largest, error = _largest(ask, most, first=largest + 1)
    return largest, error


def _largest(
    ask: Callable[[int], Refusal | None],
    most: int,
    *,
    first: int = 1,
    near: int | None = None,
    known: Sequence[int] = (),
    least: int = 0,
) -> tuple[int, Refusal | None]:
    """(the largest n in 0..most that fits, why n + 1 does not or None). From `first`, n becomes four times as
    large, then follows lines, and every third time halves the interval.

    near: a guess, asked first, then further away.
    known: n stops beside these on its way.
    least: fits.
    """
    low, high = least, most + 1
    errors: dict[int, Refusal] = {}
    tried, asked = min(least + 1 if least else first if near is None else max(1, near), most), 0
    stride = 1
    while high - low > 1:
        error = ask(tried)
        if error is None:
            low = tried
        else:
            high, errors[tried] = tried, error
        asked += bool(errors)
        if not errors:
            tried = min(4 * low if near is None else low + stride, most)
            tried = max((n + 1 for n in known if low <= n < tried), default=tried)
            stride = max(4 * stride, low // 16)
        else:
            guess = (low + high) // 2 if asked % 3 == 0 else _along_a_line(errors, low, high)
            tried = min(max(guess, low + 1), high - 1)
    return low, errors.get(high)


def _along_a_line(errors: Mapping[int, Refusal], low: int, high: int) -> int:
    """Where the line through the needs of `high` and the next refused n that needs more of the same place (else 0 bytes
    at 0) meets the room; the middle if `high` is not refused for room."""
    last = errors[high]
    if not isinstance(last, DoesNotFit):
        return (low + high) // 2
    n, bytes_ = 0, 0
    for other in sorted(errors):
        error = errors[other]
        if other == high or not isinstance(error, DoesNotFit) or error.place != last.place:
            continue
        if error.needed_bytes > last.needed_bytes:
            n, bytes_ = other, error.needed_bytes
            break
    slope = (last.needed_bytes - bytes_) / (high - n)
    if slope <= 0:
        return (low + high) // 2
    return max(low + 1, min(high - 1, int(high - last.short_bytes / slope)))


def _limit(policy: str | Policy, value: int, error: Refusal | None) -> Limit:
    return Limit(
        policy=policy_name(policy),
        value=value,
        short_of=error.place if isinstance(error, DoesNotFit) else None,
        short_bytes=error.short_bytes if isinstance(error, DoesNotFit) else None,
        reason=None if error is None else str(error),
    )


def _with_nearest_yes(
    rows: Sequence[Limit],
    policies: Sequence[str | Policy],
    found: Sequence[tuple[int, Refusal | None]],
    least: Workload,
    machine: Machine,
    settings: Settings,
    loading: Loading,
    shape: ModelEntry | None = None,
) -> list[Limit]:
    """A policy that cannot run even `least` gets words for the change that helps."""
    able = [row.policy for row in rows if row.value]
    elsewhere = Elsewhere(least, machine, loading, shape)

    def with_yes(row: Limit, policy: str | Policy, error: Refusal | None) -> Limit:
        if row.value or not isinstance(error, DoesNotFit):
            return row

        def ask(other: Workload, where: Machine, with_settings: Settings, loaded: Loading) -> DoesNotFit | None:
            refusal = _asker(where, with_settings, loaded)(policy, other)
            return error if isinstance(refusal, CannotPlan) else refusal

        function = find_policy(policy) if isinstance(policy, str) else policy
        hint = nearest(function, least, machine, settings, error, fitting=able, ask=ask, elsewhere=elsewhere)
        return replace(row, reason=f"{row.reason}; {hint}")

    return [with_yes(row, policy, error) for row, policy, (_, error) in zip(rows, policies, found)]
