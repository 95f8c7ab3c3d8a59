"""Interruptions: KeyboardInterrupt at a line of the executor, then `zero_grad()` and two clean iterations.

Only public behaviour is tested. A session is prepared, trains one clean iteration, and is interrupted at one hit of one
line in the next iteration, in the user's thread or in a queue's. Afterwards the loop does what a notebook does after
Ctrl-C: it calls `zero_grad()` and continues. There are two valid results. After two clean iterations, losses,
parameters and optimizer states equal plain PyTorch's to the bit (with the interrupted iteration left out, or, from
`optimizer.step()` on, counted whole). Or every call from the interruption on raises one clear error. `close()` works in
both cases and leaves no thread.

[Note: which hits] A hit is a line event of `sys.settrace`. CPython handles signals where a function begins, after calls
and where loops go back. Two kinds of line events are at other places and are left out: the event of a `with` line as
its block ends, before `__exit__` is called; and the event of a line that does nothing (`try:`, a `return` inside
`try`), which the compiler leaves outside the block's handlers. Hits of queues' threads depend on timing; a hit that
does not come is counted as not reached.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import itertools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import executor
from executor.capture import capture_module
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core import ledger
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import PstarError
from pstar_sim.policy.registry import find_policy

__all__ = ["CASES", "Bench", "Case", "Outcome", "Point", "three_of"]

ROOT = Path(executor.__file__).resolve().parent
LEDGER = Path(ledger.__file__).resolve()
HANG_S = 120.0
LR = 1e-2


def _named(path: Path) -> str | None:
    """Returns the name of a file to interrupt: the executor's files, and the ledger that it uses; None for other
    files."""
    if ROOT in path.parents:
        return path.relative_to(ROOT).as_posix()
    return LEDGER.name if path == LEDGER else None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of the interrupted iteration.

    path: "on plan": an evaluation before it. "off plan": an evaluation between forward and backward. "dropped": its
        gradients are dropped once, and forward and backward run again.
    """

    policy: str
    update: str
    path: str

    def __str__(self) -> str:
        return f"{self.policy}, update {self.update}, {self.path}"


CASES = tuple(
    Case(policy=policy, update=update, path=path)
    for policy in ("tide", "optimal")
    for update in ("step", "eager")
    for path in ("on plan", "off plan", "dropped")
    if (update, path) != ("eager", "dropped")  # eager updates cannot be dropped
)


@dataclass(frozen=True, order=True, kw_only=True)
class Point:
    """A line in a thread ("user" or a queue's), and the number of one of its hits, from 1."""

    file: str
    line: int
    thread: str
    hit: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, hit {self.hit} in the {self.thread} thread"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an interruption.

    kind: valid results are "equal", "error" (one clear error from then on) and "not reached". Others are "differs",
        "internal" (an internal error of the executor), "quiet" (an error that does not last), "hang" and "close".
    """

    kind: str
    said: str = ""

    @property
    def right(self) -> bool:
        return self.kind in ("equal", "error", "not reached")


class Hang(BaseException):
    """The run took longer than any of its waits may take."""


class Net(nn.Module):
    """Three layers, several chunks. Sizes are multiples of a vector register's: a fused update takes the last elements
    of a tensor by another path, and chunks do not end where tensors end."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 48, 16)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(torch.relu(x))
        loss: torch.Tensor = (x**2).mean()
        return loss


@cache
def _between_signals(code: CodeType) -> frozenset[int]:
    """Returns the offsets of line events at which no signal is handled: see [Note: which hits]."""
    rows = list(dis.get_instructions(code))
    found = {row.offset for row in rows if row.opname == "NOP"}
    for i in range(1, len(rows) - 2):
        if all(row.opname == "LOAD_CONST" and row.argval is None for row in rows[i : i + 3]):
            found.add(rows[i].offset)
            if rows[i - 1].opname == "SWAP":  # returns a value from inside the block
                found.add(rows[i - 1].offset)
    return frozenset(found)


