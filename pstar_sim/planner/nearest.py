"""The changes that would make a policy fit, found by trying.

[Note: the smallest change] Changes of the job are tried in the order of KINDS, each beside all before it that save
bytes of the short place, until the job fits; then the dispensable ones are left out. Policy options that keep lists on
disks, larger disks, more host memory, more GPU memory (where the user has set it) and catalog machines with more are
tried alone. Every suggestion has room by memory_needs.py. Of a trace's workload only loading and optimizer are changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import add
from typing import Any, NamedTuple

from pstar_sim.catalog.attention import ATTENTION, USUAL
from pstar_sim.catalog.loader import as_listed, load_machine, machine_names, resize
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.plan import Settings
from pstar_sim.dtypes import BASES, DTYPES
from pstar_sim.errors import CannotPlan, CatalogError, DoesNotFit, PstarError
from pstar_sim.planner.memory_needs import OTHERS, never_fits, shortage, with_large_disks
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.registry import Policy, can, policy_name
from pstar_sim.units import GB, MB, format_bytes
from pstar_sim.workload.adapted import adapted
from pstar_sim.workload.adapter import adapter
from pstar_sim.workload.kernels import FLAVOURS, FUSED
from pstar_sim.workload.loading import LOADING, WHOLE, Loading
from pstar_sim.workload.lora import adapter_of, base_of, is_stack, packed_bytes
from pstar_sim.workload.optimizers import MASTERS, OPTIMIZERS
from pstar_sim.workload.presets import can_vary, has_kernels, variant
from pstar_sim.workload.presets.shortened import shortened_variant
from pstar_sim.workload.workload import Moment, Tensor, UseKind, Workload, with_optimizer

_EXACT, _INEXACT = ("loading", "kernels", "loss", "micro-batches", "checkpointing"), ("optimizer", "base", "LoRA")
KINDS = (*_EXACT, "policy", *_INEXACT, "disks", "host memory", "GPU memory", "machine")
"""Kinds of changes, smallest first: flags of the job cost nothing, disks cost less than memory, and
memory for the host less than a GPU."""
_SMALLER = {"adamw": "adamw-8bit", "adam": "adamw-8bit", "adamw-bf16-states": "adamw-8bit", "lion": "lion-8bit"}
"""Optimizer -> the one with the same update and states in 8 bits."""
_HARDWARE = {"disks": 1, "host memory": 1, "GPU memory": 2, "machine": 2}
_LORA, _BASES = "r=16", ("nf4", "nf4-experts")
_MOST_SPLITS = 1024


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that makes a job fit.

    kinds: some of KINDS.
    size: bytes of memory (a machine's: of its GPU), or the distance of the job's options from the job's own.
    words: "with --host-memory 128GB" or "on a100-80".
    brings_bytes: by which a quantised base makes weights smaller.
    machine: that takes this one's place, with more host memory than it comes with.
    """

    kinds: tuple[str, ...]
    size: int
    words: str
    brings_bytes: int = 0
    machine: Machine | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """By the largest kind of change, then by all."""
        kinds = [KINDS.index(kind) for kind in self.kinds]
        return max(kinds), self.size, sum(1 << kind for kind in kinds)

    @property
    def hardware(self) -> int:
        """0 none, 1 larger disks or more host memory, 2 more GPU memory."""
        return max(_HARDWARE.get(kind, 0) for kind in self.kinds)


Ask = Callable[[Workload, Machine, Settings, Loading], DoesNotFit | None]
"""Returns why a job does not fit; None if it does."""


@dataclass(frozen=True, kw_only=True)
class _Option:
    """size: micro-batches, or the distance from the job's among the options of its kind.
    given: arguments of `variant` and `with_optimizer`, and "loading".
    """

    flags: str
    size: int = 0
    given: Mapping[str, Any] = field(default_factory=dict)


_Changed = tuple[Workload, Loading]


