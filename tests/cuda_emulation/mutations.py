"""Takes the CUDA backend's synchronisations away, one at a time, and runs the tests that have to fail then.

mutations.py [NAME...]: all, or those named. Each mutation is made in a copy of the sources. The status is 1 where the
tests pass without a synchronisation, and where the text of a mutation is not in the source (any more).
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("executor", "pstar_sim", "tests", "pyproject.toml")
TESTS_FAILED = 1  # status of pytest; others say that the tests could not be run
LIMIT_S = 900

STREAMS = "executor/queues/streams.py"
EVENTS = "executor/devices/cuda_streams.py"
GATE = "executor/devices/gate.py"
BLOCKS = "executor/devices/cuda_blocks.py"
ORDER = "tests/backends/test_cuda_order.py::"
TRAINING = "tests/backends/test_cuda_training.py::"
SLOW_COPIES = TRAINING + "TestHazards::test_slow_copies_change_nothing"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """file: source that is changed. text: what is taken away, once in it. instead: what takes its place. test: of
    pytest, has to fail."""

    file: str
    text: str
    instead: str = ""
    test: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        if source.count(self.text) != 1:
            raise SystemExit(f"{self.file} has this text {source.count(self.text)} times, not once:\n{self.text}")
        path.write_text(source.replace(self.text, self.instead), encoding="utf-8")


MUTATIONS: Mapping[str, Mutation] = {
    "a device step does not wait for the steps of other streams": Mutation(
        file=STREAMS,
        text="            elif not backend.query(event):\n"
        "                backend.wait_event(queue, event)\n        if on_host",
        instead="        if on_host",
        test=SLOW_COPIES,
    ),
    "a host step does not wait for the device": Mutation(
        file=STREAMS,
        text="                backend.synchronize(event)\n                if self._failure is not None:  # a rank",
        instead="                if self._failure is not None:  # a rank",
        test=TRAINING + "TestHazards::test_sums_wait_for_slow_copies",
    ),
    "compute waits for no copy": Mutation(
        file=EVENTS,
        text="        self._stream(queue).wait_event(event)\n",
        instead="        if queue is not Queue.COMPUTE:\n            self._stream(queue).wait_event(event)\n",
        test=SLOW_COPIES,
    ),
    "copies wait for nothing": Mutation(
        file=EVENTS,
        text="        self._stream(queue).wait_event(event)\n",
        instead="        if queue is Queue.COMPUTE:\n            self._stream(queue).wait_event(event)\n",
        test=TRAINING + "test_parity",
    ),
    "an event is recorded beside the copies": Mutation(
        file=EVENTS,
        text="        event.record(stream)\n        return event",
        instead="        event.record(self._idle if queue in self._streams else stream)\n        return event",
        test=SLOW_COPIES,
    ),
    "a read off plan does not wait for the copy that is in flight": Mutation(
        file=STREAMS,
        text="        if event is not None and not self._backend.query(event):\n"
        "            self._backend.wait_event(Queue.COMPUTE, event)\n",
        test=ORDER + "test_a_read_that_no_plan_has_waits_for_the_copy",
    ),
    "the queues go on beside work of the training thread": Mutation(
        file=STREAMS,
        text="            self._backend.synchronize(self._backend.record(Queue.COMPUTE))\n        super().resume()",
        instead="            pass\n        super().resume()",
        test=ORDER + "test_what_was_done_while_the_queues_stood_has_happened_when_they_go_on",
    ),
    "a copy of the training thread is not waited for": Mutation(
        file=EVENTS,
        text="            torch.cuda.current_stream(self.device).synchronize()\n",
        instead="            pass\n",
        test=ORDER + "test_a_copy_of_the_training_thread_has_happened_when_it_returns",
    ),
    "memory is free when it is given back": Mutation(
        file=GATE,
        text="            self._pending[key] = _Pending(payload, size, self._streams.record(queue))\n"
        "            self.pending_bytes += size\n",
        instead="            self._shrink(payload)\n",
        test=ORDER + "TestGate::test_a_payload_that_takes_its_own_memory_again",
    ),
    "who takes its own memory again does not wait": Mutation(
        file=GATE,
        text="                    self._streams.wait_event(queue, kept.event)\n",
        test=ORDER + "TestGate::test_a_payload_that_takes_its_own_memory_again",
    ),
    "compute goes on in memory that is not free yet": Mutation(
        file=GATE,
        text="        self._streams.wait_event(queue, oldest.event)\n",
        test=ORDER + "TestGate::test_a_tide_that_takes_the_room",
    ),
    "torch unmaps what was freed early and is still read": Mutation(
        file=GATE,
        text="                self._before_early(oldest.event)\n",
        test=ORDER + "TestGate::test_torch_that_unmaps_it",
    ),
    "who takes a block that was freed early does not wait": Mutation(
        file=GATE,
        text="                        for event in self._early:\n"
        "                            self._streams.wait_event(queue, event)\n",
        test=ORDER + "TestGate::test_a_copy_that_takes_what_compute_has_freed_early",
    ),
    "a thread that needs room does not sleep": Mutation(
        file=GATE,
        text="            self._streams.synchronize(oldest.event)\n            return\n",
        instead="            return\n",
        test=ORDER + "TestGate::test_a_copy_that_needs_the_room",
    ),
    "payloads are allocated under the stream of whoever takes them": Mutation(
        file=BLOCKS,
        text="torch.cuda.device(self.device), torch.cuda.stream(self._stream), self._routed(pooled)",
        instead="torch.cuda.device(self.device), self._routed(pooled)",
        test=ORDER + "test_payloads_are_apart_from_other_memory_of_the_thread_that_takes_them",
    ),
}


def is_seen(mutation: Mutation) -> bool:
    """Whether the test passes with the synchronisation, and fails without it."""
    return passes(mutation.test, None) and not passes(mutation.test, mutation)


@functools.cache
def passes(test: str, mutation: Mutation | None) -> bool:
    """Whether the test passes in a copy of the sources."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        if mutation is not None:
            mutation.apply(root)
        suite = root / "tests" / "cuda_emulation" / "suite.py"
        done = subprocess.run(
            [sys.executable, suite, test, "-q", "-x"], capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode not in (0, TESTS_FAILED):
            raise SystemExit(f"{test} was not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 0


def main(names: list[str]) -> int:
    unseen = 0
    for name in names or MUTATIONS:
        if name not in MUTATIONS:
            raise SystemExit(f"mutation {name!r} is not known; they are: {'; '.join(MUTATIONS)}")
        seen = is_seen(MUTATIONS[name])
        unseen += not seen
        print(f"{'seen    ' if seen else 'NOT SEEN'}  {name}: {MUTATIONS[name].test}", flush=True)
    return int(unseen > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
