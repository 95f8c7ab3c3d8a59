"""Tables and prose on terminals of any width: every figure of the widest is whole in all."""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.planner.ablate import ablate
from pstar_sim.planner.cheapest import cheapest
from pstar_sim.planner.explain import explain
from pstar_sim.planner.fits import fits
from pstar_sim.planner.limits import max_batch, max_model
from pstar_sim.planner.sensitivity import sensitivity
from pstar_sim.report.ablation import ablation_text
from pstar_sim.report.capacity_tables import cheapest_text, fits_text, limits_text, sensitivity_text
from pstar_sim.report.run_figures import figures, figures_text, losses_text
from pstar_sim.report.tables import comparison_text, format_change, format_percent, refusal_text
from pstar_sim.report.validation import validation_text
from pstar_sim.terminal import narrow_encoding, table_text, wrap
from pstar_sim.validation.results import validate

WIDTHS = (40, 47, 60, 80, 100, 120, 200)
WIDE = 2000
FIGURE = re.compile(r"\d[\d,.]*\d|\d")
WITH_UNIT = re.compile(r"\d (?:[kMGT]?B|[mu]?s|%)(?![A-Za-z])")
NAME = re.compile(r"--[a-z][\w-]*|\b[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*[-_][a-z0-9]+(?:[:,=][\w.=,]+)?")
"""A flag, or the name of a policy, a machine or a model."""
Text = Callable[[int], str]


@functools.cache
def answers() -> Mapping[str, Text]:
    """What each command that answers with a table prints for a small job, by width."""
    m, roomy = (ps.machine("v100-32", gpu_memory=size) for size in ("2.5GB", "12GB"))
    w = ps.preset("gpt2-medium", batch=4, seq=256, dtype="fp16")
    policies = ["zero_offload", "static_partition", "tide", "patrickstar"]
    compared = ps.compare(w, m, policies=[*policies, "tide:capacity=peak,adam=fifo"])
    short = ps.machine("v100-32", gpu_memory="1.5GB", host_memory="10GB")
    refused = ps.compare(w, short, policies=policies, near=False)
    best = compared.best()
    ablated = ablate(w, m, policy="tide")
    fit = fits(w, m, policies=policies)
    little = ps.machine("v100-32", gpu_memory="2.5GB", host_memory="24GB")  # has room for few models of the catalog
    deepest = max_model(little, batch=4, seq=256, like="gpt2-medium", policies=["zero_offload"])
    largest = max_batch(m, lambda b: ps.preset("gpt2", batch=b, seq=256, dtype="fp16"), policies=["zero_offload"])
    priced = [load_machine(name, overrides=["price=3.25"]) for name in ("v100-16", "a100-40")]
    offers = cheapest("gpt2", tokens=1e9, batch=8, seq=256, machines=priced, policies=["all_on_gpu"])
    parts = sensitivity(w, roomy, policies=["all_on_gpu"], parts=["GPU memory", "GPU speed"])
    checked = validate(system="ZeRO-Offload (ZeRO-2)")
    losses = {"plain PyTorch": [10.501411, 7.8], "optimal": [10.501412, 7.8]}
    measured = figures({"iteration_s": 1.6, "h2d_bytes": 349.2e6}, {"iteration_s": 2.05, "h2d_bytes": 349.2e6})
    return {
        "compare": lambda width: comparison_text(compared, width=width),
        "plan, refused": lambda width: refusal_text(refused, width=width),
        "explain": lambda width: explain(best.plan, best.timeline, width=width),
        "ablate": lambda width: ablation_text(ablated, width=width),
        "fits": lambda width: fits_text(fit, width=width),
        "max-model": lambda width: limits_text(deepest, width=width),
        "max-batch": lambda width: limits_text(largest, width=width),
        "cheapest": lambda width: cheapest_text(offers, width=width),
        "sensitivity": lambda width: sensitivity_text(parts, width=width),
        "validate": lambda width: validation_text(checked, width=width, every_row=True),
        "run, losses": lambda width: losses_text(losses, width=width),
        "run, figures": lambda width: figures_text(measured, width=width),
    }


COMMANDS = (
    "compare", "plan, refused", "explain", "ablate", "fits", "max-model", "max-batch", "cheapest", "sensitivity",
    "validate", "run, losses", "run, figures",
)  # fmt: skip


def assert_whole(wide: str, narrow: str, width: int) -> None:
    """Every figure of the wide text is in the narrow one, with its unit, and every name that may be copied; no line is
    too long for the terminal unless it is one word, or one beside the name of its row."""
    assert "…" not in narrow
    for pattern in (FIGURE, WITH_UNIT, NAME):
        missing = Counter(pattern.findall(wide)) - Counter(pattern.findall(narrow))
        assert not missing, (width, missing)
    words = (re.split(r"  +|(?<=\S) (?=\D)", line.strip()) for line in narrow.splitlines() if len(line) > width)
    long = [line for line in words if len(line) > 2]
    assert not long, (width, long)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_figure_is_cut_at_any_width(command: str) -> None:
    text = answers()[command]
    for width in WIDTHS:
        assert_whole(text(WIDE), text(width), width)