class Elsewhere:
    """Changed jobs and machines, each made once for all policies that ask.

    shape: of a preset that is not in the catalog.
    """

    def __init__(
        self, workload: Workload, machine: Machine, loading: Loading = WHOLE, shape: ModelEntry | None = None
    ) -> None:
        self.workload, self.machine, self.loading = workload, machine, loading
        self._shape = shape
        self._found: dict[int, tuple[int, ...]] = {}
        self._made: dict[tuple[str, ...], Workload] = {}
        self._sizes: dict[tuple[str, ...], _Sizes | None] = {}

    def found(self, ways: Iterable[Remedy]) -> None:
        """Larger ones of as much hardware are no longer sought."""
        for way in ways:
            self._found[way.hardware] = min(way.rank[:2], self._found.get(way.hardware, way.rank[:2]))

    def most(self, kind: str) -> float:
        """The largest size that is sought, or -1."""
        place, (known, size) = KINDS.index(kind), self._found.get(_HARDWARE.get(kind, 0), (len(KINDS), 0))
        return math.inf if place < known else size if place == known else -1

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """As many GPUs, unified only if this machine is: smallest GPU first, then the largest host."""
        known: list[Machine] = []
        for name in machine_names():
            try:
                one = load_machine(name)
            except PstarError:  # "here" may know no GPU and "virtual" no size, so neither can be recommended
                continue
            alike = one.world_size == self.machine.world_size and one.unified == self.machine.unified
            if alike and one.name != self.machine.name:
                known.append(one)
        return tuple(sorted(known, key=lambda m: (m.gpu_budget_bytes, -m.host_budget_bytes)))

    @cached_property
    def options(self) -> Mapping[str, tuple[_Option, ...]]:
        """Kind -> changes of the job, the smallest first."""
        w = self.workload
        found: dict[str, Iterator[_Option]] = {"loading": self._loadings(), "optimizer": self._optimizers()}
        if can_vary(w, self._shape):
            shape = model_entry(w.model) if self._shape is None else self._shape
            found |= {"kernels": self._kernels(shape), "micro-batches": self._splits()}
            if not w.checkpointing or w.recompute:
                instead = f" in place of --recompute {w.recompute}" if w.recompute else ""
                found["checkpointing"] = iter(
                    [_Option(flags=f"--checkpointing{instead}", given={"checkpointing": True})]
                )
            if shape.causal and w.loss != FUSED and not w.autocast:
                found["loss"] = iter([_Option(flags=f"--loss {FUSED}", given={"loss": FUSED})])
        if can_vary(w, self._shape) or adapter_of(w) is None:
            stored, stacks = base_of(w), any(is_stack(t.name, t.shape) for t in w.tensors)
            packed = [
                _Option(flags=f"--base {base}", size=size, given={"base": base})
                for size, base in enumerate(_BASES, start=1)
                if (stacks if BASES[base].stacks else stored is None)
            ]
            if adapter_of(w) is None and not w.autocast:
                lora = _Option(flags=f"--lora {_LORA}", given={"lora": _LORA})
                both = (
                    _Option(flags=f"{lora.flags} {one.flags}", size=one.size, given={**lora.given, **one.given})
                    for one in packed
                )
                found["LoRA"] = iter([lora, *both])
            elif (stored is None or not BASES[stored].stacks) and not w.autocast:
                found["base"] = iter(packed)
        return {kind: tuple(found[kind]) for kind in (*_EXACT, *_INEXACT) if kind in found}

    def _loadings(self) -> Iterator[_Option]:
        whole, each, in_place = LOADING
        ways = [replace(self.loading, way=whole)] if self.loading.way == each else []
        if self.loading.way != in_place:
            ways.append(Loading(way=in_place))
        for size, way in enumerate(ways):
            yield _Option(flags=f"--loading {way}", size=size, given={"loading": way})

    def _kernels(self, shape: ModelEntry) -> Iterator[_Option]:
        w = self.workload
        given: dict[str, Any] = {}
        if w.attention in ATTENTION and ATTENTION[w.attention].torch == "math":
            given["attention"] = USUAL
        fused = w.kernels in FLAVOURS and not FLAVOURS[w.kernels].fused and has_kernels(shape, FUSED)
        if fused and not w.autocast:
            given["kernels"] = FUSED
        if given:
            yield _Option(flags=" ".join(f"--{name} {value}" for name, value in given.items()), given=given)

    def _splits(self) -> Iterator[_Option]:
        w, ranks = self.workload, self.machine.data_parallel_size
        for n in range(2, min(w.batch, _MOST_SPLITS) + 1):
            if w.batch % n == 0:
                batch, count = w.batch // n, w.micro_batches * n
                flags = f"--batch {batch * ranks} --micro-batches {count}"
                yield _Option(flags=flags, size=count, given={"batch": batch, "micro_batches": count})

    def _optimizers(self) -> Iterator[_Option]:
        """With smaller states, nearest first: of the same update, without fp32 masters, both, then Adafactor."""
        w = self.workload
        if w.optimizer.name not in OPTIMIZERS:
            return  # of a trace's own
        same, plain = _SMALLER.get(w.optimizer.name), not DTYPES[w.dtype].scaled and w.optimizer.masters == MASTERS[0]
        none = MASTERS[1] if plain else None
        changes = [(same, None), (None, none), (same, none), ("adafactor", None), ("adafactor", none)]
        for size, (name, masters) in enumerate(dict.fromkeys(changes)):
            given = {key: value for key, value in (("optimizer", name), ("masters", masters)) if value is not None}
            smaller = with_optimizer(w, name, masters).states_bytes_per_param < w.states_bytes_per_param
            if given and smaller:
                yield _Option(flags=" ".join(f"--{k} {value}" for k, value in given.items()), size=size, given=given)

    def _varied(self, given: dict[str, Any]) -> Workload:
        """Raises PstarError for what cannot be."""
        if can_vary(self.workload, self._shape):
            return variant(self.workload, shape=self._shape, **given)
        return adapted(self.workload, adapter(given["lora"]), given.get("base"))

    def job(self, options: Mapping[str, _Option]) -> _Changed | None:
        """None where no preset is written for the options together."""
        key, given, optimizer, loading = self._given(options)
        if key not in self._made:
            try:
                w = self._varied(given) if given else self.workload
            except PstarError:
                return None
            self._made[key] = with_optimizer(w, *optimizer)
        return self._made[key], loading

    def sizes(self, options: Mapping[str, _Option]) -> _Sizes | None:
        """Of `job`, which a preset need not write."""
        key, given, optimizer, loading = self._given(options)
        key = (*key, str(loading))
        if key not in self._sizes:
            self._sizes[key] = self._sizes_of(options, given, optimizer, loading)
        return self._sizes[key]

    def _sizes_of(
        self,
        options: Mapping[str, _Option],
        given: dict[str, Any],
        optimizer: tuple[str | None, str | None],
        loading: Loading,
    ) -> _Sizes | None:
        local_ranks = self.machine.local_ranks
        if not given or not can_vary(self.workload, self._shape):
            job = self.job(options)
            if job is None:
                return None
            return _sizes_of(job[0], partial(_of_all, job[0]), job[0].moments, _read(job[0]), loading, local_ranks)
        try:
            few = shortened_variant(self.workload, shape=self._shape, **given)
        except PstarError:
            return None
        w = with_optimizer(few.written.workload, *optimizer)
        return _sizes_of(w, few.total, few.moments, few.each(_read(w)[:-1]), loading, local_ranks)

    def _given(
        self, options: Mapping[str, _Option]
    ) -> tuple[tuple[str, ...], dict[str, Any], tuple[str | None, str | None], Loading]:
        given = {key: value for option in options.values() for key, value in option.given.items()}
        loading = given.pop("loading", self.loading)
        key = tuple(f"{name}={given[name]}" for name in sorted(given))
        return key, given, (given.pop("optimizer", None), given.pop("masters", None)), loading


