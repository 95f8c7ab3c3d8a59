"""Whether a job fits a machine, by policy, with the room to spare or the lack and the smallest change that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial

from pstar_sim.arguments import flag
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.effects import NON_MODEL
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.timeline import Timeline
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.planner.asked import OnPart, asked_names, settings_of, teller
from pstar_sim.planner.balance import all_balance, balances
from pstar_sim.planner.batch_shares import Share, machine_of, share_out
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.machine_notes import disk_life
from pstar_sim.planner.memory_needs import (
    OTHERS,
    Need,
    Phase,
    bytes_of_pins,
    disk_shortage,
    gpu_bytes_in_order,
    host_shortage,
    least_gpu_bytes,
    memory_need,
    need_with_room,
    shortage,
    with_room,
)
from pstar_sim.planner.nearest import Ask, Elsewhere, Remedy, asker, in_words, remedies
from pstar_sim.planner.streaming import Hiding, hiding
from pstar_sim.planner.trust import trust
from pstar_sim.policy.kit.sharing import plan_once, plans_shared, remember_s
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.policy.optimal import leaves_out
from pstar_sim.policy.registry import built_in, can, can_follow, find_policy
from pstar_sim.sim.play import play
from pstar_sim.workload.loading import EACH_FP32, Loading, loading_of
from pstar_sim.workload.mixing import block_runs
from pstar_sim.workload.workload import Workload

EFFORT = 0.35  # share of `Settings.effort` with which plans are searched: memory is asked for, and seconds within a bar


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The answer of one policy; bytes are those of one rank.

    gpu_needed_bytes: least GPU budget with which the policy fits on this host. Where the policy does not fit, its need
        of the GPU (the budget, if only plans tell) when the short place has just enough; or a least need of that alone.
    gpu_reserve_bytes: what a plan leaves of the card, for the context and the allocator's fragments.
    gpu_kept_bytes: what torch keeps beside both, where the card has room (`Framework.kept_bytes`).
    host_needed_bytes: payloads, pinned rounding and start-up, with as few pinned chunks as the host allows; where the
        policy does not fit, as for the GPU.
    loading_short_bytes: of the recommended row: lacking if every process loads the weights whole, in fp32. None if
        nothing lacks, loading is stated, or there is one rank.
    host_buffer_bytes: the policy's own. The larger of host_startup_bytes and this, with host_workspace_bytes, is the
        rest of host_needed_bytes.
    short_of: "gpu", "host", "nvme", or "pinned" for host memory that is to be pinned.
    reason: with the changes that would make it fit. A policy that cannot plan for the machine has only a reason.
    changes: flags ("with --host-memory 128GB"), at most one of each kind.
    shares: sequences of each GPU in a micro-batch, where not the machine's.
    disk_life: what the plan writes to disks, and how long they last.
    """

    policy: str
    fits: bool
    gpu_needed_bytes: int | None = None
    gpu_available_bytes: int
    gpu_reserve_bytes: int = 0
    gpu_kept_bytes: int = 0
    host_needed_bytes: int | None = None
    host_available_bytes: int
    host_payload_bytes: int | None = None
    host_rounding_bytes: int | None = None
    host_startup_bytes: int | None = None
    host_buffer_bytes: int | None = None
    host_workspace_bytes: int | None = None
    loading_short_bytes: int | None = None
    short_of: str | None = None
    short_bytes: int | None = None
    reason: str | None = None
    changes: tuple[str, ...] = ()
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    expected_error: float | None = None
    trust: str | None = None
    shares: str | None = None
    phases: tuple[Phase, ...] = ()
    disk_life: str | None = None

    @property
    def gpu_headroom_bytes(self) -> int | None:
        """Negative if the GPU is short."""
        return None if self.gpu_needed_bytes is None else self.gpu_available_bytes - self.gpu_needed_bytes

    @property
    def gpu_shown_bytes(self) -> int | None:
        """What nvidia-smi shows at least: tensors, the reserve, and what torch keeps of a framework's runs; more where
        the card has room."""
        if self.gpu_needed_bytes is None:
            return None
        kept = with_kept(self.gpu_needed_bytes, self.gpu_kept_bytes, self.gpu_available_bytes)
        return kept + self.gpu_reserve_bytes

    @property
    def is_tight(self) -> bool:
        """Leaves less room than torch keeps of a framework's runs."""
        return self.fits and 0 <= (self.gpu_headroom_bytes or 0) < min(self.gpu_kept_bytes, self.gpu_needed_bytes or 0)

    @property
    def host_headroom_bytes(self) -> int | None:
        """Negative if the host is short."""
        return None if self.host_needed_bytes is None else self.host_available_bytes - self.host_needed_bytes

    def to_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "gpu_headroom_bytes": self.gpu_headroom_bytes,
            "gpu_shown_bytes": self.gpu_shown_bytes,
            "host_headroom_bytes": self.host_headroom_bytes,
        }


