"""Ranks: this process among the several that train one model under one plan.

Three process groups of the run's own, so that nothing of the user's comes between: `wire` for the plan's collectives
(the net queue's thread), `_meeting` for what the ranks tell each other between steps of the plan (the user's thread)
and `_sums` for what they agree on once per iteration (the thread of the first Adam step). The last two are gloo, of a
few bytes, also where the plan's own is NCCL.

[Note: all ranks at once] A rank holds a part of each parameter. So whatever needs whole ones needs every rank:
training, reading a parameter or `state_dict()`, saving and loading are done by all of them at the same point of their
loop, between `optimizer.step()` and the next forward. An iteration keeps to its plan (`cannot_leave`).

[Note: evaluations that differ] Between two iterations each rank may call what it likes without gradients: other modules
than the others (routed experts), more batches, or nothing. A rank that wants a chunk comes to a meeting, and the
meeting begins when all ranks have come: the others come because they want a chunk too, or because they have reached
their next micro-batch, their next checkpoint or a parameter that they read. If all ranks want the same chunk, it is
gathered as the plan would gather it. Otherwise the wanted chunks are served one after the other: every rank gives its
slice, through host memory, and the ranks that want the chunk take all slices. Then all meet again, until no rank wants
a chunk. Each meeting serves at least one rank, and nothing is updated meanwhile, so every rank gets what it would get
in one process. A meeting ends with an error that says why where a rank has left, and after timeout_s where a rank waits
for this one elsewhere (in an all_reduce of the loop's own, before the others are done).

[Note: the weight of a rank] The loss of each rank has to be a mean over its batch (a rank that has more sequences has
the larger share). Rank r with b_r of the B = b_0 + b_1 + ... sequences of a micro-batch has its gradient multiplied by
b_r / B when it arrives, and the gradients are summed: that is the gradient of the mean over the joined batch. b_r is
the first dimension of the first tensor that the model's forward is given, of each micro-batch anew; where the loss is a
mean over something else (tokens that are not padding), `prepare(count=...)` says how many.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from executor.compatibility import check_processes
from executor.distributed.collectives import Wire, open_group
from executor.distributed.lifeline import Address, Lifeline
from executor.moments.hooks import tensors_of
from pstar_sim.core.plan import Plan
from pstar_sim.errors import ModelError, PlanError, RankLost

__all__ = ["READS", "SAVES", "Ranks", "join"]

log = logging.getLogger("executor")

TRAINS, READS, SAVES = -1.0, -2.0, -3.0
NEXT = {
    TRAINS: "the next iteration",
    READS: "a parameter or a state that it reads",
    SAVES: "a checkpoint that it saves or loads",
}
LEFT_S = 5.0  # a rank that waits so long for one that has ended its run waits in vain


class Giver(Protocol):
    """What ranks need of the session when they read one another's slices."""

    def still(self) -> contextlib.AbstractContextManager[None]:
        """Updates of finished iterations are done and nothing moves inside."""
        ...

    def own_slice(self, chunk: int) -> torch.Tensor:
        """This rank's slice of the chunk's parameters as they are now, flat, a copy in host memory."""
        ...


