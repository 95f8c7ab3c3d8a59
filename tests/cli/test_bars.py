"""Progress bars: on a terminal only, and gone at the end."""

from __future__ import annotations

import io
import sys

import pytest

import pstar_sim as ps
from pstar_sim.cli.bars import bar
from pstar_sim.planner.limits import max_model
from pstar_sim.planner.sensitivity import sensitivity
from pstar_sim.planner.variants import candidates, choose


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("quiet", "shown"), [(False, True), (True, False)])
def test_a_bar_is_shown_on_a_terminal_unless_quiet(quiet: bool, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = _Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with bar("starting", quiet=quiet) as on_part:
        on_part("GPU memory", 1, 4)
    assert ("GPU memory" in out.getvalue()) == shown


def test_a_file_gets_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("starting", quiet=False) as on_part:
        on_part("GPU memory", 1, 4)
    assert capsys.readouterr().err == ""


def test_long_questions_tell_how_far_they_are() -> None:
    told: list[tuple[str, int, int]] = []

    def tell(what: str, behind: int, count: int) -> None:
        told.append((what, behind, count))

    m = ps.machine("v100-16", gpu_memory="4GB", host_memory="12GB")
    w = ps.preset("gpt2", batch=2, seq=64, dtype="fp16")
    max_model(m, batch=2, seq=64, like="gpt2", policies=["zero_offload", "tide"], catalog=False, on_policy=tell)
    assert told == [("zero_offload", 0, 2), ("tide", 1, 2)]
    told.clear()
    sensitivity(w, m, policies=["tide"], parts=["link", "GPU speed"], largest=False, on_part=tell)
    assert told == [("as it is", 0, 3), ("link", 1, 3), ("GPU speed", 2, 3)]
    told.clear()
    ways = candidates([w], 4)
    choose(ways, m, ps.Settings(), policy="tide", on_way=tell)
    assert told[0] == ("planning by tide", 0, len(ways))
    assert [behind for _, behind, _ in told] == sorted(behind for _, behind, _ in told)