class _Sizes(NamedTuple):
    model_bytes: int
    peak_bytes: int
    startup_bytes: int
    least_gpu_bytes: int


_Of = Callable[[Sequence[Tensor]], int]


def _of_all(w: Workload, of: _Of) -> int:
    return of(w.tensors)


def _read(w: Workload) -> list[int]:
    """Per moment."""
    sizes = [0] * len(w.moments)
    for use in w.uses:
        if use.kind is UseKind.READ:
            sizes[use.moment] += w.tensors[use.tensor].bytes
    return sizes


def _sizes_of(
    w: Workload,
    total: Callable[[_Of], int],
    moments: Sequence[Moment],
    read: Iterable[int],
    loading: Loading,
    local_ranks: int,
) -> _Sizes:
    """total: of all tensors, of which w may have a part."""

    def of_model(tensors: Sequence[Tensor]) -> int:
        trained, states_bytes = w.states_of(tensors)
        return states_bytes + DTYPES[w.dtype].bytes * trained + sum(t.bytes for t in tensors)

    loaded = total(lambda tensors: loading.weights_bytes(tensors, w.dtype))
    peaks = [moment.peak_bytes for moment in moments]
    return _Sizes(total(of_model), max(peaks), loading.of_rank(loaded, local_ranks), max(map(add, peaks, read)))


