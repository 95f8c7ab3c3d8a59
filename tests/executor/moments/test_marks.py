"""Moments of a loop, marked in what torch records."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from executor import capture_module, mark_moments
from pstar_sim.recorded.kinds import KINDS, kinds_of
from pstar_sim.recorded.snapshot import load_snapshot
from pstar_sim.recorded.tide import moment_events, with_tide


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def test_marks_have_the_names_of_the_moments() -> None:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    moments = capture_module(model, torch.zeros(8, 64)).moments
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with mark_moments(model, optimizer):
            model(torch.zeros(8, 64)).backward()
            optimizer.step()
        model(torch.zeros(8, 64))  # behind the context nothing is marked
    known = {m.name for m in moments}
    seen = [event.name for event in profile.events() if event.name in known]
    assert seen == [m.name for m in moments]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_snapshot_of_a_real_run_has_torchs_own_figures(tmp_path: Path) -> None:
    """The peak and the reserved bytes are those that torch counted, and the tide is known by moment."""
    record = torch.cuda.memory._record_memory_history
    everywhere = "global_record_annotations"
    more = {everywhere: True} if everywhere in inspect.signature(record).parameters else {}
    model = Two()
    job = capture_module(model, torch.zeros(4096, 64))
    path = tmp_path / "snapshot.pickle"
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    record(max_entries=10_000, stacks="python", **more)
    try:
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        with mark_moments(model, optimizer):
            for _ in range(3):
                model(torch.randn(4096, 64, device="cuda")).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        record(enabled=None)
    snapshot = load_snapshot(path)
    history = snapshot.device(0)
    assert int(history.allocated_bytes.max()) == torch.cuda.max_memory_allocated()
    assert int(history.reserved_bytes.max()) == torch.cuda.max_memory_reserved()
    kinds, lasts = kinds_of(history, job), history.blocks.died >= history.events
    lasts &= ~history.before  # what other tests left on the device is not of this run
    size = 4 * (64 * 128 + 128 + 128 * 64) + 512  # the last bias, of 256 bytes, takes 512
    for kind, wanted in (("param", size), ("states", 2 * size)):
        assert history.blocks.size_bytes[lasts & (kinds == KINDS.index(kind))].sum() == wanted
    assert moment_events(history, job)
    measured = with_tide(job, history, kinds)
    assert measured.peak_non_model_bytes == pytest.approx(job.peak_non_model_bytes, rel=0.1)
