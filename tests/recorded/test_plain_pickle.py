"""A pickle of plain values is read; any other bytes are refused, with nothing run, no hang and no flood of memory."""

from __future__ import annotations

import os
import pickle
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from snapshots import Recorder, train

from pstar_sim.errors import TraceError
from pstar_sim.recorded.plain_pickle import PickleFault, read_plain
from pstar_sim.recorded.snapshot import load_snapshot

PLAIN: dict[str, Any] = {
    "whole": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**40), 2**63, 2**64 - 1],
    "others": [None, True, False, 0.5, "", "ä€😀", "long " * 1000],
    "nested": {"a": {"b": [[], {}, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]}},
    "many": [{"n": n, "pool": (0, n)} for n in range(3000)],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_what_pickle_reads(protocol: int) -> None:
    assert read_plain(pickle.dumps(PLAIN, protocol)) == PLAIN


def test_one_object_in_many_places_stays_one() -> None:
    shared = ["frame"]
    first, second = read_plain(pickle.dumps([shared, shared]))
    assert first is second


class Harm:
    """Makes a folder where a reader runs what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_is_named_and_not_run(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "harm.pickle"
    path.write_bytes(pickle.dumps({"segments": Harm(tmp_path / "made")}, protocol))
    with pytest.raises(TraceError, match=r"harm\.pickle: .* asks for a class or a call \(instruction (STACK_)?GLOBAL"):
        load_snapshot(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "does not begin"),
        (b"\x80", "does not begin"),
        (b"(dp0\n.", "does not begin"),
        (b"\x80\x09.", "does not begin"),
        (b"\x80\x04", "truncated"),
        (b"\x80\x04.", "truncated"),
        (b"\x80\x04]h\x07.", "damaged"),
        (b"\x80\x04K\x01(K\x02e.", "a list was to be filled, and there is a int"),
        (b"\x80\x04}(K\x01K\x02u.", "a dict whose keys are not texts"),
        (b"\x80\x04}(\x8c\x01au.", "a dict whose keys are not texts"),
        (b"\x80\x04\x8f.", "0x8f"),  # an empty set
        (b"\x80\x04\x8a\xff" + b"\xff" * 300 + b".", "a number of 255 bytes"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.", "truncated"),  # a text of 2**64 bytes
        (b"\x80\x04\x96" + b"\xff" * 8 + b"abc.", "0x96"),  # a bytearray of 2**64 bytes
        (b"\x80\x04cos\nsystem\n(\x8c\x02lstR.", "instruction GLOBAL"),
        (b"\x80\x04\x82\x01.", "instruction EXT1"),
        (b"\x80\x04\x8c\x01aQ.", "instruction BINPERSID"),
        (b"\x80\x04" + b"}" * 5000 + b".", "more lists and dicts than a file of its size can"),
    ],
)
def test_other_bytes_are_refused_in_words(data: bytes, why: str) -> None:
    with pytest.raises(PickleFault, match=why.replace("(", r"\(")):
        read_plain(data)


def test_a_memo_of_two_to_the_32_costs_nothing() -> None:
    """Python's own reader makes a table of 32 GiB of it."""
    tracemalloc.start()
    try:
        assert read_plain(b"\x80\x04]r\xff\xff\xff\xff.") == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_lists_that_repeat_are_not_walked_for_ever(tmp_path: Path) -> None:
    """3,000 times the same trace of 3,000 events would be nine million."""
    event = {"action": "alloc", "addr": 1, "size": 1, "time_us": 0}
    root = {"segments": [], "device_traces": [[event] * 3000] * 3000}
    path = tmp_path / "bomb.pickle"
    path.write_bytes(pickle.dumps(root))
    start = time.process_time()
    with pytest.raises(TraceError, match="repeat each other"):
        load_snapshot(path)
    assert time.process_time() - start < 1


def test_mutants_are_read_or_refused_in_one_line(tmp_path: Path, whole: bool) -> None:
    """A thousand with --whole."""
    mutants = 1000 if whole else 250
    recorder = Recorder("2.15")
    train(recorder)
    whole = pickle.dumps(recorder.root())
    draw = random.Random(44)
    path = tmp_path / "mutant.pickle"
    read = 0
    tracemalloc.start()
    start = time.process_time()
    for _ in range(mutants):
        path.write_bytes(_mutant(whole, draw))
        try:
            load_snapshot(path)
            read += 1
        except TraceError as error:
            assert "\n" not in str(error), error
            assert str(error).startswith(f"{path}: "), error
    assert tracemalloc.get_traced_memory()[1] < 50 * len(whole)
    tracemalloc.stop()
    assert time.process_time() - start < 60
    assert 10 < read < mutants - 10


def _mutant(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, a part cut out, doubled or put elsewhere, or the end lost."""
    made = bytearray(data)
    low, high = sorted(draw.randrange(len(made)) for _ in range(2))
    how = draw.randrange(6)
    if how == 0:
        return bytes(made[:low])
    if how == 1:
        del made[low : min(high, low + 50)]
    elif how == 2:
        made[low:low] = made[low : low + 50]
    elif how == 3:
        made[low:low] = draw.choice([b"cos\nsystem\n", b"R", b"\x93", b"(", b"2", b"\x82\x01", b"\x8d" + b"\xff" * 8])
    for _ in range(draw.choice([0, 1, 1, 2, 8])):
        made[draw.randrange(len(made))] = draw.randrange(256)
    return bytes(made)