def nearest(
    policy: Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    error: DoesNotFit,
    *,
    fitting: Sequence[str] = (),
    ask: Ask | None = None,
    elsewhere: Elsewhere | None = None,
) -> str:
    """Such as "fits with --batch 4 --micro-batches 2, or on a100-80".

    fitting: policies that fit this very job, best first.
    ask, elsewhere: as in `remedies`.
    """
    ways = remedies(policy, workload, machine, settings, error, ask=ask, elsewhere=elsewhere)
    return in_words(ways, fitting)


def as_flags(words: str) -> str:
    """Such as "--machine a100-80" of "on a100-80"."""
    flags = words.removeprefix("with ").replace("on ", "--machine ", words.startswith("on "))
    return flags.replace(" with ", " ")


def in_words(found: Sequence[Remedy], fitting: Sequence[str] = ()) -> str:
    ways = [one.words + brings_words(one.brings_bytes) for one in found] + [
        f"with --policy {name}" for name in fitting[:1]
    ]
    return f"fits {', or '.join(ways)}" if ways else "nothing tried would make it fit"


def remedies(
    policy: Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    error: DoesNotFit,
    *,
    ask: Ask | None = None,
    ask_of: Callable[[str], Ask] | None = None,
    elsewhere: Elsewhere | None = None,
    whole: DoesNotFit | None = None,
) -> tuple[Remedy, ...]:
    """At most one change of the job and one of each other kind, the smallest first. Host memory may come twice: with
    disk options, which need less, and alone.

    ask: by default `shortage` of the policy.
    ask_of: that of another spec.
    elsewhere: for several policies, or where loading is stated.
    whole: error, with all that its place needs.
    """
    if error.change:
        return (Remedy(kinds=("policy",), size=0, words=error.change),)
    ask = ask or asker(policy)
    elsewhere = elsewhere or Elsewhere(workload, machine)
    if error.place == "pinned":
        return ()
    job = _of_job(ask, elsewhere, settings, error)
    if whole is not None and not can(policy).tries_others:
        error = whole
    if error.place in ("host", "nvme"):
        loading, most = elsewhere.loading, elsewhere.most("host memory")
        disks = _on_disks(policy, workload, machine, settings, elsewhere, ask_of or asker)
        larger = _disk_memory(ask, workload, machine, settings, loading) if elsewhere.most("disks") != -1 else None
        more = _host_memory(ask, workload, machine, settings, loading, error, most)
        if disks is not None and more is not None and disks.size >= more.size:
            disks = None  # the options are given already, or save no host memory
        return tuple(sorted((one for one in (disks, job, larger, more) if one is not None), key=lambda one: one.rank))
    bigger = _gpu_memory(ask, workload, machine, settings, elsewhere, error)
    bigger = bigger or next(_machines(ask, elsewhere, settings, error), None)
    return tuple(one for one in (job, bigger) if one is not None)


def brings_words(size_bytes: int) -> str:
    """Behind a change; empty for 0."""
    return f" (brings {format_bytes(size_bytes)})" if size_bytes else ""


def asker(policy: str | Policy, *, others: Sequence[str] | None = OTHERS) -> Ask:

    def ask(workload: Workload, machine: Machine, settings: Settings, loading: Loading) -> DoesNotFit | None:
        return shortage(policy, workload, machine, settings, loading=loading, others=others)

    return ask


