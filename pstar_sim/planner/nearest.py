"""Nearest: the changes that would make a policy fit, found by trying.

The changes are tried in this order, up to the first success of each kind: weights that are loaded once per node;
options under which the policy keeps lists on the machine's disks; more GPU memory, where the user has set it; a catalog
machine with more GPU memory; more host memory; checkpointing; smaller micro-batches at the same global batch; a fused
loss; an optimizer with smaller states, or no fp32 masters; then the other policies that are known to fit. Every
suggested change has room by memory_needs.py. Of a workload that comes from a trace, only the optimizer is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pstar_sim.catalog.loader import as_listed, load_machine, machine_names, resize
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.plan import Settings
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import CatalogError, DoesNotFit, PstarError
from pstar_sim.planner.memory_needs import shortage
from pstar_sim.policy.kit.options import Specified, split_spec
from pstar_sim.policy.registry import Policy, can, policy_name
from pstar_sim.units import GB, MB
from pstar_sim.workload.kernels import FUSED
from pstar_sim.workload.loading import WHOLE, Loading
from pstar_sim.workload.optimizers import MASTERS, OPTIMIZERS
from pstar_sim.workload.presets import can_vary, variant
from pstar_sim.workload.workload import Workload, with_optimizer

__all__ = ["KINDS", "Ask", "Elsewhere", "Remedy", "asker", "in_words", "nearest", "remedies"]

KINDS = (
    "loading",
    "policy",
    "checkpointing",
    "micro-batches",
    "loss",
    "optimizer",
    "host memory",
    "GPU memory",
    "machine",
)
"""Kinds of changes, smallest change first: flags of the job cost nothing, memory for the host costs less than a GPU."""
_SMALLER = {"adamw": "adamw-8bit", "adam": "adamw-8bit", "adamw-bf16-states": "adamw-8bit", "lion": "lion-8bit"}
"""Optimizer -> the one with the same update and states in 8 bits."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that was tried and makes a job fit.

    kind: one of KINDS.
    size: bytes of memory (for a machine, of its GPU), a number of micro-batches, or how far an optimizer is from the
        job's.
    words: flags, "with --host-memory 128GB" or "on a100-80".
    """

    kind: str
    size: int
    words: str

    @property
    def rank(self) -> tuple[int, int]:
        return KINDS.index(self.kind), self.size


Ask = Callable[[Workload, Machine, Settings], DoesNotFit | None]
"""Returns why a job does not fit; None if it does."""


class Elsewhere:
    """Other machines and workloads to try for a job. Each is made once for all policies that ask.

    shape: shape of a preset that is not in the catalog.
    """

    def __init__(self, workload: Workload, machine: Machine, shape: ModelEntry | None = None) -> None:
        self.workload, self.machine = workload, machine
        self._shape = shape
        self._smaller: dict[tuple[int, int], Workload] = {}

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """Catalog machines with as many GPUs, unified only if this machine is: the smallest GPU first, then the largest
        host."""
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

    @property
    def varies(self) -> bool:
        """Whether the workload can be written with another batch or with checkpointing."""
        return can_vary(self.workload, self._shape)

    @cached_property
    def fused(self) -> Mapping[str, Workload]:
        """Flags -> the workload with a fused loss, which never has all logits; with checkpointing too, where it has
        none. Empty where the loss is fused, or the model has no logits to cut, or runs under autocast."""
        shape = model_entry(self.workload.model) if self._shape is None else self._shape
        if not shape.causal or self.workload.loss == FUSED or self.workload.autocast:
            return {}
        found = {f"--loss {FUSED}": variant(self.workload, loss=FUSED, shape=self._shape)}
        if not self.workload.checkpointing:
            both = variant(self.workload, loss=FUSED, checkpointing=True, shape=self._shape)
            found[f"--checkpointing --loss {FUSED}"] = both
        return found

    @cached_property
    def checkpointed(self) -> Workload:
        return variant(self.workload, checkpointing=True, shape=self._shape)

    def smaller(self, batch: int, micro_batches: int) -> Workload:
        key = (batch, micro_batches)
        if key not in self._smaller:
            self._smaller[key] = variant(self.workload, batch=batch, micro_batches=micro_batches, shape=self._shape)
        return self._smaller[key]


def nearest(
    policy: Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    error: DoesNotFit,
    *,
    loading: Loading = WHOLE,
    fitting: Sequence[str] = (),
    ask: Ask | None = None,
    elsewhere: Elsewhere | None = None,
) -> str:
    """Returns words such as "fits on a100-80, or with --batch 4 --micro-batches 2".

    fitting: policies that fit this very job, best first.
    loading, ask, elsewhere: as in `remedies`.
    """
    ways = remedies(policy, workload, machine, settings, error, loading=loading, ask=ask, elsewhere=elsewhere)
    return in_words(ways, fitting)


def in_words(found: Sequence[Remedy], fitting: Sequence[str] = ()) -> str:
    ways = [one.words for one in found] + [f"with --policy {name}" for name in fitting[:1]]
    return f"fits {', or '.join(ways)}" if ways else "nothing tried would make it fit"


def remedies(
    policy: Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    error: DoesNotFit,
    *,
    loading: Loading = WHOLE,
    ask: Ask | None = None,
    ask_of: Callable[[str], Ask] | None = None,
    elsewhere: Elsewhere | None = None,
) -> tuple[Remedy, ...]:
    """Returns at most one change of each kind. Host memory may come twice: with the options for disks, which need less,
    and alone.

    ask: returns why a job does not fit, or None if it fits; None: `shortage` of the policy.
    ask_of: returns the `ask` of another spec; None: `shortage` of the spec.
    elsewhere: the machines and workloads to try, for a caller who asks for several policies.
    """
    if error.change:
        return (Remedy(kind="policy", size=0, words=error.change),)
    ask = ask or asker(policy, loading=loading)
    elsewhere = elsewhere or Elsewhere(workload, machine)
    if error.place == "pinned":
        return ()
    if error.place == "host":
        once = _once(policy, workload, machine, settings, loading)
        disks = _on_disks(policy, workload, machine, settings, ask_of or (lambda spec: asker(spec, loading=loading)))
        more = _host_memory(ask, workload, machine, settings, error)
        if disks is not None and more is not None and disks.size >= more.size:
            disks = None  # the options are given already, or save no host memory
        other = next(_optimizers(ask, workload, machine, settings, error), None)
        return tuple(one for one in (once, disks, other, more) if one is not None)
    bigger = _gpu_memory(ask, workload, machine, settings, error)
    bigger = bigger or next(_machines(ask, elsewhere, settings, error), None)
    # If the model data alone are too large, no batch is small enough.
    possible = error.needed_bytes - workload.peak_non_model_bytes <= error.available_bytes
    smaller = next(_workloads(ask, elsewhere, settings, error), None) if possible else None
    other = None if smaller else next(_optimizers(ask, workload, machine, settings, error), None)
    return tuple(one for one in (bigger, smaller, other) if one is not None)


def asker(policy: str | Policy, *, loading: Loading, others: bool = True) -> Ask:

    def ask(workload: Workload, machine: Machine, settings: Settings) -> DoesNotFit | None:
        return shortage(policy, workload, machine, settings, loading=loading, others=others)

    return ask


def _once(policy: Policy, workload: Workload, machine: Machine, settings: Settings, loading: Loading) -> Remedy | None:
    once = replace(loading, way="whole")
    if loading.way != "each" or asker(policy, loading=once)(workload, machine, settings) is not None:
        return None
    return Remedy(kind="loading", size=0, words=f"with --loading {once}")


def _on_disks(
    policy: Policy, workload: Workload, machine: Machine, settings: Settings, ask_of: Callable[[str], Ask]
) -> Remedy | None:
    """Returns the options under which lists live on disks; with more host memory, if these alone do not help, those
    that need the least of it."""
    if machine.nvme is None:
        return None
    least: tuple[str, DoesNotFit] | None = None
    name, given = split_spec(policy_name(policy))
    for options in can(policy.policy if isinstance(policy, Specified) else policy).from_disks:
        keys = {option.partition("=")[0] for option in options.split(",")}
        kept = [option for option in given.split(",") if option and option.partition("=")[0] not in keys]
        spec = f"{name}:{','.join([*kept, options])}"
        try:
            short = ask_of(spec)(workload, machine, settings)
        except PstarError:  # the policy has no plan for such a job
            continue
        if short is None:
            return Remedy(kind="policy", size=0, words=f"with --policy {spec}")
        if short.place == "host" and (least is None or short.needed_bytes < least[1].needed_bytes):
            least = spec, short
    if least is None:
        return None
    spec, short = least
    more = _host_memory(ask_of(spec), workload, machine, settings, short)
    if more is None:
        return None
    return replace(more, words=f"with --policy {spec} and {more.words.removeprefix('with ')}")


def _machines(ask: Ask, elsewhere: Elsewhere, settings: Settings, error: DoesNotFit) -> Iterator[Remedy]:
    """Yields catalog machines with enough room, smallest GPU first; with more host memory if that is short."""
    for one in elsewhere.machines:
        if one.gpu_budget_bytes < error.needed_bytes:
            continue
        short = ask(elsewhere.workload, one, settings)
        if short is None:
            yield Remedy(kind="machine", size=one.gpu_budget_bytes, words=f"on {one.name}")
        elif short.place == "host":
            more = _host_memory(ask, elsewhere.workload, one, settings, short)
            if more is not None:
                yield Remedy(kind="machine", size=one.gpu_budget_bytes, words=f"on {one.name} {more.words}")


def _gpu_memory(ask: Ask, workload: Workload, machine: Machine, settings: Settings, error: DoesNotFit) -> Remedy | None:
    """Returns the GPU memory that makes the job fit, in whole MB, rounded up to two digits or to 0.1 GB. Only for
    "virtual", and for a machine of the catalog that was given less than it has, up to the memory that it has."""
    listed = as_listed(machine)
    if machine.name != "virtual" and listed is None:
        return None
    wanted = -(-(error.needed_bytes + machine.gpu.context_bytes) // MB)
    unit = 10 ** min(2, max(0, len(str(wanted)) - 2))  # MB
    size = -(-wanted // unit) * unit
    if listed is not None and size * MB > listed.gpu.memory_bytes:
        return None
    try:
        if ask(workload, resize(machine, gpu_memory=size * MB), settings) is not None:
            return None
    except CatalogError:
        return None  # on a unified machine this leaves nothing for the host
    words = f"{size / 1000:g}GB" if size >= 1000 else f"{size}MB"
    return Remedy(kind="GPU memory", size=size * MB, words=f"with --gpu-memory {words}")


def _host_memory(
    ask: Ask, workload: Workload, machine: Machine, settings: Settings, error: DoesNotFit
) -> Remedy | None:
    short: DoesNotFit | None = error
    for _ in range(3):  # the place that was short first may hide further needs
        assert short is not None
        wanted = short.needed_bytes * machine.local_ranks + machine.host.reserved_bytes
        size = -(-wanted // (16 * GB)) * 16
        try:
            bigger = resize(machine, host_memory=size * GB)
        except CatalogError:
            return None  # on a unified machine this leaves nothing for the GPU
        short = ask(workload, bigger, settings)
        if short is None:
            words = f"with --host-memory {size}GB{machine.host_memory_of}"
            return Remedy(kind="host memory", size=size * GB, words=words)
        if short.place != "host":
            return None
    return None


def _optimizers(
    ask: Ask, workload: Workload, machine: Machine, settings: Settings, error: DoesNotFit
) -> Iterator[Remedy]:
    """Yields optimizers with smaller states, the nearest first: that of the same update, then no fp32 masters, both,
    then Adafactor."""
    now = workload.optimizer
    if now.name not in OPTIMIZERS:
        return  # of a trace's own
    same, plain = _SMALLER.get(now.name), not DTYPES[workload.dtype].scaled and now.masters == MASTERS[0]
    none = MASTERS[1] if plain else None
    changes = [(same, None), (None, none), (same, none), ("adafactor", None), ("adafactor", none)]
    trained = sum(t.numel for t in workload.tensors if not t.frozen and t.tied_to is None)
    ranks = machine.data_parallel_size if error.place == "host" else 1
    for size, (name, masters) in enumerate(dict.fromkeys(changes)):
        if name is None and masters is None:
            continue
        changed = with_optimizer(workload, name, masters)
        saved_bytes = (workload.states_bytes_per_param - changed.states_bytes_per_param) * trained / ranks
        if saved_bytes <= 0 or error.needed_bytes - saved_bytes > error.available_bytes:
            continue
        if ask(changed, machine, settings) is None:
            flags = [*([f"--optimizer {name}"] if name else []), *([f"--masters {masters}"] if masters else [])]
            yield Remedy(kind="optimizer", size=size, words=f"with {' '.join(flags)}")


def _workloads(ask: Ask, elsewhere: Elsewhere, settings: Settings, error: DoesNotFit) -> Iterator[Remedy]:
    workload, machine = elsewhere.workload, elsewhere.machine
    if not elsewhere.varies:
        return

    def promising(changed: Workload) -> bool:
        """The policy is planned only if it would fit with a need lower by as much as the tide."""
        lower = workload.peak_non_model_bytes - changed.peak_non_model_bytes
        return error.needed_bytes - lower <= error.available_bytes

    if not workload.checkpointing or workload.recompute:
        changed = elsewhere.checkpointed
        if promising(changed) and ask(changed, machine, settings) is None:
            instead = f" in place of --recompute {workload.recompute}" if workload.recompute else ""
            yield Remedy(kind="checkpointing", size=0, words=f"with --checkpointing{instead}")
    for batch in (workload.batch // n for n in range(2, min(workload.batch, 1024) + 1) if workload.batch % n == 0):
        if not promising(elsewhere.smaller(batch, 1)):
            continue
        micro_batches = workload.micro_batches * (workload.batch // batch)
        if ask(elsewhere.smaller(batch, micro_batches), machine, settings) is None:
            flags = f"--batch {batch * machine.data_parallel_size} --micro-batches {micro_batches}"
            yield Remedy(kind="micro-batches", size=micro_batches, words=f"with {flags}")
    for flags, changed in elsewhere.fused.items():
        if promising(changed) and ask(changed, machine, settings) is None:
            yield Remedy(kind="loss", size=0, words=f"with {flags}")
