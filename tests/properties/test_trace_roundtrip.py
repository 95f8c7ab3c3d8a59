"""Whatever a trace file's bytes are, reading it gives the workload that was saved or a TraceError."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path

from drawn import workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar_sim.errors import TraceError
from pstar_sim.testing import random_workload
from pstar_sim.workload.trace import load_trace, load_variants, save_trace
from pstar_sim.workload.workload import Workload, check_workload


def same(a: Workload, b: Workload) -> bool:
    return all(getattr(a, f.name) == getattr(b, f.name) for f in dataclasses.fields(Workload))


def test_any_workload_comes_back_exactly(whole: bool) -> None:
    @settings(max_examples=60 if whole else 15)
    @given(w=workloads(), duration=st.none() | st.floats(0, 1e6), notes=st.text(max_size=20))
    def holds(w: Workload, duration: float | None, notes: str) -> None:
        moments = tuple(dataclasses.replace(m, duration_s=duration) for m in w.moments)
        machine = None if duration is None else "virtual"
        w = dataclasses.replace(w, moments=moments, notes=notes, torch_version="2.13.0", recorded_on=machine)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "w.parquet"
            try:
                save_trace(w, path)
            except TraceError:  # text that is not Unicode (lone surrogates) has no form in the file
                assert not notes.isascii() and not path.exists()
                return
            assert same(load_trace(path), w)

    holds()


@given(drawn=st.lists(workloads(layers=1) | workloads(layers=2), min_size=1, max_size=4))
@settings(max_examples=10)
def test_any_set_of_variants_comes_back_in_order(drawn: list[Workload]) -> None:
    variants = [dataclasses.replace(w, batch=n + 1) for n, w in enumerate(drawn)]
    with tempfile.TemporaryDirectory() as folder:
        save_trace(variants, Path(folder) / "w.parquet")
        back = load_variants(Path(folder) / "w.parquet")
    assert len(back) == len(variants)
    assert all(same(a, b) for a, b in zip(back, variants, strict=True))


def test_damage_is_a_trace_error_or_harmless() -> None:
    rng = random.Random(20)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.parquet"
        w = random_workload(3, layers=3)
        save_trace(w, path)
        data = path.read_bytes()
        refused = 0
        for trial in range(200):
            damaged = bytearray(data)
            if trial % 4 == 0:
                damaged = damaged[: rng.randrange(len(data))]
            elif trial % 4 == 1:
                start = rng.randrange(len(data))
                damaged[start : start + rng.randint(1, 40)] = b"\0" * rng.randint(0, 40)
            else:
                damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            try:
                assert same(load_trace(path), w)
            except TraceError as error:
                assert "w.parquet" in str(error)
                refused += 1
        assert refused > 125  # most damage is noticed; the rest touched nothing that is read


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_the_same_seed_gives_the_same_workload(seed: int) -> None:
    assert same(random_workload(seed), random_workload(random.Random(seed)))


def test_random_workloads_are_whole(whole: bool) -> None:
    @settings(max_examples=200 if whole else 40)
    @given(workloads())
    def holds(w: Workload) -> None:
        check_workload(w)
        assert w.trainable_params > 0
        assert w.moments[-1].end_bytes == w.moments[0].start_bytes  # the tide comes back to where it began
        assert all(a.end_bytes == b.start_bytes for a, b in zip(w.moments[:-2], w.moments[1:-1]))

    holds()
