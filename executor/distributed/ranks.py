"""This process among those that train one model under one plan.

Process groups: `wire` for the plan's collectives (net queue's thread), and of gloo `_meeting` for messages between
steps (user's thread) and `_sums` for agreements once per iteration (thread of the first Adam step).

[Note: all ranks at once] A rank holds a part of each parameter, so all ranks train, read a parameter or `state_dict()`,
save and load at the same point of their loop, between `optimizer.step()` and the next forward. An iteration keeps to
its plan (`cannot_leave`).

[Note: evaluations that differ] Between two iterations, without gradients, ranks may call the model as they like: other
modules (routed experts), more batches, or nothing. A rank that needs a chunk comes to a meeting, which begins when all
have come: for a chunk too, or at their next micro-batch, checkpoint or read parameter. A chunk that all need is
    gathered as in the plan; else every rank gives its slices of the needed chunks through host memory, and all meet
    again until none is needed. A meeting fails if a rank has left, and after timeout_s.

[Note: the weight of a rank] Each rank's loss has to be a mean over its batch. Rank r has b_r of a micro-batch's B
sequences, and its gradient is multiplied by b_r / B on arrival, so the sum is the gradient of the mean over the joined
batch. b_r is the first dimension of the forward's first tensor. For a mean over other items (tokens that are not
padding), `prepare(count=...)` gives their number.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.compatibility import check_processes
from executor.distributed.collectives import Wire, open_group
from executor.distributed.lifeline import Address, Lifeline
from executor.moments.hooks import tensors_of
from pstar_sim.core.plan import Plan
from pstar_sim.errors import ModelError, PlanError, RankLost

log = logging.getLogger("executor")

TRAINS, READS, SAVES = -1.0, -2.0, -3.0
NEXT = {
    TRAINS: "the next iteration",
    READS: "a parameter or a state that it reads",
    SAVES: "a checkpoint that it saves or loads",
}
LEFT_S = 5.0  # after this wait, a rank that has ended its run will not come any more


CountOf = Callable[[Any, Any], float]
"""(args, kwargs) of the model's forward -> number of items (sequences, tokens) that the loss of this rank is a mean
over."""


class Ranks:
    """on_loss(error): called from another thread when a rank is gone while this one may wait for the device.
    still, own_slice: see `session.reader.Reader`.

    Raises RankLost, wherever this process waits for the others, when one is gone.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self._over = False
        self._timeout_s = timeout_s
        self._broken: BaseException | None = None
        self.on_loss: Callable[[BaseException], None] | None = None
        self.still: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.own_slice: Callable[[int], torch.Tensor] | None = None
        self.life = Lifeline(self.rank, self.count)
        name, addresses = _introduce(group, self.life.address)
        self.life.connect(addresses)
        backends = ("nccl" if device.type == "cuda" else "gloo", "gloo", "gloo")
        self.wire, self._meeting, self._sums = (
            Wire(
                open_group(b, f"{name}/{i}", self.rank, self.count, timeout_s),
                check=self.check,
                explain=self.life.explain,
                broken=self._break,
                device=device,
            )
            for i, b in enumerate(backends)
        )
        self.wire.on_host = self._meeting
        self.life.on_loss = self._break
        if self.life.lost is not None:  # meanwhile
            raise self.life.lost
        if device.type == "cuda":
            self._check_cards(device)
            # NCCL connects at its first collective; it is made now, where all ranks are sure to come.
            self.wire.sum(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)

    def _check_cards(self, device: torch.device) -> None:
        """NCCL allows no two ranks on one card."""
        card = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
        rows = [row[0] for row in self.meet([_digest(card)])]
        for rank, row in enumerate(rows):
            first = rows.index(row)
            if first < rank:
                raise PlanError(
                    f"ranks {first} and {rank} of the job have one and the same CUDA device; give each its own: "
                    "prepare(device=f'cuda:{local_rank}'), local_rank = int(os.environ['LOCAL_RANK'])"
                )

    def _break(self, error: BaseException) -> None:
        self._broken = error
        if self.on_loss is not None:
            self.on_loss(error)
        self.wire.abort()

    def check(self, waited_s: float = 0.0) -> None:
        """Raise RankLost if a rank is gone, or has ended while this one waits."""
        lost = self.life.lost or self._broken
        if lost is not None:
            raise lost
        if self._over:
            raise RankLost("this rank's run is over")
        if waited_s > self._timeout_s:
            raise RankLost(
                f"the other ranks have not come to an exchange for {waited_s:.0f} s (timeout_s={self._timeout_s:g}); "
                f"this is rank {self.rank}, and all others live: one of them stands still, or waits in an "
                "exchange of the loop's own (barrier, all_reduce) that this rank comes to later"
            )
        who = self.life.departure() if waited_s > LEFT_S else None
        if who is not None:
            raise RankLost(f"{who}, and this is rank {self.rank}, which still waits for that rank")

    def cannot_leave(self, reason: str) -> PlanError:
        """For a process that would leave the plan; tells the others."""
        return self.ends(
            f"rank {self.rank} cannot continue: {reason}. On several ranks an iteration keeps to its plan, because the "
            "others wait for its next steps; make a plan that holds for the model on every rank (trace the model with "
            "batches of the largest shape), evaluate between two iterations, and read or save there on all ranks"
        )

    def ends(self, text: str) -> PlanError:
        """Tells the other ranks."""
        self.life.fail(f"PlanError: {text}")
        return PlanError(text)

    def announce(self, error: BaseException | None, iteration: int) -> None:
        """Tell the others that this run is over, and how."""
        if isinstance(error, RankLost):
            self.life.leave("ended because another rank was lost")
        elif error is not None:
            text = str(error).splitlines()
            self.life.fail(f"{type(error).__name__}: {text[0] if text else ''}")
            self.life.leave("failed")
        else:
            self.life.leave(f"has ended its run after {iteration} iterations")
        self._over = True

    def close(self) -> None:
        """No thread may be in an exchange."""
        for wire in (self.wire, self._meeting, self._sums):
            wire.close()

    def agree(self, norm: torch.Tensor) -> torch.Tensor:
        """Of each rank's norm of its part; every rank calls this once per iteration. If one rank's is not finite, the
        result is finite on none."""
        total = norm.detach().to("cpu", torch.float64).square().reshape(1)
        self._sums.sum(total)
        return total.sqrt().to(norm.device, torch.float32).reshape(())

    def meet(self, row: Sequence[float]) -> list[list[float]]:
        """All rows by rank; every rank calls this at the same point."""
        rows: list[list[float]] = self._meeting.exchange(torch.tensor(row, dtype=torch.float64)).tolist()
        return rows

    def on_this_host(self) -> list[int]:
        """Every rank calls this at the same point."""
        mine = _digest(socket.gethostname())
        return [rank for rank, row in enumerate(self.meet([mine])) if row[0] == mine]

    def any(self, here: bool) -> bool:
        """True on some rank? Every rank calls this at the same point."""
        return any(row[0] for row in self.meet([float(here)]))

    def same(self, values: Mapping[str, str]) -> None:
        """Raise PlanError on every rank if a value differs, at the start of a run."""
        rows = self.meet([_digest(value) for value in values.values()])
        for i, what in enumerate(values):
            odd = [r for r, row in enumerate(rows) if row[i] != rows[0][i]]
            if odd:
                text = f"{what} of rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} is not that of rank 0"
                raise PlanError(f"{text}; give every rank the same")

    def slices_of(self, chunk: int) -> torch.Tensor | None:
        """Needed off the plan, [ranks, bytes of a slice] on the host; None if all need it now and gather it: [Note:
        evaluations that differ]."""
        rows = self.meet([float(chunk), 0.0])
        wanted = {row[0] for row in rows}
        return None if len(wanted) == 1 else self._serve([each for each in wanted if each >= 0], chunk)

    def come_to_read(self, number: float) -> list[float]:
        """Meets the other ranks before all read the same value; returns their numbers."""
        return self.come_to(READS, number)

    def come_to(self, what: float, number: float = 0.0) -> list[float]:
        """At a point, one of NEXT; returns the ranks' numbers. Until then this rank gives slices of chunks that others
        read off the plan. Raises PlanError, on all ranks, if the points differ."""
        while True:
            rows = self.meet([what, number])
            wanted = {row[0] for row in rows if row[0] >= 0}  # the points of NEXT are below
            if not wanted:
                break
            self._serve(wanted)
        if len({row[0] for row in rows}) == 1 and (what != READS or len({row[1] for row in rows}) == 1):
            return [row[1] for row in rows]
        words = ", ".join(f"rank {rank} to {NEXT[row[0]]}" for rank, row in enumerate(rows))
        text = (
            f"between two iterations the ranks come to different things: {words}; let every rank read the same "
            "parameters (also by state_dict()), save, load and train at the same point of its loop; evaluations may "
            "differ"
        )
        raise self.ends(text)

    def _serve(self, wanted: Iterable[float], mine: int = -1) -> torch.Tensor | None:
        assert self.own_slice is not None
        joined: torch.Tensor | None = None
        with torch.no_grad(), self.still():
            for chunk in sorted(int(each) for each in wanted):
                rows = self._meeting.exchange(self.own_slice(chunk).view(torch.uint8))
                if chunk == mine:
                    joined = rows
        return joined

    def weight(self, count: float) -> float:
        """[Note: the weight of a rank]; every rank calls this with its b_r. Raises ModelError on all if a value is no
        count, or all are 0."""
        counts = self.come_to(TRAINS, count)
        rows = ", ".join(f"{each:g}" for each in counts)
        odd = [rank for rank, each in enumerate(counts) if not 0 <= each < math.inf]
        if odd:
            who = ", ".join(f"{counts[rank]:g} on rank {rank}" for rank in odd)
            raise ModelError(
                f"prepare(count=...) gives {who} for a micro-batch (ranks 0 to {len(counts) - 1}: {rows}); let it give "
                "the number of sequences or tokens that the rank's loss is the mean of: finite, 0 or more"
            )
        if not sum(counts) > 0:
            raise ModelError(
                f"a micro-batch of {rows} sequences on ranks 0 to {len(counts) - 1}: there is nothing to take the mean "
                "over; give at least one rank a batch that is not empty (or see prepare(count=...))"
            )
        return count / sum(counts)


def _digest(text: str) -> float:
    """48 bits, which a float64 holds exactly."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _introduce(group: dist.ProcessGroup, mine: Address) -> tuple[str, list[Address]]:
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, (uuid.uuid4().hex, mine), group=group)
    return f"pstar-sim/{rows[0][0]}", [address for _, address in rows]


def join(plan: Plan, group: Any, *, device: torch.device, timeout_s: float) -> Ranks | None:
    """None for one rank. Raises PlanError if the processes do not match the plan."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    check_processes(plan, dist.get_world_size(group) if group is not None else 1)
    return Ranks(group, device=device, timeout_s=timeout_s) if plan.machine.world_size > 1 else None


def count_of(args: Any, kwargs: Any) -> float:
    """First dimension of a batch's first tensor, 1 without one."""
    for tensor in tensors_of((args, kwargs)):
        if tensor.dim():
            return float(tensor.shape[0])
    return 1.0


def share_values(ranks: Ranks, model: nn.Module) -> None:
    """All get rank 0's values, before the model is moved."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            flat = tensor.detach()
            whole = flat if flat.is_contiguous() else flat.contiguous()
            ranks.wire.broadcast(whole)
            if whole is not flat:
                flat.copy_(whole)
