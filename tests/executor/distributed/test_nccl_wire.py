"""What `Wire` does on NCCL, without a GPU: the calls, made against a group that only records them, and the thread that
ends what never comes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from executor.distributed.collectives import Wire
from pstar_sim.errors import RankLost


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Stream:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


class Group:
    """Two ranks. Newer torch gives no work for a collective whose caller waits at once, older torch gives one."""

    def __init__(self, *, gives_work: bool) -> None:
        self.calls: list[str] = []
        self.aborted = 0
        self._gives_work = gives_work

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.aborted += 1

    def wait(self) -> None:
        self.calls.append("wait")

    def _called(self, word: str, options: Any) -> Any:
        assert getattr(options, "asyncOp", False) is False  # torch 2.6 has no such option
        self.calls.append(word)
        return self if self._gives_work else None

    def _allgather_base(self, whole: torch.Tensor, mine: torch.Tensor, options: Any) -> Any:
        return self._called(f"all-gather {whole.numel()} {mine.tolist()}", options)

    def _reduce_scatter_base(self, mine: torch.Tensor, whole: torch.Tensor, options: Any) -> Any:
        return self._called(f"reduce-scatter {whole.numel()} {mine.tolist()}", options)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._called(f"all-reduce {tensors[0].tolist()}", options)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made)
    return made


def wire_on(group: Group, check: Any, broken: Any = lambda error: None, clock: Any = None) -> Wire:
    more = {} if clock is None else {"clock": clock}
    return Wire(group, check=check, explain=lambda error: error, broken=broken, **more)


@pytest.mark.parametrize("gives_work", [False, True])
def test_calls_order_the_stream_and_return(stream: Stream, gives_work: bool) -> None:
    group = Group(gives_work=gives_work)
    wire = wire_on(group, lambda waited_s: None)
    flat = torch.arange(5.0)
    wire.gather(flat)
    wire.reduce_scatter(flat)
    words = ["all-gather 4 [2.0, 3.0]", "reduce-scatter 4 [2.0, 3.0]", "all-reduce [4.0]"]
    assert group.calls == [w for word in words for w in ([word, "wait"] if gives_work else [word])]
    assert len(stream.events) == 3
    wire.close()
    assert group.aborted == 0


def test_a_lost_rank_fails_the_run_and_then_ends_the_collective(stream: Stream) -> None:
    """Nobody is in Python: the kernel of a collective waits on the device. What was done before is not waited for."""
    group, order, ended = Group(gives_work=False), [], threading.Event()

    def check(waited_s: float) -> None:
        assert waited_s >= 7.0  # since the first that has not happened
        raise RankLost("rank 0 died")

    def broken(error: BaseException) -> None:
        order.append(f"failed: {error}")
        wire.abort()
        wire.abort()
        order.append(f"aborted {group.aborted}")
        ended.set()

    now = [100.0]
    wire = wire_on(group, check, broken, clock=lambda: now[0])
    wire.sum(torch.zeros(1))
    stream.events[0].done = True
    now[0] = 200.0
    wire.sum(torch.zeros(1))
    now[0] = 207.0
    assert ended.wait(20)
    assert order == ["failed: rank 0 died", "aborted 1"]


def test_torch_that_cannot_abort(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    group: Any = Group(gives_work=True)
    group.abort = None
    wire = wire_on(group, lambda waited_s: None)
    wire.abort()
    assert "cannot abort NCCL" in caplog.text
