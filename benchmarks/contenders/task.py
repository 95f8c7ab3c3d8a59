"""Task: the training that a contender's process is asked for, as plain values that can be sent over a pipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["CONTENDERS", "LEAVES", "MAX_GRAD_NORM", "Task", "settings_of"]

# Name -> (module of this package, its settings' file, its name in tables).
CONTENDERS = {
    "ours": ("ours", "ours.json", "ours"),
    "ours_eager": ("ours", "ours_eager.json", "ours, eager"),
    "ours_half": ("ours", "ours_half.json", "ours, room for half"),
    "ours_away": ("ours", "ours_away.json", "ours, room for none"),
    "plain": ("plain", "plain.json", "plain PyTorch"),
    "zero2": ("zero", "zero2.json", "DeepSpeed ZeRO-2 offload"),
    "zero3": ("zero", "zero3.json", "DeepSpeed ZeRO-3 offload"),
    "zero3_twinflow": ("zero", "zero3_twinflow.json", "DeepSpeed ZeRO-3 offload, Twin-Flow"),
    "fsdp2": ("fsdp2", "fsdp2.json", "FSDP2 CPU offload"),
}
# The model data that each peer keeps on the host. For ours the plan decides.
LEAVES = {
    "plain": "nothing",
    "zero2": "gradients, states",
    "zero3": "everything",
    "zero3_twinflow": "everything",
    "fsdp2": "everything",
}
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task for a contender.

    contender: a key of CONTENDERS.
    model: as for `pstar trace`.
    global_batch: sequences per optimizer step; micro_batch divides it.
    gpu_cap_bytes: bytes of the card that may be reserved (None: all; on a CPU there is no card).
    host_cap_bytes: bytes of host memory that a plan of ours may take (None: all free memory).
    machine: a machine file for our plans, None for the catalog's entry.
    policy: policy of our plans, None for the settings' file.
    """

    contender: str
    model: str
    global_batch: int
    micro_batch: int
    sequence: int
    dtype: str
    checkpointing: bool
    clip: bool
    device: str
    threads: int
    lr: float = 1e-4
    seed: int = 0
    gpu_cap_bytes: int | None = None
    host_cap_bytes: int | None = None
    machine: str | None = None

    def __post_init__(self) -> None:
        if self.contender not in CONTENDERS:
            raise ValueError(f"contender {self.contender!r} is not known; choose from {', '.join(CONTENDERS)}")
        if self.micro_batch < 1 or self.global_batch % self.micro_batch:
            raise ValueError(
                f"a micro-batch of {self.micro_batch} does not divide the global batch of {self.global_batch}"
            )
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is not known; use 'cpu' or 'cuda'")

    @property
    def micro_batches(self) -> int:
        return self.global_batch // self.micro_batch

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.global_batch * self.sequence

    @property
    def key(self) -> str:
        """Key of a result of this task: equal for equal tasks only."""
        return json.dumps(asdict(self), sort_keys=True)

    def changed(self, **changes: Any) -> Task:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def settings_of(contender: str) -> Mapping[str, Any]:
    """Returns the committed settings of a contender."""
    return json.loads((Path(__file__).parent / CONTENDERS[contender][1]).read_text(encoding="utf-8"))  # type: ignore[no-any-return]
