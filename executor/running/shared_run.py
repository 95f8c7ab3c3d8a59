"""A job on several ranks: each one's data, and the figures of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from executor.training import StepReport

if TYPE_CHECKING:
    from executor.engine import Session
    from executor.measuring.measured import Measured


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """losses: per step, over all ranks' batches.
    peak_gpu_bytes: per rank, in the measured iteration.
    sent_bytes: per step, on average.
    transient_bytes: [Note: what a slice moves through].
    """

    losses: Sequence[float]
    peak_gpu_bytes: Sequence[int]
    sent_bytes: int
    transient_bytes: int


def own_batches(batches: Iterator[Any], session: Session) -> Iterator[Any]:
    """Rank r of P takes every P-th batch, from r on; where shares differ, the first n sequences of each."""
    ranks, whole = session.ranks, session.plan.workload.batch
    if ranks is None:
        return batches
    own = islice(batches, ranks.rank, None, ranks.count)
    sequences = session.batches.planned_size
    return own if sequences == whole else (_first(batch, sequences, whole) for batch in own)


def _first(batch: Any, sequences: int, of: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[:sequences].clone() if batch.dim() and batch.shape[0] == of else batch
    if isinstance(batch, dict):
        return {key: _first(value, sequences, of) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_first(value, sequences, of) for value in batch)
    return batch


def share_results(
    session: Session, reports: Sequence[StepReport], measured: Measured | None, sent_bytes: int
) -> SharedRun | None:
    """After the last step, on every rank; None on one."""
    ranks = session.ranks
    if ranks is None:
        return None
    peak = 0 if measured is None else measured.peak_gpu_bytes
    rows = ranks.meet([float(session.batches.planned_size), float(peak), *(report.loss for report in reports)])
    total = sum(row[0] for row in rows)
    return SharedRun(
        losses=[sum(row[0] * row[2 + i] for row in rows) / total for i in range(len(reports))],
        peak_gpu_bytes=[int(row[1]) for row in rows],
        sent_bytes=sent_bytes // max(1, len(reports)),
        transient_bytes=session.arena.payloads.peak_transient_bytes,
    )