@pytest.mark.parametrize("command", ["compare", "explain", "fits", "max-model", "max-batch", "cheapest", "sensitivity"])
def test_a_heading_names_the_kernels(command: str) -> None:
    assert "eager kernels" in answers()[command](WIDE)


def test_a_heading_names_adapters_base_and_optimizer() -> None:
    job: dict[str, Any] = {"lora": "r=4", "base": "int8", "optimizer": "sgd", "dtype": "fp16"}
    w, m = ps.preset("gpt2", batch=1, seq=64, **job), ps.machine("v100-16", gpu_memory="1.2GB")
    asked: dict[str, Any] = {"policies": ["all_on_gpu"]}
    from_flags = (
        limits_text(max_model(m, batch=1, seq=64, like="gpt2", catalog=False, **asked, **job), width=WIDE),
        cheapest_text(cheapest("gpt2", tokens=1e6, batch=1, seq=64, machines=[m], **asked, **job), width=WIDE),
    )
    assert all("lora r=4, base int8, optimizer sgd" in text for text in from_flags)
    written = (
        limits_text(max_batch(m, lambda b: ps.preset("gpt2", batch=b, seq=64, **job), **asked), width=WIDE),
        sensitivity_text(sensitivity(w, m, parts=["GPU speed"], **asked), width=WIDE),
    )
    assert all(
        "LoRA r=4 on c_attn, 0.08 B of 0.12 B parameters in int8" in text and ", sgd" in text for text in written
    )


def test_all_commands_are_looked_at() -> None:
    assert set(COMMANDS) == set(answers())


