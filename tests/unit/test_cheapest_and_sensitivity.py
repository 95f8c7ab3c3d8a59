"""Days, prices and what a tenth more is worth: numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.catalog.prices import load_prices
from pstar_sim.cli import main
from pstar_sim.cli.parse_capacity import count, duration_s, share
from pstar_sim.errors import CatalogError, PstarError
from pstar_sim.planner.cheapest import bill, cheapest
from pstar_sim.planner.sensitivity import PARTS, sensitivity


def test_days_and_dollars_by_hand() -> None:
    """300e9 tokens at a million a second: 300,000 s = 3.4722 days = 83.333 hours; at 12 USD an hour 1,000 USD, a third
    of a cent for a million tokens."""
    b = bill(300e9, 1e6, 12.0)
    assert b.days == pytest.approx(300_000 / 86_400)
    assert b.usd == pytest.approx(1000.0)
    assert b.usd_per_million_tokens == pytest.approx(0.0033333, rel=1e-4)


def prices(folder: Path, **usd: float) -> str:
    file = folder / "prices.toml"
    file.write_text("".join(f'["{name}"]\nusd_per_hour = {value}\n' for name, value in usd.items()))
    return str(file)


def test_the_cheapest_in_time_comes_first(tmp_path: Path) -> None:
    """tiny-gpt2 on three machines at round prices; each row's bill is that of its own simulated rate."""
    file = prices(tmp_path, **{"v100-16": 3.0, "a100-40": 4.0, "t4": 0.5})
    names = ["v100-16", "a100-40", "t4"]
    answer = cheapest(
        "gpt2", tokens=1e9, batch=8, seq=256, machines=names, policies=["all_on_gpu"], prices=file, deadline_s=86_400
    )
    rows = {row.machine: row for row in answer.rows}
    for name, usd in (("v100-16", 3.0), ("a100-40", 4.0), ("t4", 0.5)):
        m = ps.machine(name)
        dtype = "bf16" if "bf16" in m.gpu.flops_per_s else "fp16"
        planned = ps.compare(ps.preset("gpt2", batch=8, seq=256, dtype=dtype), m, policies=["all_on_gpu"]).best()
        rate = planned.row.tokens_per_s
        assert rate is not None
        assert rows[name].tokens_per_s == rate
        assert rows[name].usd == pytest.approx(1e9 / rate / 3600 * usd)
        assert rows[name].days == pytest.approx(1e9 / rate / 86_400)
    in_time = [row for row in answer.rows if row.in_time]
    assert [row.usd for row in in_time] == sorted(row.usd or 0 for row in in_time)
    assert answer.best is in_time[0]
    assert "USD" in repr(answer)
    assert len(answer.to_frame()) == 3


def test_a_deadline_nobody_makes(tmp_path: Path) -> None:
    file = prices(tmp_path, t4=0.5)
    answer = cheapest("gpt2", tokens=1e12, batch=8, seq=64, machines=["t4"], prices=file, deadline_s=3600)
    assert answer.best is None
    row = answer.rows[0]
    # flops of a token over the T4's effective 26 TFLOPS, never less
    w = ps.preset("gpt2", batch=8, seq=64, dtype="fp16")
    assert row.least_days is not None and row.least_days >= 1e12 * w.flops / w.tokens / 26e12 / 86_400
    assert row.reason == f"too slow: {row.least_days:.1f} days if it never waited for anything"
    assert row.days is None
    assert "none makes the deadline; the nearest is t4" in repr(answer)


def test_what_does_not_fit_says_why_and_micro_batches_make_room(tmp_path: Path) -> None:
    file = prices(tmp_path, **{"v100-16": 3.0, "t4": 0.5})
    answer = cheapest("1B", tokens=1e9, batch=64, seq=1024, machines=["v100-16"], policies=["tide"], prices=file)
    row = answer.rows[0]
    assert row.batch is not None and row.micro_batches is not None
    assert row.batch * row.micro_batches == 64
    assert row.batch < 64  # 64 sequences at once do not fit 16 GB
    no = cheapest("18B", tokens=1e9, batch=1, seq=64, machines=["t4"], policies=["tide"], prices=file).rows[0]
    assert no.days is None
    assert no.reason is not None and "short by" in no.reason


def test_prices_have_dates_and_sources_and_a_file_comes_first(tmp_path: Path) -> None:
    shipped = load_prices()
    assert all(p.as_of is not None and p.source and p.usd_per_hour > 0 for p in shipped.values())
    assert all(ps.machine(name).name == name for name in shipped)
    own = load_prices(prices(tmp_path, **{"a100-80": 1.0}))
    assert own["a100-80"].usd_per_hour == 1.0
    assert own["h100-80"] == shipped["h100-80"]
    bad = tmp_path / "bad.toml"
    bad.write_text("[a100-80]\nusd_per_hour = -1\n")
    with pytest.raises(CatalogError, match=r"bad.toml: \[a100-80\] usd_per_hour = -1; must be a number from"):
        load_prices(str(bad))
    with pytest.raises(PstarError, match="machine 'v100-16' has no price; give one with --prices FILE"):
        cheapest("gpt2", tokens=1e9, batch=1, seq=64, machines=["v100-16"])
    priced = ps.machine("v100-16", overrides={"price": 2.0})
    row = cheapest("gpt2", tokens=1e9, batch=1, seq=64, machines=[priced], policies=["all_on_gpu"]).rows[0]
    assert row.usd_per_hour == 2.0


