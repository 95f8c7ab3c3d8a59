"""The work of each iteration as a question states it, before a machine is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pstar_sim.arguments import choice, flag, text, whole
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.dtypes import MASTER
from pstar_sim.errors import PstarError
from pstar_sim.planner.batch_shares import of_shares, shares_of_batch
from pstar_sim.workload.adapted import adapted
from pstar_sim.workload.adapter import Adapter, adapter
from pstar_sim.workload.axes import Axes, all_axes
from pstar_sim.workload.kernels import dropout
from pstar_sim.workload.optimizers import OptimizerSpec, optimizer_spec
from pstar_sim.workload.presets import check_blocks, default_dtype, kernels_of, workload_of
from pstar_sim.workload.trace import load_trace
from pstar_sim.workload.workload import Workload, retype, with_optimizer


@dataclass(frozen=True, kw_only=True)
class Job(Axes):
    """Raises PstarError for an impossible value.

    batch: sequences per micro-batch, of all ranks together; None: the batch of the trace for each rank. A model needs
        one.
    seq: None: that of the trace; several variants have to agree. A model needs one.
    micro_batches: None: 1, or those of the trace.
    """

    model: str | None = None
    trace: str | None = None
    batch: int | None = None
    seq: int | None = None
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "micro_batches"):
            needed = self.model is not None and name != "micro_batches"
            if needed or getattr(self, name) is not None:
                whole(name, getattr(self, name))
        for name, axis in all_axes().items():
            value = self.given.get(name)
            if value is None:
                continue
            if axis.names:
                choice(name, value, axis.names)
            elif isinstance(axis.default, bool):
                flag(name, value)
        if self.optimizer is not None:
            optimizer_spec(self.optimizer)
        if self.recompute is not None:
            text("recompute", self.recompute, "attention or every-N, such as every-2")
        if self.dropout is not None:
            object.__setattr__(self, "dropout", str(dropout(self.dropout)))
        if self.lora is not None:
            object.__setattr__(self, "lora", adapter(self.lora))

    @property
    def adapter(self) -> Adapter | None:
        return None if self.lora is None else adapter(self.lora)

    @property
    def states(self) -> OptimizerSpec:
        return optimizer_spec(self.optimizer or "adamw")

    @property
    def flavour(self) -> str:
        """Of the kernels."""
        assert self.model is not None
        return kernels_of(model_entry(self.model), self.kernels)

    def dtype_on(self, machine: Machine) -> str:
        return self.dtype or default_dtype(machine, self.autocast)

    def of(self, machine: Machine, *, nearly: bool = False) -> tuple[Workload, ...]:
        """Of each rank.

        nearly: as in `shares_of_batch`.

        Raises PstarError as `shares_of_batch`, `ps.preset` and `load_trace` do.
        """
        if self.batch is None:
            return (self.share(None, machine),) * machine.world_size
        shares = shares_of_batch(self.batch, machine, nearly=nearly)
        return of_shares(shares, lambda batch: self.share(batch, machine))

    def share(self, batch: int | None, machine: Machine) -> Workload:
        """Of a rank with `batch` sequences per micro-batch."""
        if self.trace is not None:
            return self._traced(batch, machine)
        assert self.model is not None and batch is not None
        entry = model_entry(self.model)
        check_blocks(entry, self)
        return self.write(entry, batch, self.dtype_on(machine))

    def write(self, entry: ModelEntry, batch: int, dtype: str) -> Workload:
        """Of one rank. Equal calls may return the same object."""
        assert self.seq is not None
        micro_batches = self.micro_batches or 1
        return _written(entry, self.but(dtype=dtype), batch=batch, sequence=self.seq, micro_batches=micro_batches)

    def _traced(self, batch: int | None, machine: Machine) -> Workload:
        assert self.trace is not None
        workload = load_trace(
            self.trace,
            batch=batch,
            sequence=self.seq,
            checkpointing=self.checkpointing,
            micro_batches=self.micro_batches,
            dtype=MASTER if self.dtype == MASTER else None,
        )
        if workload.dtype == MASTER and self.dtype not in (None, MASTER):
            raise PstarError(
                f"{self.trace}: --dtype {self.dtype}, but the trace is of fp32; trace the model in {self.dtype}"
            )
        if workload.dtype != MASTER:
            workload = retype(workload, self.dtype_on(machine))
        return self.beside(workload)

    def beside(self, workload: Workload) -> Workload:
        """A traced workload with the adapters, the base and the optimizer of this job."""
        given = self.given
        return with_optimizer(adapted(workload, self.adapter, given.get("base")), self.optimizer, self.masters)


@lru_cache(maxsize=32)
def _written(entry: ModelEntry, axes: Axes, *, batch: int, sequence: int, micro_batches: int) -> Workload:
    return workload_of(entry, batch=batch, sequence=sequence, micro_batches=micro_batches, **axes.given)
