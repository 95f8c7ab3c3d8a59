"""Frameworks' configurations in our terms: the policy that stands for one, facts of the job, and allocation on the
host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.policy.kit.iteration_order import ON_HOST, in_order
from pstar_sim.policy.kit.options import Specified, options_of, show, split_spec
from pstar_sim.policy.registry import find_policy, policy_name
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Two files with the same content have equal configurations.

    framework: target that reads and writes it (targets.py).
    policy: stands for the configuration, with its options.
    dtype: None where the file leaves it to the script, as for all that follows up to `parallelism`.
    autocast: dtype of autocast over fp32 weights.
    recompute: activations of less than all blocks.
    train_batch: sequences per iteration on all GPUs.
    parallelism: None for data parallelism alone.
    pinned: gradients and states on the host are page-locked.
    pinned_params: the same for parameters.
    loading: text of a `Loading`.
    left_open: options of the policy that the file leaves to the script, which sets them by the model's hidden size.
    defaults: facts that the file leaves to the framework's default, about which a flag decides.
    notes: one line per setting that is not modelled.
    without_effect: keys that have no effect on memory and time.
    """

    framework: str
    policy: str
    model: str | None = field(default=None, compare=False)
    dtype: str | None = None
    autocast: str | None = None
    products: str | None = None
    batch_per_gpu: int | None = None
    micro_batches: int | None = None
    train_batch: int | None = None
    train_batch_key: str = field(default="", compare=False)
    clip: bool | None = None
    sums: str | None = None
    checkpointing: bool | None = None
    recompute: str | None = None
    optimizer: str | None = None
    masters: str | None = None
    kernels: str | None = None
    dropout: str | None = None
    attention: str | None = None
    loss: str | None = None
    lora: str | None = None
    base: str | None = None
    parallelism: Parallelism | None = None
    pinned: bool = True
    pinned_params: bool = True
    loading: str = "each"
    details: tuple[tuple[str, object], ...] = ()
    left_open: tuple[str, ...] = ()
    defaults: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    without_effect: tuple[str, ...] = field(default=(), compare=False)

    @property
    def policy_base(self) -> str:
        """The policy without its options."""
        return split_spec(self.policy)[0]

    @property
    def options(self) -> dict[str, object]:
        """Including options at their default values."""
        return in_full(self.policy)

    @property
    def replicas(self) -> int | str:
        """Groups of GPUs with a whole model each, or "nodes"."""
        replicas = self.options.get("replicas", 1)
        assert isinstance(replicas, int | str)
        return replicas

    def data_on(self, machine: Machine) -> int:
        """Ranks that share a batch. Raises PstarError for degrees that the GPUs do not have."""
        spread = self.parallelism
        return machine.data_parallel_size if spread is None else spread.data_on(machine.world_size)

    @property
    def detail(self) -> Mapping[str, object]:
        return dict(self.details)

    def for_model(self, workload: Workload) -> Configuration:
        """Open options as the HF Trainer sets them: DeepSpeed's buckets follow the hidden size. Without recomputation
        no checkpoints can be on the host."""
        options = self.options
        none_kept = options.get("checkpoints") == "host" and not workload.checkpointing
        if not self.left_open and not none_kept:
            return self
        hidden = _hidden_size(workload)
        sizes = {"bucket": hidden**2, "prefetch": int(0.9 * hidden**2)}
        changed: dict[str, object] = {
            name: sizes[name] for name in self.left_open if name in sizes and name in options and hidden
        }
        if none_kept:
            changed["checkpoints"] = "gpu"
        return replace(self, policy=spec(self.policy_base, {**options, **changed}))

    def job(self, workload: Workload) -> Workload:
        """By its policy: inputs of recomputed blocks may go to the host."""
        return in_order(self.policy_base, workload, ON_HOST) if self.options.get("checkpoints") == "host" else workload


def in_full(policy: str) -> dict[str, object]:
    """Also options at their default values."""
    found = find_policy(policy)
    set_options = dict(found.values) if isinstance(found, Specified) else {}
    base = found.policy if isinstance(found, Specified) else found
    return {name: option.default for name, option in options_of(base).items()} | set_options


def spec(name: str, options: Mapping[str, object]) -> str:
    """Normalised, without options that the policy does not have."""
    known = options_of(find_policy(name))
    words = ",".join(f"{key}={show(options[key])}" for key in known if key in options)
    return policy_name(f"{name}:{words}") if words else name


def _hidden_size(workload: Workload) -> int:
    """The most frequent length of vectors (norms and biases)."""
    lengths = Counter(t.shape[0] for t in workload.tensors if len(t.shape) == 1)
    return lengths.most_common(1)[0][0] if lengths else 0
