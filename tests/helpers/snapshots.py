"""Memory snapshots as torch writes them, made by hand: what a run allocates and frees, in the fields of a version."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

VERSIONS = ("2.6", "2.13", "2.15")
TORCH = "/usr/lib/python3.11/site-packages/torch"
FORWARD = [(f"{TORCH}/nn/modules/linear.py", 125, "forward"), ("/home/me/train.py", 40, "step")]
STEP = [(f"{TORCH}/optim/adamw.py", 144, "_init_group"), ("/home/me/train.py", 44, "step")]
UPDATE = [(f"{TORCH}/optim/adamw.py", 400, "_multi_tensor_adamw"), ("/home/me/train.py", 44, "step")]
ZERO = [(f"{TORCH}/optim/optimizer.py", 1006, "zero_grad"), ("/home/me/train.py", 45, "step")]
BUILD = [(f"{TORCH}/nn/modules/module.py", 930, "_apply"), ("/home/me/train.py", 12, "main")]
AUTOGRAD: list[tuple[str, int, str]] = []
BASE = 0x7F0000000000


class Recorder:
    """Writes events of one device, at a clock of 10 us per event; segments are of 20 MiB, one block after the other."""

    def __init__(self, version: str = "2.13", *, segment: int = 20 << 20) -> None:
        self.version = version
        self.segment = segment
        self.time_us = 1_700_000_000_000_000
        self.trace: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, list[Any]]] = {}
        self.reserved = 0
        self.next = BASE
        self._shared: dict[int, list[dict[str, Any]]] = {}

    def frames(self, calls: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
        made = [{"name": name, "filename": file, "line": line} for file, line, name in calls]
        return self._shared.setdefault(id(calls), made)

    def event(self, action: str, size: int, address: int | None, calls: list[Any], **more: Any) -> None:
        self.time_us += 10
        row: dict[str, Any] = {"action": action, "size": size, "stream": 0, "time_us": self.time_us}
        if address is not None:
            row["addr"] = address
        if self.version != "2.6":
            row |= {"compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
        if self.version == "2.15":
            row["internal_metadata"] = {}
        self.trace.append({**row, "frames": self.frames(calls), **more})

    def alloc(self, size: int, calls: list[Any] = FORWARD, **more: Any) -> int:
        room = -(-size // 512) * 512
        if self.next + room > BASE + self.reserved:
            grown = max(self.segment, room)
            self.event("segment_alloc", grown, BASE + self.reserved, calls)
            self.reserved += grown
        address, self.next = self.next, self.next + room
        self.event("alloc", size, address, calls, **more)
        self.live[address] = (size, calls)
        return address

    def free(self, address: int, calls: list[Any] = FORWARD) -> None:
        size, _ = self.live.pop(address)
        self.event("free_requested", size, address, calls)
        self.event("free_completed", size, address, calls)

    def mark(self, name: str, stage: str) -> None:
        self.time_us += 1
        self.marks.append({"name": name, "stage": stage, "device": 0, "time_us": self.time_us})

    def root(self, *, last: int | None = None) -> dict[str, Any]:
        """last: entries that the ring keeps."""
        blocks = [
            {
                "address": address,
                "size": -(-size // 512) * 512,
                "requested_size": size,
                "state": "active_allocated",
                "frames": self.frames(calls),
            }
            for address, (size, calls) in sorted(self.live.items())
        ]
        active = sum(block["size"] for block in blocks)
        free = self.reserved - active
        blocks.append({"address": self.next, "size": free, "requested_size": 0, "state": "inactive", "frames": []})
        segment = {
            "device": 0, "address": BASE, "total_size": self.reserved, "allocated_size": active, "active_size": active,
            "requested_size": active, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip
        made = {
            "segments": [segment],
            "device_traces": [self.trace if last is None else self.trace[-last:]],
            "allocator_settings": {"expandable_segments": False, "garbage_collection_threshold": 0.0},
            "external_annotations": self.marks,
        }
        if self.version == "2.15":
            made |= {"host_segments": [{"total_size": 4096}, {"total_size": 8192}], "host_traces": []}
        return made

    def save(self, path: Path, *, last: int | None = None) -> Path:
        path.write_bytes(pickle.dumps(self.root(last=last)))
        return path


def train(recorder: Recorder, steps: int = 2, *, weights: tuple[int, ...] = (4096, 1024), batch: int = 8192) -> None:
    """A loop of AdamW as torch runs it: per step an input, an activation and a temporary per weight, gradients that
    `zero_grad` frees, and states from the first step on."""
    for size in weights:
        recorder.alloc(size, BUILD)
    stated = False
    for _ in range(steps):
        given = recorder.alloc(512, [("/home/me/train.py", 38, "step")])
        kept = [recorder.alloc(batch, FORWARD) for _ in weights]
        grads = []
        for size, activation in zip(reversed(weights), reversed(kept)):
            temporary = recorder.alloc(batch, AUTOGRAD)
            grads.append(recorder.alloc(size, AUTOGRAD))
            recorder.free(activation, AUTOGRAD)
            recorder.free(temporary, AUTOGRAD)
        recorder.mark("Optimizer.step#AdamW.step", "START")
        if not stated:
            for size in weights:
                recorder.alloc(size, STEP)
                recorder.alloc(size, STEP)
            stated = True
        recorder.free(recorder.alloc(weights[0], UPDATE), UPDATE)
        recorder.mark("Optimizer.step#AdamW.step", "END")
        for grad in grads:
            recorder.free(grad, ZERO)
        recorder.free(given)