def with_kept(tensor_bytes: int, kept_bytes: int, available_bytes: int) -> int:
    """With what torch keeps of a framework's runs where it is free: at most the tensors' bytes."""
    return max(tensor_bytes, min(tensor_bytes + min(kept_bytes, tensor_bytes), available_bytes))


@dataclass(frozen=True, kw_only=True)
class SmallestChange:
    """A change that makes a job fit, if no policy does.

    words: flags, "with --host-memory 128GB".
    policies: those that fit with the change.
    """

    words: str
    policies: tuple[str, ...]
    brings_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What takes memory: weights, gradients, optimizer states, activations, logits, buffers or the reserve.

    job_bytes: of the whole model, and of one GPU's activations and logits at their peak.
    gpu_bytes, host_bytes: of one rank at the recommended plan's peak; None if no policy fits, or without times.
    """

    name: str
    job_bytes: int
    gpu_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fits(Collection):
    """workload: the job of one rank.
    batch: sequences per micro-batch, of all GPUs together.
    change: the smallest; None if none is needed or helps.
    others: what helps alone besides a smaller `change`: more host memory, then more GPU memory or another machine.
    """

    workload: Workload
    machine: Machine
    settings: Settings
    batch: int
    loading: Loading
    rows: tuple[Fit, ...]
    parts: tuple[Part, ...] = ()
    named: bool = True
    near: bool = True
    change: SmallestChange | None = None
    others: tuple[SmallestChange, ...] = ()

    @property
    def any(self) -> bool:
        return any(row.fits for row in self.rows)

    @cached_property
    def fastest(self) -> tuple[Fit, ...]:
        """The recommended row, and those equally fast; plans that the loop cannot follow count only where no other
        fits."""
        fitting = [row for row in self.rows if row.fits]
        followed = [row for row in fitting if can_follow(self.settings, self.workload, row.policy)] or fitting
        limit_s = min((row.iteration_s or 0.0 for row in followed), default=0.0) * (1 + AS_FAST)
        return tuple(row for row in followed if (row.iteration_s or 0.0) <= limit_s)

    @cached_property
    def hiding(self) -> Hiding | None:
        return hiding(self.workload, self.machine)

    def to_json(self) -> list[dict[str, object]]:
        return [{**row.to_json(), **self.workload.said} for row in self.rows]


@without_garbage_collection()
def fits(
    workload: Workload | Sequence[Workload],
    machine: Machine | str,
    *,
    policies: Iterable[str] | str | None = None,
    settings: Settings | None = None,
    loading: Loading | str | None = None,
    times: bool = True,
    near: bool | None = True,
    on_part: OnPart | None = None,
) -> Fits:
    """Whether each policy (all known policies if none is named) has room, start-up and rounding included.

    workload, machine, settings: as in `compare`.
    loading: how the weights are loaded ([Note: what the host really has to give] in memory_needs.py); None: whole, once
        per node. The answer then says where another way would decide.
    times: whether to simulate the policies that fit, searched with EFFORT of `compare`'s effort.
    near: whether to look for changes that would make the others fit, and for their needs in both places; None: where
        no policy fits, for the smallest change alone.
    on_part: as in `compare`.

    Raises UnknownName for a policy that does not exist.
    """
    machine, settings = machine_of(machine), settings_of(settings)
    flag("times", times)
    if near is not None:
        flag("near", near)
    tell = teller(on_part)
    names = asked_names(policies)
    share = share_out(workload, machine, nearly=all_balance(names, machine))
    job = Asked(
        workload=share.workload,
        machine=machine,
        settings=settings,
        loading=loading_of(loading),
        said=loading is not None,
    )
    found_of: dict[str, tuple[Fit, DoesNotFit | None, Asked, Timeline | None]] = {}
    with plans_shared(share.workload):
        for name in sorted(names, key=lambda name: can(name).tries_others):  # last: others' plans are known then
            tell(name, len(found_of), len(names))
            found_of[name] = row, _, asked, _ = _fit_any(name, share, job, times=times)
            if name in OTHERS and asked is job:
                job.least[name] = row.gpu_needed_bytes if row.fits else None
        answers = [found_of[name] for name in names]
        rows = [row for row, *_ in answers]
        fitting = [row.policy for row in sorted(rows, key=lambda r: r.iteration_s or 0.0) if row.fits]
        changes: tuple[SmallestChange, ...] = ()
        if near or (near is None and not fitting):
            told: dict[str, Fit] = {}
            ways_of: dict[str, tuple[Remedy, ...]] = {}
            elsewhere = Elsewhere(share.workload, machine, job.loading)
            # the least short first, whose changes are the smallest; last those that try others, which are known then
            for row, error, asked, _ in sorted(
                found_of.values(), key=lambda found: (can(found[0].policy).tries_others, found[0].short_bytes or 0)
            ):
                if error is None:
                    continue
                tell(f"what would do for {row.policy}", len(names), len(names))
                row, whole = _with_room(row, asked, error)
                ways = ways_of[row.policy] = remedies(
                    find_policy(row.policy),
                    asked.workload,
                    asked.machine,
                    settings,
                    error,
                    ask=asked.of(row.policy),
                    ask_of=asked.of,
                    elsewhere=elsewhere,
                    whole=whole,
                )
                if near is None:
                    elsewhere.found(ways)
                    row = replace(row, reason=str(whole))
                else:
                    words = f"{whole}; {in_words(ways, fitting)}"
                    row = replace(row, reason=words, changes=tuple(way.words for way in ways))
                told[row.policy] = row
            rows = [told.get(row.policy, row) for row in rows]
            if not fitting:
                tell("the smallest change", len(names), len(names))
                found = [(way, name) for name in names for way in ways_of.get(name, ())]
                changes = _changes(found, job, names, elsewhere)
    answer = Fits(
        workload=share.workload,
        machine=machine,
        settings=settings,
        batch=share.batch,
        loading=job.loading,
        rows=tuple(rows),
        named=policies is not None,
        near=near is not False,
        change=changes[0] if changes else None,
        others=changes[1:],
    )
    if not answer.fastest:
        return replace(answer, parts=_parts(job, None, None))
    best = answer.fastest[0]
    place = answer.rows.index(best)
    _, _, asked, timeline = answers[place]
    rows[place] = replace(best, loading_short_bytes=asked.short_if_each_loads(best))
    return replace(answer, rows=tuple(rows), parts=_parts(job, best, timeline))


def _parts(job: Asked, best: Fit | None, timeline: Timeline | None) -> tuple[Part, ...]:
    w, m = job.workload, job.machine
    in_all = {
        "weights": w.weights_bytes,
        "gradients": w.trainable_params * DTYPES[w.dtype].bytes,
        "optimizer states": w.states_bytes,
        **_of_tide(w, w.peak_non_model_bytes),
    }
    held = {"gpu": dict[str, int](), "host": dict[str, int]()}
    if best is not None and timeline is not None:
        for place in held:
            peak = timeline.at_peak(place)
            tide = _of_tide(w, peak.pop(NON_MODEL, 0)) if place == "gpu" else {"activations": peak.pop(NON_MODEL, 0)}
            held[place] = {_NAMES[category]: size for category, size in peak.items()} | tide
        rounding = held["host"].get("buffers", 0) + (best.host_rounding_bytes or 0)
        held["gpu"]["reserve"], held["host"] = m.gpu.context_bytes, {**held["host"], "buffers": rounding}
        held["host"]["reserve"] = m.host.reserved_bytes // m.local_ranks
    known = timeline is not None
    return tuple(
        Part(
            name=name,
            job_bytes=in_all.get(name, 0),
            gpu_bytes=held["gpu"].get(name, 0) if known else None,
            host_bytes=held["host"].get(name, 0) if known else None,
        )
        for name in (*in_all, *(("buffers", "reserve") if known else ()))
    )


_NAMES = {"param": "weights", "grad": "gradients", "states": "optimizer states", "buffer": "buffers"}


def _of_tide(w: Workload, size_bytes: int) -> dict[str, int]:
    """Logits are what moments between the blocks' two passes hold beside the blocks' activations."""
    blocks = [(forward, run) for block, forward, run in block_runs(w) if block is not None]
    of_blocks = max((w.moments[m].peak_bytes for _, run in blocks for m in run), default=size_bytes)
    kept = max((w.moments[run[-1]].end_bytes for forward, run in blocks if forward), default=size_bytes)
    logits = size_bytes - kept if size_bytes > of_blocks else 0
    return {"activations": size_bytes - logits, "logits": logits}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """said: whether the question gives `loading`.
    least: shipped policy with an answer -> least GPU bytes, None without room.
    """

    workload: Workload
    machine: Machine
    settings: Settings
    loading: Loading
    said: bool
    least: dict[str, int | None] = field(default_factory=dict)

    def of(self, policy: str, *, others: Sequence[str] | None = OTHERS) -> Ask:
        return asker(policy, others=others)

    def short_if_each_loads(self, row: Fit) -> int | None:
        """row: of a policy that fits."""
        w, m = self.workload, self.machine
        parts = row.host_payload_bytes, row.host_rounding_bytes, row.host_workspace_bytes
        pinned_bytes = sum(size or 0 for size in parts)
        startup_bytes = EACH_FP32.startup_bytes(w, m.local_ranks)
        most_bytes = pinned_bytes + max(startup_bytes, row.host_buffer_bytes or 0)
        if self.said or m.local_ranks == 1 or most_bytes <= m.host_budget_bytes:
            return None
        others = OTHERS if startup_bytes <= m.host_budget_bytes else None  # else no policy has room
        short = shortage(row.policy, w, m, self.settings, loading=EACH_FP32, others=others)
        return None if short is None else short.short_bytes

    def least_gpu_bytes(
        self,
        policy: str,
        machine: Machine,
        *,
        others: Sequence[str] | None = OTHERS,
        known_bytes: int | None = None,
        least_bytes: int | None = None,
        plan: Plan | None = None,
    ) -> int:
        """Budget with which a policy that fits still fits.

        known_bytes, least_bytes: as in `least_gpu_bytes`.
        plan: the policy's; a refusal that names what it takes is final.
        """
        ask, named_bytes = self.of(policy, others=others), 0

        @cache
        def taken_bytes() -> int | None:
            return None if plan is None else gpu_bytes_in_order(plan)

        def short_on(where: Machine) -> DoesNotFit | None:
            nonlocal named_bytes
            if where.gpu_budget_bytes == named_bytes == taken_bytes():
                return None
            error = ask(self.workload, where, self.settings, self.loading)
            if error is not None and error.place == "gpu":
                named_bytes = error.needed_bytes
            return error

        return least_gpu_bytes(short_on, machine, known_bytes, least_bytes)

    def least_here(self, policy: str, plan: Plan | None) -> int:
        """On this machine; others with an answer are not asked."""
        tried = [one for one in OTHERS if not leaves_out(one, self.workload, self.machine, self.settings)]
        others = [one for one in tried if one not in self.least]
        able = can(policy)
        alone = able.point is not None and not able.point.streams and not able.tries_others
        known = [self.least.get(one) for one in tried] if able.tries_others else []
        if alone:
            known = [bytes_of_pins(policy, self.workload, self.machine, self.settings, self.loading)]
        enough_bytes = min((size for size in known if size is not None), default=None)
        return self.least_gpu_bytes(
            policy,
            self.machine,
            others=others,
            known_bytes=enough_bytes,
            least_bytes=enough_bytes if alone else None,  # others stream, or pin otherwise
            plan=plan,
        )


def _fit_any(
    name: str, share: Share, job: Asked, *, times: bool
) -> tuple[Fit, DoesNotFit | None, Asked, Timeline | None]:
    """For the first shares that fit, else the last ([Note: the fastest shares] in balance.py)."""
    answer: tuple[Fit, DoesNotFit | None, Asked, Timeline | None] | None = None
    try:
        for own in balances(find_policy(name), share, job.machine, job.settings):
            there = replace(job, workload=own.share.workload, machine=own.machine, least={})
            row, error, timeline = _fit(name, own.share, there, times=times)
            answer = replace(row, shares=own.words), error, there, timeline
            if row.fits:
                break
    except CannotPlan as reason:
        return replace(_unknown(name, job), reason=str(reason)), None, job, None
    except DoesNotFit as refusal:
        return _short(_unknown(name, job), refusal), refusal, job, None
    if answer is None:
        row, error, timeline = _fit(name, share, job, times=times)
        answer = row, error, job, timeline
    return answer


def _unknown(name: str, job: Asked) -> Fit:
    machine = job.machine
    return Fit(
        policy=name,
        fits=False,
        gpu_available_bytes=machine.gpu_budget_bytes,
        gpu_reserve_bytes=machine.gpu.context_bytes,
        gpu_kept_bytes=machine.kept_bytes,
        host_available_bytes=machine.host_budget_bytes,
    )


def _short(row: Fit, error: DoesNotFit) -> Fit:
    return replace(
        row,
        gpu_needed_bytes=error.needed_bytes if error.place == "gpu" else None,
        host_needed_bytes=error.needed_bytes if error.place == "host" else None,
        short_of=error.place,
        short_bytes=error.short_bytes,
        reason=str(error),
    )


def _fit(name: str, share: Share, job: Asked, *, times: bool) -> tuple[Fit, DoesNotFit | None, Timeline | None]:
    workload, machine = job.workload, job.machine
    settings = replace(job.settings, effort=EFFORT * job.settings.effort)
    row = _unknown(name, job)
    plan: Plan | None = None
    try:
        need = memory_need(name, workload, machine, settings, loading=job.loading)
        if times:
            plan = need.plan or with_room(
                partial(plan_once, find_policy(name), workload),
                name,
                workload,
                machine,
                settings,
                loading=job.loading,
            )
    except CannotPlan as reason:
        return replace(row, reason=str(reason)), None, None
    except DoesNotFit as error:
        return _short(row, error), error, None
    row = _filled(replace(row, fits=True), job.least_here(name, need.plan), need, machine.local_ranks)
    timeline: Timeline | None = None
    if plan is not None:
        timeline = play(replace(plan, ranked=share.ranked))
        if share.ranked is None:
            remember_s(plan, timeline.iteration_s)
        seconds = timeline.iteration_s
        belief = trust(machine, name, workload)
        row = replace(
            row,
            iteration_s=seconds,
            tokens_per_s=share.tokens / seconds,
            expected_error=belief.error,
            trust=belief.label,
            disk_life=disk_life(plan, seconds) or None,
        )
    return row, None, timeline


def _filled(row: Fit, gpu_needed_bytes: int | None, need: Need, local_ranks: int) -> Fit:
    return replace(
        row,
        gpu_needed_bytes=gpu_needed_bytes,
        host_needed_bytes=need.host_bytes,
        host_payload_bytes=need.payload_bytes,
        host_rounding_bytes=need.pinned_bytes - need.payload_bytes,
        host_startup_bytes=need.startup_bytes,
        host_buffer_bytes=need.buffer_bytes,
        host_workspace_bytes=need.workspace_bytes,
        phases=need.phases(local_ranks),
    )


def _with_room(row: Fit, job: Asked, error: DoesNotFit) -> tuple[Fit, DoesNotFit]:
    """With the needs in both places; the refusal counts all of the short one."""
    machine = job.machine
    roomy = need_with_room(row.policy, job.workload, machine, job.settings, error, loading=job.loading)
    if roomy is None:
        return row, error
    if roomy.gpu_shortage is None:
        by_pins = bytes_of_pins(row.policy, job.workload, roomy.machine, job.settings, job.loading)
        least_bytes = machine.gpu_budget_bytes if by_pins is None else by_pins
        gpu_bytes = job.least_gpu_bytes(row.policy, roomy.machine, others=None, least_bytes=least_bytes)
    else:
        gpu_bytes = roomy.gpu_shortage.needed_bytes
    # A policy's own check of the host may count more than its need; its refusal then stands.
    elsewhere = host_shortage(roomy.need, machine) or disk_shortage(roomy.need, machine)
    shortage = (roomy.gpu_shortage if error.place == "gpu" else elsewhere) or error
    filled = _filled(row, gpu_bytes, roomy.need, machine.local_ranks)
    return replace(filled, short_of=shortage.place, short_bytes=shortage.short_bytes), shortage


def _changes(
    found: Sequence[tuple[Remedy, str]], job: Asked, asked: Sequence[str], elsewhere: Elsewhere
) -> tuple[SmallestChange, ...]:
    """Another policy that fits, else the smallest of job, host and GPU, each with all policies it helps."""
    others = {
        name: job.of(name)(job.workload, job.machine, job.settings, job.loading)
        for name in built_in()
        if can(name).tries_others and name not in asked
    }
    for name, error in others.items():
        if error is None:
            return (SmallestChange(words=f"with --policy {name}", policies=(name,)),)
    for name, error in others.items() if not found else ():
        assert error is not None
        ask, policy = job.of(name), find_policy(name)
        ways = remedies(policy, job.workload, job.machine, job.settings, error, ask=ask, elsewhere=elsewhere)
        found = [(replace(way, words=f"with --policy {name} {way.words.removeprefix('with ')}"), name) for way in ways]
    least: dict[int, Remedy] = {}
    for way, _ in sorted(found, key=lambda pair: pair[0].rank):
        least.setdefault(way.hardware, way)
    return tuple(
        _as_it_comes(one, job, asked)
        or SmallestChange(
            words=one.words,
            policies=tuple(name for way, name in found if way == one),
            brings_bytes=one.brings_bytes,
        )
        for one in least.values()
    )


def _as_it_comes(way: Remedy, job: Asked, asked: Sequence[str]) -> SmallestChange | None:
    """Where another policy takes the machine without more host memory."""
    where = way.machine
    if where is None:
        return None
    fitting = (
        name
        for name in asked
        if can(name).tries_others and job.of(name)(job.workload, where, job.settings, job.loading) is None
    )
    name = next(fitting, None)
    return None if name is None else SmallestChange(words=f"on {where.name}", policies=(name,))