class Tracer:
    """Counts hits of the executor's lines while armed, and raises at one of them."""

    def __init__(self) -> None:
        self.armed = False
        self.hits: Counter[tuple[str, int, str]] = Counter()
        self.target: Point | None = None
        self.raised: KeyboardInterrupt | None = None
        self._own: dict[CodeType, str | None] = {}
        self._lock = threading.Lock()

    def watch_threads(self) -> None:
        """Make threads that start from now on interruptible."""
        threading.settrace(self.on_call)

    def rest(self) -> None:
        with self._lock:  # a thread at a line now has raised already, or will not raise
            self.armed = False
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def arm(self, target: Point | None) -> None:
        self.hits.clear()
        self.target, self.raised, self.armed = target, None, True
        sys.settrace(self.on_call)

    def on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not self.armed and code.co_name != "_run":  # a queue's thread is in that function all the time
            return None
        if code not in self._own:
            path = Path(code.co_filename)
            self._own[code] = _named(path)
        return None if self._own[code] is None else self.on_line

    def on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or not self.armed or frame.f_lasti in _between_signals(frame.f_code):
            return self.on_line
        name = threading.current_thread().name
        thread = name.removeprefix("executor-") if name.startswith("executor-") else "user"
        key = (str(self._own[frame.f_code]), frame.f_lineno, thread)
        with self._lock:
            if not self.armed:
                return self.on_line
            self.hits[key] += 1
            hit, target = self.hits[key], self.target
            if target is None or key != (target.file, target.line, target.thread) or hit != target.hit:
                return self.on_line
            self.armed = False
            self.raised = KeyboardInterrupt(f"injected at {target}")
        raise self.raised


