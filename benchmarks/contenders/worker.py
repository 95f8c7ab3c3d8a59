"""A contender in a process of its own: builds it, then answers each JSON line with a JSON line until its input ends.

{"do": "step"} trains on the next global batch: {"loss", "time_s"}. {"do": "settle"} begins counting peaks anew. {"do":
"memory"} gives the memory held now and at the peak. Any other request is an error. Failures are answered too, as
{"failed": reason}. Standard output is for the answers alone: the output of libraries goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from contenders.memory import forget_peak, host_bytes, less, peak_host_bytes
from contenders.task import CONTENDERS, Task, settings_of

__all__ = ["Built", "main"]


@dataclass(kw_only=True)
class Built:
    """A model ready to train.

    batches: endless global batches, the same for every contender.
    """

    module: Any
    batches: Iterator[Any]
    task: Task

    def micro_batches(self, batch: Any) -> list[Any]:
        """Returns the global batch as micro-batches, on the task's device."""
        from executor.models import map_batch

        size, device = self.task.micro_batch, self.task.device

        def part(start: int) -> Any:
            return map_batch(batch, lambda t: t[start : start + size].to(device))

        return [part(start) for start in range(0, self.task.global_batch, size)]


def build_model(task: Task) -> Built:
    """Returns the task's model with weights drawn from its seed, on the host, in the task's dtype. On a card, where
    models are large and time is short, `draw_weights` makes the weights."""
    from contenders.drawn import draw_weights
    from executor.devices.on_meta import parameters_on_meta
    from executor.models import build
    from executor.running.data import batches_like, open_data

    with parameters_on_meta() if task.device == "cuda" else contextlib.nullcontext():
        built = build(
            task.model,
            batch=task.global_batch,
            sequence=task.sequence,
            dtype=task.dtype,
            checkpointing=task.checkpointing,
            seed=task.seed,
        )
    draw_weights(built.module, seed=task.seed, shared=False)
    batches = batches_like(built.example_batch, open_data(None), vocabulary=built.vocabulary, seed=task.seed)
    return Built(module=built.module, batches=batches, task=task)


def warm_imports(task: Task) -> None:
    """Import everything that every contender imports sooner or later, before the baseline of host memory is taken: the
    model's code, the corpus, the compiler that torch's optimizers import."""
    import torch
    import torch._dynamo

    from executor.models import build
    from executor.running.data import open_data

    build(task.model, batch=1, sequence=8, dtype=task.dtype, device="meta")
    open_data(None)
    weight = torch.ones(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()
    torch.optim.AdamW([weight], fused=True).step()


class Worker:
    def __init__(self, task: Task) -> None:
        if hasattr(os, "sched_setaffinity"):  # before torch makes its threads, so that they stay on these cores
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task.threads])
        import torch

        torch.set_num_threads(task.threads)
        self.task, self.torch = task, torch
        if task.device == "cuda" and task.gpu_cap_bytes is not None and CONTENDERS[task.contender][0] != "ours":
            # Ours counts the driver's context in its plan's budget; for the others the context comes on top of the cap.
            total_bytes = torch.cuda.get_device_properties(0).total_memory
            if task.gpu_cap_bytes > total_bytes:
                raise ValueError(f"the cap of {task.gpu_cap_bytes} bytes is more than the card's {total_bytes}")
            torch.cuda.set_per_process_memory_fraction(task.gpu_cap_bytes / total_bytes)
        module = importlib.import_module(f"contenders.{CONTENDERS[task.contender][0]}")
        module.imports(task)
        warm_imports(task)
        self.baseline_bytes = host_bytes()
        self.forgotten = forget_peak()
        self.built = build_model(task)
        self.contender = module.Contender(self.built, settings_of(task.contender))

    def step(self) -> dict[str, Any]:
        batch = next(self.built.batches)
        self._synchronize()
        start_s = time.perf_counter()
        loss = self.contender.step(self.built.micro_batches(batch))
        self._synchronize()
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss}")
        return {"loss": loss, "time_s": time.perf_counter() - start_s}

    def settle(self) -> dict[str, Any]:
        """Begin counting peaks anew: earlier peaks are the start's, later ones the steady state's."""
        start_peak_bytes = peak_host_bytes()
        if self.task.device == "cuda":
            self.torch.cuda.reset_peak_memory_stats()
        self.forgotten = forget_peak()
        return {"start_peak_bytes": less(start_peak_bytes, self.baseline_bytes), "forgotten": self.forgotten}

    def memory(self) -> dict[str, Any]:
        cuda = self.torch.cuda
        on_card = self.task.device == "cuda"
        return {
            "baseline_bytes": self.baseline_bytes,
            "host_peak_bytes": less(peak_host_bytes(), self.baseline_bytes) if self.forgotten else None,
            "gpu_allocated_bytes": cuda.max_memory_allocated() if on_card else None,
            "gpu_reserved_bytes": cuda.max_memory_reserved() if on_card else None,
            "params": self.contender.params,
            **self.contender.figures(),
        }

    def _synchronize(self) -> None:
        if self.task.device == "cuda":
            self.torch.cuda.synchronize()


def main(requests: TextIO, answers: TextIO) -> None:
    worker: Worker | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["do"] == "build":
                worker = Worker(Task(**request["task"]))
                answer: dict[str, Any] = {"built": True}
            elif worker is not None and request["do"] in ("step", "settle", "memory"):
                answer = getattr(worker, request["do"])()
            else:
                raise ValueError(f"{request['do']!r} is not known, or the model is not built")
        except (Exception, KeyboardInterrupt) as error:
            traceback.print_exc()
            answer = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "failed" in answer:
            break
    if worker is not None and hasattr(worker, "contender"):
        worker.contender.close()


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(sys.stdin, pipe)