class Ranks:
    """This process among the ranks of a run.

    rank: number of this process, from 0.
    count: number of processes.
    wire: see `collectives.py`.
    on_loss(error): called from another thread when a rank is gone while this one may wait for the device.
    giver(): who gives this rank's slices.

    Raises RankLost, wherever this process waits for the others, when one of them is gone.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self._over = False
        self._timeout_s = timeout_s
        self._broken: BaseException | None = None
        self.on_loss: Callable[[BaseException], None] | None = None
        self.giver: Callable[[], Giver | None] = lambda: None
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
            # NCCL connects at its first collective; that is now, where all are sure to come.
            self.wire.sum(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)

    def _check_cards(self, device: torch.device) -> None:
        """Raise PlanError, on every rank, where two ranks use the same card, which NCCL does not allow."""
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
        """Fail the run once, from the thread that finds the reason; everything in flight with the other ranks then
        ends."""
        self._broken = error
        if self.on_loss is not None:
            self.on_loss(error)
        self.wire.abort()

    def check(self, waited_s: float = 0.0) -> None:
        """Raise RankLost if a rank is gone, or has ended its run while this one waits for it."""
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
            raise RankLost(f"{who}, and this is rank {self.rank}, which still waits for it")

    def cannot_leave(self, reason: str) -> PlanError:
        """Returns the error to raise where one process would go on without its plan. The other ranks are told."""
        return self.ends(
            f"rank {self.rank} cannot go on: {reason}. On several ranks an iteration keeps to its plan, as the others "
            "wait for what it says comes next; make a plan for what the model does on every rank (trace it with "
            "batches of the largest shape), evaluate between two iterations, and read or save there on all ranks"
        )

    def ends(self, text: str) -> PlanError:
        """Returns the error to raise where this rank's run is over. The other ranks are told."""
        self.life.fail(f"PlanError: {text}")
        return PlanError(text)

    def announce(self, error: BaseException | None, iteration: int) -> None:
        """Tell the other ranks that this rank's run is over, and how it ended. Nothing here waits for them any more."""
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
        """Close the connections, when no thread is in an exchange any more."""
        for wire in (self.wire, self._meeting, self._sums):
            wire.close()

    def agree(self, norm: torch.Tensor) -> torch.Tensor:
        """Returns the norm of what all ranks hold together, from the norm of what each holds. Every rank calls it once
        per iteration. A norm that is not finite on one rank is not finite on any."""
        total = norm.detach().to("cpu", torch.float64).square().reshape(1)
        self._sums.sum(total)
        return total.sqrt().to(norm.device, torch.float32).reshape(())

    def meet(self, row: Sequence[float]) -> list[list[float]]:
        """Exchange a value with all ranks; returns the values in order of rank. Every rank calls it at the same point
        of its loop."""
        rows: list[list[float]] = self._meeting.exchange(torch.tensor(row, dtype=torch.float64)).tolist()
        return rows

    def on_this_host(self) -> int:
        """Returns the number of ranks that run on this host. Every rank calls it at the same point."""
        mine = _digest(socket.gethostname())
        return sum(row[0] == mine for row in self.meet([mine]))

    def any(self, here: bool) -> bool:
        """Returns whether the value is true on some rank. Every rank calls it at the same point of its loop."""
        return any(row[0] for row in self.meet([float(here)]))

    def same(self, values: Mapping[str, str]) -> None:
        """Raise PlanError on every rank if one of the values, by name, is not the same on all ranks. At the start
        only."""
        rows = self.meet([_digest(value) for value in values.values()])
        for i, what in enumerate(values):
            odd = [r for r, row in enumerate(rows) if row[i] != rows[0][i]]
            if odd:
                text = f"{what} of rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} is not that of rank 0"
                raise PlanError(f"{text}; give every rank the same")

    def slices_of(self, chunk: int) -> torch.Tensor | None:
        """[ranks, bytes of a slice] of a chunk that this rank wants off plan, in host memory; None where every rank
        wants this one now: then they gather it. See [Note: evaluations that differ]."""
        rows = self.meet([float(chunk), 0.0])
        wanted = {row[0] for row in rows}
        return None if len(wanted) == 1 else self._serve([each for each in wanted if each >= 0], chunk)

    def come_to_read(self, number: float) -> list[float]:
        """Meet the other ranks before all of them read the same value. number: number of that value."""
        return self.come_to(READS, number)

    def come_to(self, what: float, number: float = 0.0) -> list[float]:
        """Meet the other ranks at a point, one of NEXT, to which each comes with a number. Returns the numbers of all
        ranks. Until all are there, this rank gives its slices of chunks that other ranks want to read off the plan.
        Raises PlanError, on all ranks, where the points are not the same."""
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
        """Put each of these chunks together on every rank, in host memory. Returns the chunk that this rank wants."""
        giver = self.giver()
        assert giver is not None
        found: torch.Tensor | None = None
        with torch.no_grad(), giver.still():
            for chunk in sorted(int(each) for each in wanted):
                rows = self._meeting.exchange(giver.own_slice(chunk).view(torch.uint8))
                if chunk == mine:
                    found = rows
        return found

    def weight(self, count: float) -> float:
        """Weight of this rank in the micro-batch that begins ([Note: the weight of a rank]). Every rank calls it with
        its own b_r. Raises ModelError on all ranks if a value is not a count, or if all are 0."""
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
    """48 bits of a text's hash, which a float64 holds exactly: what ranks compare in place of the text."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _introduce(group: dist.ProcessGroup, mine: Address) -> tuple[str, list[Address]]:
    """Returns the run's name, which the first process chooses, and the addresses of all processes."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, (uuid.uuid4().hex, mine), group=group)
    return f"pstar-sim/{rows[0][0]}", [address for _, address in rows]


def join(plan: Plan, group: Any, *, device: torch.device, timeout_s: float) -> Ranks | None:
    """Returns the ranks of a plan's run, None for a plan of one. Raises PlanError where the processes are not the
    plan's."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    check_processes(plan, dist.get_world_size(group) if group is not None else 1)
    return Ranks(group, device=device, timeout_s=timeout_s) if len(plan.machine.ranks) > 1 else None


def count_of(args: Any, kwargs: Any) -> float:
    """First dimension of the first tensor of a batch; 1 where there is none."""
    for tensor in tensors_of((args, kwargs)):
        if tensor.dim():
            return float(tensor.shape[0])
    return 1.0


def share_values(ranks: Ranks, model: nn.Module) -> None:
    """Give the parameters and buffers of every rank the values of rank 0, one at a time. Called before the model is
    moved."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            flat = tensor.detach()
            whole = flat if flat.is_contiguous() else flat.contiguous()
            ranks.wire.broadcast(whole)
            if whole is not flat:
                flat.copy_(whole)
