"""Snapshots of several versions of torch, with figures worked out by hand."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from snapshots import AUTOGRAD, BASE, BUILD, FORWARD, STEP, VERSIONS, Recorder, train
from torch.cuda._memory_viz import _profile_to_snapshot

from pstar_sim.errors import TraceError
from pstar_sim.recorded.held import Held, held_of_snapshot, in_like_kinds
from pstar_sim.recorded.kinds import KINDS, kinds_of
from pstar_sim.recorded.snapshot import load_snapshot
from pstar_sim.recorded.tide import last_step, tide_of

MIB = 1 << 20


@pytest.mark.parametrize("version", VERSIONS)
def test_a_loop_by_kind(tmp_path: Path, version: str) -> None:
    recorder = Recorder(version)
    train(recorder, 3)
    snapshot = load_snapshot(recorder.save(tmp_path / "s.pickle"))
    history = snapshot.device()
    assert len(history.steps()) == 2  # between the ends of three updates
    held = held_of_snapshot(snapshot)
    # Parameters of 4,096 and 1,024 bytes, twice as much of states. The peak is where the first gradient has come, of
    # the second weight: two activations and a temporary of 8,192 bytes, the input of 512.
    assert held.kinds == {"states": 10240, "param": 5120, "grad": 1024, "non-model": 3 * 8192 + 512}
    assert held.bytes == int(history.allocated_bytes[last_step(history)[0] : last_step(history)[1] + 1].max())
    assert held.reserved_bytes == 20 * MIB
    assert snapshot.pinned_bytes == (12288 if version == "2.15" else None)
    assert not held.notes


def test_bytes_are_those_of_the_allocator(tmp_path: Path) -> None:
    """Three blocks of 1,000, 512 and 600 bytes take 1,024 + 512 + 1,024; the second is freed."""
    recorder = Recorder(segment=2 * MIB)
    recorder.alloc(1000)
    second = recorder.alloc(512)
    recorder.alloc(600)
    recorder.free(second)
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    assert history.allocated_bytes.tolist() == [0, 0, 1024, 1536, 2560, 2560, 2048]
    assert history.reserved_bytes.tolist() == [0] + [2 * MIB] * 6
    assert history.largest_free_bytes == 2 * MIB - 2048
    assert history.lost_words() is None


def test_a_ring_that_lost_its_start_is_said(tmp_path: Path) -> None:
    recorder = Recorder()
    first = recorder.alloc(4096, BUILD)
    for _ in range(400):
        recorder.free(recorder.alloc(1024))
    recorder.free(first)
    path = recorder.save(tmp_path / "s.pickle", last=1000)
    history = load_snapshot(path).device()
    # 1,000 = 2 (the end of a block of 1,024 bytes) + 332 x 3 + 2 (the end of `first`).
    assert history.allocated_bytes[0] == 4096 + 1024
    assert history.reserved_bytes[0] == 20 * MIB
    words = history.lost_words()
    assert words is not None
    assert "the allocation of 2 blocks of 5.12 kB is missing: its ring of 1,000 entries was full" in words


def test_a_recording_that_began_late_is_said(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.alloc(4096, BUILD)
    recorder.trace.clear()
    recorder.free(recorder.alloc(1024))
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    assert "the recording began after them" in (history.lost_words() or "")
    assert history.allocated_bytes.tolist() == [4096, 5120, 5120, 4096]


def test_a_block_lives_until_its_free_is_complete(tmp_path: Path) -> None:
    recorder = Recorder()
    address = recorder.alloc(1024)
    recorder.event("free_requested", 1024, address, FORWARD)
    recorder.alloc(512)
    recorder.event("free_completed", 1024, address, FORWARD)
    recorder.live.pop(address)
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    assert history.allocated_bytes.tolist() == [0, 0, 1024, 1024, 1536, 512]


def test_the_dump_of_an_out_of_memory_error(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.alloc(16 * MIB)
    recorder.event("oom", 64 * MIB, None, FORWARD, device_free=3 * MIB)
    held = held_of_snapshot(load_snapshot(recorder.save(tmp_path / "s.pickle")))
    assert held.facts["out_of_memory"] == [
        {
            "asked_bytes": 64 * MIB,
            "device_free_bytes": 3 * MIB,
            "allocated_bytes": 16 * MIB,
            "reserved_bytes": 20 * MIB,
        }
    ]


def test_without_events_the_segments_are_what_is_known(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.alloc(4096, BUILD)
    recorder.trace.clear()
    held = held_of_snapshot(load_snapshot(recorder.save(tmp_path / "s.pickle")))
    assert held.kinds == {"param": 4096}  # its calls stand at its block


def test_a_workspace_is_no_gradient(tmp_path: Path) -> None:
    """What the backward leaves for good, while gradients come and go, is a buffer."""
    recorder = Recorder()
    train(recorder, 1)
    recorder.alloc(2 * MIB, AUTOGRAD)
    train(recorder, 2, weights=(2048,))
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    kinds = kinds_of(history)
    assert [KINDS[k] for k in kinds[history.blocks.size_bytes == 2 * MIB]] == ["buffer"]


def test_a_workspace_of_cublas_is_a_buffer(tmp_path: Path) -> None:
    """Also where the first product runs while a module is built."""
    recorder = Recorder()
    recorder.alloc(8_519_680, BUILD)
    recorder.alloc(8_519_680, AUTOGRAD)
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    assert [KINDS[k] for k in kinds_of(history)] == ["buffer", "buffer"]


def test_chunks_of_a_plan_are_beside_what_they_hold(tmp_path: Path) -> None:
    recorder = Recorder()
    arena = ("/usr/lib/executor/devices/cuda_blocks.py", 332, "<lambda>")
    recorder.alloc(8_519_680, [arena, *STEP])
    recorder.alloc(2 * MIB, [arena, *FORWARD])
    recorder.alloc(MIB, STEP)
    held = held_of_snapshot(load_snapshot(recorder.save(tmp_path / "s.pickle")))
    assert held.kinds == {"states": MIB, "chunks": 8_519_680 + 2 * MIB}
    planned = Held(name="plan", kinds={"states": 9 * MIB, "param": 2 * MIB, "non-model": MIB}, at="")
    first, second = in_like_kinds(planned, held)
    assert first.kinds == {"chunks": 11 * MIB, "non-model": MIB}
    assert second.kinds == {"chunks": 8_519_680 + 3 * MIB} and {site.kind for site in second.sites} == {"chunks"}
    assert in_like_kinds(planned, planned) == (planned, planned)


@pytest.mark.parametrize(("tag", "kind"), [("PARAMETER", "param"), ("OPTIMIZER_STATE", "states"), ("act", "non-model")])
def test_a_category_of_the_recorder_counts_first(tmp_path: Path, tag: str, kind: str) -> None:
    recorder = Recorder()
    recorder.alloc(4096, AUTOGRAD, user_metadata={"cat": tag})
    recorder.alloc(4096, AUTOGRAD, category=tag)
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    assert [KINDS[k] for k in kinds_of(history)] == [kind, kind]


def test_the_tide_of_a_step_by_time(tmp_path: Path) -> None:
    recorder = Recorder()
    train(recorder, 2, weights=(4096,))
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    timeline = tide_of(history, kinds_of(history), label="mine")
    tide = [s.bytes for s in timeline.samples if s.category == "non-model"]
    # From the end of one update to that of the next: the old input goes; the input, an activation and a temporary come,
    # and the last two go; the update's own temporary comes and goes.
    assert tide == [512, 0, 512, 8704, 16896, 8704, 512, 4608, 512]
    assert timeline.peak_bytes == {"gpu": int(np.max(history.allocated_bytes[slice(*last_step(history))]))}


def test_a_profile_that_torch_turned_into_a_snapshot(tmp_path: Path) -> None:
    """Its events have categories and no times; calls have their file in their name."""
    model = torch.nn.Linear(64, 128)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True, with_stack=True
    ) as recorded:
        model(torch.ones(32, 64)).sum().backward()
    path = tmp_path / "profile.pickle"
    path.write_bytes(pickle.dumps(_profile_to_snapshot(recorded)))
    history = load_snapshot(path).device()
    kinds = kinds_of(history)
    weight = history.blocks.size_bytes == 4 * 64 * 128
    assert "grad" in {KINDS[kind] for kind in kinds[weight]}
    assert tide_of(history, kinds).iteration_s > 0
    assert not any("none" in str(frame) for stack in history.stacks for frame in stack)


def test_without_events_there_is_no_tide(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.alloc(4096, BUILD)
    recorder.trace.clear()
    history = load_snapshot(recorder.save(tmp_path / "s.pickle")).device()
    with pytest.raises(TraceError, match="device 0 has no events, so there is no tide"):
        tide_of(history, kinds_of(history))


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ([], "it holds no 'segments'"),
        ({"segments": 3}, "segments is no list"),
        ({"segments": [], "device_traces": []}, "nothing was allocated"),
        ({"segments": [{"device": 0}]}, "a segment has total_size = None"),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "addr": BASE, "size": -1}]]},
            "an event has size = -1",
        ),
        ({"segments": [], "device_traces": [[3]]}, "an event is no dict"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, root: object, why: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(root))
    with pytest.raises(TraceError, match=why):
        load_snapshot(path)