def test_nonsense_is_refused() -> None:
    for kwargs, said in (({"tokens": 0.0}, "tokens must be positive"), ({"deadline_s": -1.0}, "a deadline must be")):
        with pytest.raises(PstarError, match=said):
            cheapest("gpt2", **{"tokens": 1e9, "batch": 1, "seq": 64, **kwargs})  # type: ignore[arg-type]


def test_amounts_as_they_are_written() -> None:
    assert (count("300e9"), count("3B"), count("2.5T")) == (300e9, 3e9, 2.5e12)
    assert (duration_s("14d"), duration_s("36h"), duration_s("2w")) == (1_209_600, 129_600, 1_209_600)
    assert (share("10%"), share("0.5")) == (0.1, 0.5)


def test_a_tenth_more_by_hand() -> None:
    """all_on_gpu is its matmuls, and Adam at HBM speed: a tenth more speed takes 1/1.1 of the time; RAM and cores do
    nothing, and a tenth more GPU memory a deeper model."""
    m = ps.machine("v100-32")
    w = ps.preset("gpt2-xl", batch=4, seq=256, dtype="fp16")
    answer = sensitivity(w, m, policies=["all_on_gpu"], parts=["GPU memory", "GPU speed", "host RAM", "CPU cores"])
    rows = {row.part: row for row in answer.rows}
    assert rows["GPU speed"].change == pytest.approx(1 / 1.1 - 1, abs=1e-6)
    assert rows["host RAM"].change == rows["CPU cores"].change == rows["GPU memory"].change == 0
    assert rows["host RAM"].more_layers == 0
    assert answer.now.layers is not None and rows["GPU memory"].more_layers is not None
    assert rows["GPU memory"].more_layers >= answer.now.layers // 12
    assert "GPU memory" in repr(answer)
    assert len(answer.to_frame()) == 5


def test_one_more_gpu_takes_its_share_of_the_tokens() -> None:
    """Two GPUs that hold everything exchange gradients, but each token costs less than on one."""
    w = ps.preset("gpt2-medium", batch=4, seq=256, dtype="fp16")
    answer = sensitivity(w, ps.machine("v100-32"), policies=["all_on_gpu"], parts=["one more GPU"], largest=False)
    row = answer.rows[0]
    assert row.iteration_s is not None and answer.now.iteration_s is not None and row.change is not None
    assert row.iteration_s >= answer.now.iteration_s
    assert row.change == pytest.approx(row.iteration_s / 2 / answer.now.iteration_s - 1)
    assert -0.5 <= row.change < 0


def test_parts_a_machine_does_not_have_are_left_out_or_refused() -> None:
    w = ps.preset("tiny-gpt2", batch=1, seq=32)
    m = ps.machine("virtual", gpu_memory="2GB")
    answer = sensitivity(w, m, policies=["all_on_gpu"], largest=False)
    assert {row.part for row in answer.rows} == set(PARTS) - {"peer link", "network", "NVMe"}
    assert all(row.layers is None for row in answer.rows)
    with pytest.raises(PstarError, match="virtual has no network to enlarge"):
        sensitivity(w, m, policies=["all_on_gpu"], parts=["network"], largest=False)
    with pytest.raises(PstarError, match="'RAM' is no part of a machine; it can be GPU memory"):
        sensitivity(w, m, parts=["RAM"])


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = prices(tmp_path, **{"t4": 0.5, "a100-40": 4.0})
    job = ["cheapest", "--model", "gpt2", "--tokens", "1e8", "--batch", "4", "--seq", "64", "--prices", file]
    assert main([*job, "--machine", "t4", "--machine", "a100-40", "--deadline", "14d", "--policy", "all_on_gpu"]) == 0
    assert "in 14 days" in capsys.readouterr().out
    assert main([*job, "--machine", "t4", "--deadline", "soon"]) == 2
    assert "must be a positive time such as 14d" in capsys.readouterr().err
    assert main([*job, "--machine", "t4", "--deadline", "1s"]) == 2
    out = capsys.readouterr()
    assert "none makes the deadline" in out.out and "no machine trains gpt2 as asked" in out.err
    small = ["--model", "tiny-gpt2", "--batch", "1", "--seq", "32", "--machine", "virtual", "--gpu-memory", "20MB"]
    assert main(["sensitivity", *small, "--policy", "all_on_gpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["part"] is None
    assert main(["max-batch", "--model", "tiny-gpt2", "--seq", "32", "--machine", "virtual", "--policy", "tide"]) == 0
    assert "largest batch" in capsys.readouterr().out
    model = ["max-model", "--batch", "1", "--seq", "32", "--machine", "virtual", "--policy", "all_on_gpu", "--json"]
    assert main([*model, "--like", "tiny-gpt2", "--gpu-memory", "20MB"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["value"] > 2
    assert main([*model, "--hidden", "100", "--heads", "3"]) == 2
    assert "hidden = 100 is not a multiple of heads = 3" in capsys.readouterr().err