def three_of(hits: Mapping[tuple[str, int, str], int]) -> list[Point]:
    """Returns the first, a middle and the last hit of every line."""
    return [
        Point(file=file, line=line, thread=thread, hit=hit)
        for (file, line, thread), count in sorted(hits.items())
        for hit in sorted({1, (count + 1) // 2, count})
    ]


@dataclass
class Loop:
    """A model with its optimizer, and the state of its loop."""

    model: nn.Module
    optimizer: Any
    at: str = ""
    losses: list[torch.Tensor] = field(default_factory=list)

    def iterate(self, batch: torch.Tensor) -> None:
        self.at = "forward"
        loss = self.model(batch)
        self.at = "backward"
        loss.backward()
        self.at = "step"
        self.optimizer.step()
        self.at = "after"
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def interrupted(self, batch: torch.Tensor, path: str) -> None:
        """Run the iteration to interrupt. At its end parameters are read, which waits for every update."""
        self.at = "forward"
        if path == "on plan":
            self.evaluate(batch)
        loss = self.model(batch)
        if path == "off plan":
            self.evaluate(batch)
        self.at = "backward"
        loss.backward()
        if path == "dropped":
            self.optimizer.zero_grad()
            self.model(batch).backward()
        self.at = "step"
        self.optimizer.step()
        self.at = "after"
        self.optimizer.zero_grad()
        self.model.state_dict()

    def evaluate(self, batch: torch.Tensor) -> None:
        with torch.no_grad():
            self.model(batch)

    def standing(self) -> list[torch.Tensor]:
        """Returns the last two losses, the parameters, and the states with their step counts."""
        states = self.optimizer.state_dict()["state"]
        rows = [states[n][key] for n in sorted(states) for key in ("step", "exp_avg", "exp_avg_sq")]
        return [*self.losses[-2:], *self.model.state_dict().values(), *rows]


class Bench:
    """Plan, batches and plain PyTorch's results of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(2)
        self.batches = [torch.randn(4, 16, generator=draw) for _ in range(4)]
        torch.manual_seed(0)
        self.model = Net()
        self.plan = self._plan()
        before, broken, *after = self.batches
        self.left_out = self._plain([before, *after])
        self.counted = self._plain([before, broken, *after])
        self.tracer = Tracer()

    def _plan(self) -> Plan:
        w = capture_module(self.model, self.batches[0], name="net", batch=4, sequence=1)
        machine = load_machine("virtual", gpu_memory=w.peak_non_model_bytes + 2 * sum(t.bytes for t in w.tensors))
        settings = Settings(clip=False, update=self.case.update, chunk_bytes=4096)
        plan = find_policy(self.case.policy)(w, machine, settings)
        plan.check()
        return plan

    def _plain(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        model = copy.deepcopy(self.model)
        loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
        for batch in batches:
            loop.iterate(batch)
        return loop.standing()

    @contextlib.contextmanager
    def _loop(self) -> Iterator[Loop]:
        """Yields a prepared model after one clean iteration, traced."""
        spec = executor.AdamW(lr=LR, eager=self.case.update == "eager")
        self.tracer.watch_threads()
        try:
            model, optimizer = executor.prepare(copy.deepcopy(self.model), self.plan, spec, check=False, watchdog_s=3.0)
            loop = Loop(model, optimizer)
            loop.iterate(self.batches[0])
            yield loop
        finally:
            self.tracer.rest()

    def hits(self) -> dict[tuple[str, int, str], int]:
        """Returns line and thread -> number of hits in an uninterrupted iteration."""
        with self._loop() as loop:
            self.tracer.arm(None)
            loop.interrupted(self.batches[1], self.case.path)
            self.tracer.armed = False
            found = dict(self.tracer.hits)
        loop.optimizer.session.close()
        return found

    def strike(self, point: Point) -> Outcome:
        """Interrupt one run at the point."""
        before = set(threading.enumerate())
        signal.signal(signal.SIGALRM, _hang)
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            outcome = self._strike(point)
            left = [thread.name for thread in set(threading.enumerate()) - before]
            return Outcome(kind="close", said=f"left running: {left}") if left else outcome
        except Hang as hang:
            return Outcome(kind="hang", said=_where(hang))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _strike(self, point: Point) -> Outcome:
        with self._loop() as loop:
            self.tracer.arm(point)
            try:
                loop.interrupted(self.batches[1], self.case.path)
            except (Exception, KeyboardInterrupt) as error:
                at, struck = loop.at, error
            else:
                at, struck = loop.at, None
            self.tracer.rest()
            raised = self.tracer.raised
            if struck is None or struck is raised:
                outcome = self._go_on(loop, at, raised)
            else:
                outcome = self._lasting(loop, struck)
        if raised is None and outcome.kind == "equal":
            outcome = Outcome(kind="not reached")
        return self._close(loop, outcome, raised)

    def _go_on(self, loop: Loop, at: str, raised: KeyboardInterrupt | None) -> Outcome:
        try:
            loop.optimizer.zero_grad()
            for batch in self.batches[2:]:
                loop.iterate(batch)
            found = loop.standing()
        except Exception as error:
            return self._lasting(loop, error)
        except KeyboardInterrupt as error:  # raised where the work of the interrupted queue is needed
            if error is not raised or not any("raised in queue" in n for n in getattr(error, "__notes__", ())):
                return Outcome(kind="internal", said=_where(error))
            return self._lasting(loop, error)
        may = {"step": [self.left_out, self.counted], "after": [self.counted]}.get(at, [self.left_out])
        for expected in may:
            if len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected)):
                return Outcome(kind="equal")
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, may[0]))
        return Outcome(kind="differs", said=f"relative difference {worst:.2g}, interrupted in {at}")

    def _lasting(self, loop: Loop, error: BaseException) -> Outcome:
        """Returns the outcome for an error: every later call of the session has to raise too."""
        if isinstance(error, Exception) and (not isinstance(error, PstarError) or "stuck" in str(error)):
            return Outcome(kind="internal", said=_where(error))
        for action in (
            loop.optimizer.zero_grad,
            lambda: loop.iterate(self.batches[2]),
            lambda: loop.iterate(self.batches[3]),
            loop.model.state_dict,
        ):
            try:
                action()
            except (PstarError, KeyboardInterrupt) as again:
                if isinstance(again, KeyboardInterrupt) and again is not error:
                    return Outcome(kind="internal", said=_where(again))
            except Exception as other:
                return Outcome(kind="internal", said=_where(other))
            else:
                return Outcome(kind="quiet", said=f"{type(error).__name__}: {error}; then nothing")
        return Outcome(kind="error", said=f"{type(error).__name__}: {error}")

    def _close(self, loop: Loop, outcome: Outcome, raised: KeyboardInterrupt | None) -> Outcome:
        try:
            loop.optimizer.session.close()
        except BaseException as error:
            if error is not raised:  # close() raises the error that ended a queue, if no call has raised it
                return Outcome(kind="close", said=_where(error))
        if outcome.kind == "equal":
            kept = [*loop.model.parameters()]
            expected = (self.left_out, self.counted)
            same = any(all(torch.equal(a, b) for a, b in zip(kept, e[2:])) for e in expected)
            if not same or any(type(p) is not nn.Parameter for p in kept):
                return Outcome(kind="close", said="the parameters after close() are others than before")
        return outcome


def _hang(signum: int, frame: FrameType | None) -> None:
    raise Hang


def _where(error: BaseException) -> str:
    """Returns the error with the executor's innermost lines."""
    rows = []
    trace = error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if (name := _named(path)) is not None:
            rows.append(f"{name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:200]} at {' < '.join(rows[:-5:-1])}"