@pytest.mark.parametrize("command", ["machines", "models", "policies"])
def test_listings_honour_columns_when_piped(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(columns: str | None) -> str:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        assert main([command]) == 0
        return capsys.readouterr().out

    wide, usual = printed(str(WIDE)), printed(None)
    assert_whole(wide, usual, 120)
    for width in WIDTHS:
        assert_whole(wide, printed(str(width)), width)
    assert printed("120") == usual == printed("nonsense") == printed("0")


@pytest.mark.parametrize(
    "env", [{"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}], ids=lambda env: next(iter(env))
)
def test_colours_and_encodings_leave_the_figures(env: dict[str, str]) -> None:
    """No escape codes in a pipe; where the locale has no lines to draw with, there are others."""
    said, usual = piped({**env, "COLUMNS": "60"}), piped({"COLUMNS": "60"})
    assert said == (usual.replace("─", "-") if "PYTHONIOENCODING" in env else usual)


def piped(env: dict[str, str]) -> str:
    """What `pstar machines` prints into a pipe."""
    own = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    env = {**{k: v for k, v in os.environ.items() if k not in own}, "PYTHONIOENCODING": "utf-8", **env}
    command = [sys.executable, "-m", "pstar_sim", "machines"]
    return subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=120, check=True).stdout


def test_a_terminal_has_the_width_it_has() -> None:
    """On a real terminal of 60 columns, with COLUMNS unset."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    with subprocess.Popen([sys.executable, "-m", "pstar_sim", "machines"], stdout=theirs, env=env) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:  # how Linux says that the other end is closed
            pass
        assert process.wait(timeout=120) == 0
    os.close(ours)
    text = said.decode().replace("\r\n", "\n")
    assert 50 < max(len(line) for line in text.splitlines()) <= 60
    assert_whole(piped({"COLUMNS": str(WIDE)}), text, 60)


def test_what_gives_way_first_by_hand() -> None:
    """Heads fold, then the longest text; what has no room then stands below, under the same names, which are whole."""
    heads = ("policy", "GPU peak", "what would do")
    rows = [("static_partition", "12.5 GB", "more memory, or a GPU"), ("tide", "8 GB", "")]

    def at(width: int) -> list[str]:
        return table_text(heads, rows, width=width).splitlines()

    assert at(49) == [
        "policy            GPU peak  what would do",
        "─" * 49,
        "static_partition   12.5 GB  more memory, or a GPU",
        "tide                  8 GB",
    ]
    assert at(48)[:2] == ["                      GPU", "policy               peak  what would do"]
    assert at(40)[3:] == [
        "static_partition  12.5 GB  more memory,",
        "                           or a GPU",
        "tide                 8 GB",
    ]
    assert at(35)[3:6] == [
        "static_partition  12.5 GB  more",
        "                           memory,",
        "                           or a GPU",
    ]
    assert at(26) == [
        "policy            GPU peak",
        "──────────────────────────",
        "static_partition   12.5 GB",
        "tide                  8 GB",
        "",
        "more of the same rows (all",
        "  side by side on a",
        "  terminal of 34 columns):",
        "",
        "                  what",
        "policy            would do",
        "──────────────────────────",
        "static_partition  more",
        "                  memory,",
        "                  or a GPU",
        "tide",
    ]


def test_a_second_table_names_what_tells_its_rows_apart() -> None:
    heads, rows = (
        ("machine", "nodes", "iteration", "tokens/s"),
        [("a100", "1", "2 s", "512"), ("a100", "2", "1 s", "1024")],
    )
    lines = table_text(heads, rows, width=32).splitlines()
    assert lines[-4:] == ["machine  nodes  tokens/s", "─" * 24, "a100         1       512", "a100         2      1024"]
    # Names that would take more than half of the width are not repeated.
    assert table_text(heads, rows, width=26).splitlines()[-4] == "machine  tokens/s"


def test_figures_and_units_are_not_parted() -> None:
    assert wrap("it needs 12.5 GB and takes 3.2 ms, ± 7 % at most", 11) == [
        "it needs", "  12.5 GB", "  and takes", "  3.2 ms,", "  ± 7 % at", "  most",
    ]  # fmt: skip
    # A figure or a name wider than the terminal stays whole.
    assert "1234567890.125" in table_text(("a", "b"), [("gpt-neox-20b", "1234567890.125")], width=12)
    assert table_text(("a",), [("gpt-neox-20b",)], width=8).splitlines()[2:] == ["gpt-neox-20b"]


def test_no_figure_of_a_live_progress_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    from types import SimpleNamespace

    from pstar_sim.cli import progress as module

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    said = ["loss of the first rank 10.5014, 12,345 tokens/s, 3 off plan", "GPU 400.25 kB at most of 450.75 kB"]
    monkeypatch.setattr(module, "words", lambda *_: said)
    for width in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        screen = Terminal()
        plan = SimpleNamespace(policy="static_partition")
        with module.progress(1000, plan, quiet=False, file=screen) as on_step:  # type: ignore[arg-type]
            assert on_step is not None
            on_step(SimpleNamespace(step=122), None)  # type: ignore[arg-type]
        shown = screen.getvalue()
        assert "…" not in shown
        assert all(figure in shown for figure in ("123/1000", "10.5014", "12,345", "400.25", "450.75"))


def test_an_encoding_without_lines_gets_plain_ones() -> None:
    assert narrow_encoding("── ± 7", "ascii") == "-- +- 7"
    assert narrow_encoding("── ± 7", "latin-1") == "-- ± 7"
    assert narrow_encoding("── ± 7 é", None) == "── ± 7 é"
    assert narrow_encoding("модель", "ascii").isascii()


def test_a_share_has_no_negative_zero() -> None:
    assert [format_percent(share) for share in (-2e-15, 0.0, 0.0053, 0.5, -0.02)] == [
        "0.00 %", "0.00 %", "0.53 %", "50.0 %", "-2.0 %",
    ]  # fmt: skip


def test_a_change_has_the_bar_of_both_times_on_the_seconds_by_which_they_differ() -> None:
    """5 % of the time, ± 30 % and ± 40 %: half of the 5 % (3-4-5 triangle)."""
    assert format_change(-0.05, 0.3, 0.4) == "-5.0 ± 2.5 %"
    assert format_change(0.004, 0.3, 0.4) == "+0.40 ± 0.20 %"
    assert format_change(0.05, 0.3, None) == "+5.0 ± ? %"
    assert format_change(-0.00013, 0.13, 0.13) == "-0.013 ± 0.002 %", "a bar of 0.00 would say that there is none"
    assert format_change(1e-5, 0.3, 0.4) == "no change"
    assert format_change(-0.97, 0.3, 0.4) == "-97.0 ± 1.5 %", "half of the 3 % that are left, not of the 97 %"


def test_a_difference_beyond_the_prediction_is_in_its_own_unit() -> None:
    """A floor of 2.9 ms under a step of 40.6 ms is not 1300 % wrong."""
    floor = {"iteration, at least_s": 0.0029, "iteration_s": 1.0, "h2d_bytes": 1e6}
    rows = figures(floor, {"iteration, at least_s": 0.0406, "iteration_s": 2.0, "h2d_bytes": 4e6})
    assert [row.words()[3] for row in rows] == ["+37.7 ms", "+100.0%", "+3 MB"]


def test_a_difference_too_small_for_its_digits_is_not_shown_as_zero() -> None:
    rows = figures(
        {"a_bytes": 10**6, "b_bytes": 10**6, "c_bytes": 10**6},
        {"a_bytes": 10**6 - 1, "b_bytes": 10**6, "c_bytes": 998_000},
    )
    assert [row.words()[3] for row in rows] == ["< 0.1%", "equal", "-0.2%"]