def _of_job(ask: Ask, elsewhere: Elsewhere, settings: Settings, error: DoesNotFit) -> Remedy | None:
    """[Note: the smallest change]: only a job that saves what the last lacked is asked about."""
    machine = elsewhere.machine
    last, refused = error, elsewhere.sizes({})
    places = {error.place}

    def saves_enough(sizes: _Sizes) -> bool:
        assert refused is not None
        least_bytes = sizes.least_gpu_bytes if last.place == "gpu" else 0
        saved_bytes = _saved_bytes(refused, sizes, last.place, machine)
        return max(least_bytes, last.needed_bytes - saved_bytes) <= last.available_bytes

    def fits(options: Mapping[str, _Option]) -> bool:
        nonlocal last, refused
        sizes = elsewhere.sizes(options)
        if sizes is None or not saves_enough(sizes) or (job := elsewhere.job(options)) is None:
            return False
        if last.place == "host" and never_fits(job[0], machine, job[1]):
            return False
        try:
            short = ask(job[0], machine, settings, job[1])
        except CannotPlan:
            return False
        if short is not None:
            last, refused = short, sizes
            places.add(short.place)
        return short is None

    def saves(options: Mapping[str, _Option], kind: str, option: _Option) -> bool:
        before, after = elsewhere.sizes(options), elsewhere.sizes({**options, kind: option})
        return (
            before is not None
            and after is not None
            and any(_saved_bytes(before, after, place, machine) > 0 for place in places)
        )

    known: set[str] = set()
    while known < places:  # a place that is short only behind another is known in the second round
        known, taken = {*places}, dict[str, _Option]()
        for kind, options in elsewhere.options.items():
            most = elsewhere.sizes({**taken, kind: options[-1]}) if options else None
            for option in options if most is None or saves_enough(most) else ():
                if option.size <= elsewhere.most(kind) and fits({**taken, kind: option}):
                    return _remedy(_least({**taken, kind: option}, kind, fits), kind, elsewhere)
            if options and saves(taken, kind, options[-1]):
                taken[kind] = options[-1]
    return None


def _least(options: dict[str, _Option], last: str, fits: Callable[[Mapping[str, _Option]], bool]) -> dict[str, _Option]:
    alone = {last: options[last]}
    others = [kind for kind in options if kind != last]
    if others and fits(alone):
        options = alone
    else:
        for kind in reversed(others):
            fewer = {k: option for k, option in options.items() if k != kind}
            if fits(fewer):
                options = fewer
    return options


def _remedy(options: Mapping[str, _Option], last: str, elsewhere: Elsewhere) -> Remedy:
    words = " ".join(option.flags for option in options.values())
    made = elsewhere.job(options)
    before, after = elsewhere.workload, elsewhere.workload if made is None else made[0]
    brings = packed_bytes(after) - packed_bytes(before)
    return Remedy(kinds=(*options,), size=options[last].size, words=f"with {words}", brings_bytes=brings)


def _saved_bytes(before: _Sizes, after: _Sizes, place: str, m: Machine) -> float:
    data = before.model_bytes - after.model_bytes
    if place == "gpu":
        return data + before.peak_bytes - after.peak_bytes
    return data / m.data_parallel_size + before.startup_bytes - after.startup_bytes


def _on_disks(
    policy: Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    elsewhere: Elsewhere,
    ask_of: Callable[[str], Ask],
) -> Remedy | None:
    loading, most = elsewhere.loading, elsewhere.most("host memory")
    if machine.nvme is None or most == elsewhere.most("policy") == -1:
        return None
    least: tuple[str, DoesNotFit] | None = None
    name, given = split_spec(policy_name(policy))
    for options in can(policy).from_disks:
        keys = {option.partition("=")[0] for option in options.split(",")}
        kept = [option for option in given.split(",") if option and option.partition("=")[0] not in keys]
        spec = f"{name}:{','.join([*kept, options])}"
        try:
            short = ask_of(spec)(workload, machine, settings, loading)
        except PstarError:  # the policy has no plan for such a job
            continue
        if short is None:
            return Remedy(kinds=("policy",), size=0, words=f"with --policy {spec}")
        if short.place == "host" and (least is None or short.needed_bytes < least[1].needed_bytes):
            least = spec, short
    if least is None:
        return None
    spec, short = least
    more = _host_memory(ask_of(spec), workload, machine, settings, loading, short, most)
    if more is None:
        return None
    return replace(more, words=f"with --policy {spec} and {more.words.removeprefix('with ')}")


def _machines(ask: Ask, elsewhere: Elsewhere, settings: Settings, error: DoesNotFit) -> Iterator[Remedy]:
    """With enough room, smallest GPU first, with more host memory if that is short."""
    for one in elsewhere.machines:
        if not error.needed_bytes <= one.gpu_budget_bytes <= elsewhere.most("machine"):
            continue
        short = ask(elsewhere.workload, one, settings, elsewhere.loading)
        if short is None:
            yield Remedy(kinds=("machine",), size=one.gpu_budget_bytes, words=f"on {one.name}")
        elif short.place == "host":
            more = _host_memory(ask, elsewhere.workload, one, settings, elsewhere.loading, short)
            if more is not None:
                words = f"on {one.name} {more.words}"
                yield Remedy(kinds=("machine",), size=one.gpu_budget_bytes, words=words, machine=one)


def _gpu_memory(
    ask: Ask, workload: Workload, machine: Machine, settings: Settings, elsewhere: Elsewhere, error: DoesNotFit
) -> Remedy | None:
    """In whole MB, rounded up; only for "virtual", and for a catalog machine up to what it has."""
    listed = as_listed(machine)
    if machine.name != "virtual" and listed is None:
        return None
    wanted = -(-(error.needed_bytes + machine.gpu.context_bytes) // MB)
    unit = 10 ** min(2, max(0, len(str(wanted)) - 2))  # MB
    size = -(-wanted // unit) * unit
    most = math.inf if listed is None else listed.gpu.memory_bytes
    if size * MB > min(most, elsewhere.most("GPU memory")):
        return None
    try:
        if ask(workload, resize(machine, gpu_memory=size * MB), settings, elsewhere.loading) is not None:
            return None
    except CatalogError:
        return None  # on a unified machine this leaves nothing for the host
    words = f"{size / 1000:g}GB" if size >= 1000 else f"{size}MB"
    return Remedy(kinds=("GPU memory",), size=size * MB, words=f"with --gpu-memory {words}")


def _disk_memory(ask: Ask, workload: Workload, machine: Machine, settings: Settings, loading: Loading) -> Remedy | None:
    """Room on the disks with which the job fits, in steps of 10 GB or a sixteenth."""
    large, disks = with_large_disks(workload, machine), machine.nvme
    if large is machine or disks is None or ask(workload, large, settings, loading) is not None:
        return None
    low, high = disks.memory_bytes // (10 * GB), large.nvme_budget_bytes * machine.local_ranks // (10 * GB) + 1
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        tried = replace(machine, nvme=replace(disks, memory_bytes=10 * middle * GB))
        low, high = (low, middle) if ask(workload, tried, settings, loading) is None else (middle, high)
    return Remedy(kinds=("disks",), size=10 * high * GB, words=f"with --set nvme.memory={10 * high}GB")


def _host_memory(
    ask: Ask,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    loading: Loading,
    error: DoesNotFit,
    most_bytes: float = math.inf,
) -> Remedy | None:
    short: DoesNotFit | None = error
    bigger = machine
    for _ in range(3):  # the place that was short first may hide further needs
        assert short is not None
        # what has no room on the disks has to stay on the host
        budget = short.needed_bytes if short.place == "host" else bigger.host_budget_bytes + short.short_bytes
        wanted = budget * machine.local_ranks + machine.host.reserved_bytes
        size = -(-wanted // (16 * GB)) * 16
        if size * GB > most_bytes:
            return None
        try:
            bigger = resize(machine, host_memory=size * GB)
        except CatalogError:
            return None  # on a unified machine this leaves nothing for the GPU
        short = ask(workload, bigger, settings, loading)
        if short is None:
            words = f"with --host-memory {size}GB{machine.host_memory_of}"
            return Remedy(kinds=("host memory",), size=size * GB, words=words)
        if short.place not in ("host", "nvme"):
            return None
    return None
