"""Sweeps: equal to compare, resumable, on any joblib backend; grids and results files that are wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import joblib
import pyarrow.parquet as parquet
import pytest
from joblib.parallel import ThreadingBackend

import pstar_sim
import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.errors import PstarError
from pstar_sim.planner.grid import CODE, job_of, load_grid, point_hash
from pstar_sim.planner.sweep import COLUMNS, load_results, sweep
from pstar_sim.units import MIB

GRID: dict[str, object] = {
    "machine": ["virtual", "v100-16"],
    "model": "tiny-gpt2",
    "batch": [2, 4],
    "seq": 32,
    "policy": ["all_on_gpu", "tide"],
    "set": {"gpu.memory": ["1.1GB", "2GB"]},
}


def changed(**axes: object) -> dict[str, object]:
    return {k: v for k, v in {**GRID, **axes}.items() if v is not None}


def test_a_point_is_what_compare_says(tmp_path: Path) -> None:
    answer = sweep(GRID, tmp_path / "r.parquet", jobs=1)
    assert len(answer.rows) == 2 * 2 * 2 * 2
    for row in answer.rows:
        m = ps.machine(str(row["machine"]), overrides={"gpu.memory": row["set.gpu.memory"]})  # type: ignore[dict-item]
        dtype = "fp16" if row["machine"] == "v100-16" else "bf16"
        w = ps.preset("tiny-gpt2", batch=int(str(row["batch"])), seq=32, dtype=dtype)
        same = ps.compare(w, m, policies=[str(row["policy"])], barrier_cost=False).rows[0].to_json()
        assert {name: row[name] for name in COLUMNS} == {name: same.get(name) for name in COLUMNS}
    kept = parquet.read_table(tmp_path / "r.parquet").to_pandas()
    assert list(kept.columns) == [*load_grid(GRID).axes, *COLUMNS]
    assert kept["iteration_s"].tolist() == [row["iteration_s"] for row in answer.rows]
    assert answer.to_frame().shape == kept.shape


def test_a_finished_sweep_is_known_and_a_larger_grid_computes_only_what_is_new(tmp_path: Path) -> None:
    assert sweep(GRID, tmp_path / "r.parquet", jobs=1).cached == 0
    again = sweep(GRID, tmp_path / "r.parquet", jobs=1)
    assert again.cached == 16
    larger = sweep(changed(batch=[2, 4, 8]), tmp_path / "s.parquet", jobs=1, cache=tmp_path / "r.parquet.points")
    assert (len(larger.rows), larger.cached) == (24, 16)


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Each group has two points here: after the third group's are kept, Ctrl-C. Six are known; ten are computed."""

    def stop(done: int, cached: int, total: int) -> None:
        if done == 6 and cached == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(GRID, tmp_path / "r.parquet", jobs=1, on_progress=stop)
    assert not (tmp_path / "r.parquet").exists()
    assert len(list((tmp_path / "r.parquet.points").glob("*.json"))) == 6
    seen: list[tuple[int, int, int]] = []
    answer = sweep(GRID, tmp_path / "r.parquet", jobs=1, on_progress=lambda *now: seen.append(now))
    assert answer.cached == 6
    assert seen[0] == (6, 6, 16)
    assert seen[-1] == (16, 6, 16)
    assert answer.rows == sweep(GRID, jobs=1).rows


def test_every_setting_is_an_axis() -> None:
    """Those of a plan's settings but the chunk size, whose axis takes a text, are axes of the same name."""
    asked: dict[str, object] = {"update": "eager", "clip": False, "loop": "step", "sums": "16-bit", "effort": 2}
    (group, *_) = load_grid(changed(**asked, chunk="2MiB")).groups()
    _, _, settings = job_of(group)
    assert asdict(settings) == {**asked, "chunk_bytes": 2 * MIB}
    assert asdict(job_of(load_grid(GRID).groups()[0])[2]) == asdict(ps.Settings())


def test_adapters_and_bases_are_axes_in_the_words_of_flags(tmp_path: Path) -> None:
    given = {"lora": ["none", 4, "rank=4,targets=c_fc"], "base": ["bf16", "QLoRA"], "policy": "all_on_gpu"}
    grid = load_grid(changed(**given, batch=4, dtype="bf16", machine="virtual", set=None))
    assert grid.axes["lora"] == ("none", "r=4", "r=4,targets=c_fc") and grid.axes["base"] == ("bf16", "nf4")
    assert load_grid(changed(dropout=[0.1, "hidden=.1"])).axes["dropout"] == ("0.1", "hidden=0.1")
    answer = sweep(grid, tmp_path / "r.parquet", jobs=1)
    adapters = [None if job.adapter is None else job.adapter.targets for job, *_ in map(job_of, grid.groups())]
    assert adapters == [None, None, None, None, ("c_fc",), ("c_fc",)]
    whole, none, *rest = (row["peak_gpu_bytes"] for row in answer.rows)
    assert none is None and "what is trained is not quantised" in str(answer.rows[1]["reason"])
    assert whole > rest[0] > rest[1] and rest[2] > rest[3]
    assert load_results(tmp_path / "r.parquet")[1] == [dict(row) for row in answer.rows]


def test_a_point_file_that_was_cut_off_is_computed_again(tmp_path: Path) -> None:
    sweep(GRID, tmp_path / "r.parquet", jobs=1)
    points = sorted((tmp_path / "r.parquet.points").glob("*.json"))
    points[0].write_text(points[0].read_text()[:20])
    points[1].write_text(json.dumps({"fits": True}))
    assert sweep(GRID, tmp_path / "r.parquet", jobs=1).cached == 14


def test_a_point_is_named_by_everything_that_determines_it() -> None:
    def names(**axes: object) -> set[str]:
        grid = load_grid(changed(**axes))
        return {point_hash(group, policy) for group in grid.groups() for _, policy in group.policies}

    assert len(names()) == 16
    assert names() == names()
    for axes in (
        {"seq": 16},
        {"sums": "16-bit"},
        {"effort": 2},
        {"update": "eager"},
        {"set": {"host.memory": "32GB"}},
        {"lora": 4, "dtype": "fp16"},
        {"lora": 4, "dtype": "fp16", "base": "nf4"},
        {"clip": False},
    ):
        assert not names() & names(**axes), axes


# Backends.


def test_on_two_processes(tmp_path: Path) -> None:
    assert sweep(GRID, tmp_path / "r.parquet", jobs=2).rows == sweep(GRID, jobs=1).rows


def test_a_backend_of_ones_own_as_dask_or_ray_register_theirs() -> None:
    """What `Client()` of dask and `register_ray()` do: a backend under a name, chosen by joblib.parallel_config."""
    calls: list[int] = []

    class Remote(ThreadingBackend):  # type: ignore[misc]
        supports_return_generator = True

        def submit(self, func: object, callback: object = None) -> object:
            calls.append(1)
            return super().submit(func, callback)

    joblib.register_parallel_backend("remote", Remote)
    with joblib.parallel_config(backend="remote", n_jobs=2):
        answer = sweep(GRID, jobs=None)
    assert answer.rows == sweep(GRID, jobs=1).rows
    assert calls


def test_a_backend_that_hands_out_everything_at_once() -> None:
    class AtOnce(ThreadingBackend):  # type: ignore[misc]
        supports_return_generator = False

    joblib.register_parallel_backend("at-once", AtOnce)
    seen: list[int] = []
    answer = sweep(GRID, jobs=2, backend="at-once", on_progress=lambda done, *_: seen.append(done))
    assert answer.rows == sweep(GRID, jobs=1).rows
    assert seen == sorted(seen) and len(seen) > 2  # in batches, not in one


def test_on_dask_where_it_is_installed() -> None:
    distributed = pytest.importorskip("distributed", reason="dask is not installed; see [Note: any joblib backend]")
    with (
        distributed.Client(processes=False, dashboard_address=None),
        joblib.parallel_config(backend="dask"),
    ):
        assert sweep(GRID, jobs=None).rows == sweep(GRID, jobs=1).rows


def test_a_backend_nobody_knows_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PstarError, match="backend 'nothing' is not known to joblib"):
        sweep(GRID, tmp_path / "r.parquet", backend="nothing")


# What is refused.


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"modle": "1B"}, "'modle' is not an axis of a sweep; did you mean model"),
        ({"weekday": ["red"]}, "'weekday' is not an axis of a sweep; known axes are model,"),
        ({"set": {"gpu.memry": "4GB"}}, r"\[set\] 'gpu.memry' is not a figure of a machine; did you mean gpu.memory"),
        ({"set": {"gpu.memory": "0GB"}}, "machine = 'virtual': gpu.memory = '0GB': it must be positive"),
        ({"set": "gpu.memory"}, r"set = 'gpu.memory'; write a table"),
        ({"model": "tiny-gtp2"}, "model = 'tiny-gtp2': unknown model 'tiny-gtp2'; did you mean tiny-gpt2"),
        ({"machine": "v100-64"}, "unknown machine 'v100-64'; did you mean v100"),
        ({"policy": ["tide", "tidy"]}, "policy = 'tidy': unknown policy 'tidy'; did you mean tide"),
        ({"batch": [4, 0]}, "batch = 0; it must be a whole number from 1 to 1e.09"),
        ({"batch": [4, -4]}, "batch = -4; it must be a whole number"),
        ({"batch": []}, "axis batch has no values"),
        ({"batch": [4, 4]}, "axis batch has the value 4 twice"),
        ({"batch": None}, "the axis batch is missing"),
        ({"dtype": "int8"}, "dtype = .int8.; it must be one of fp32, bf16, fp16"),
        ({"clip": 1}, "clip = 1; it must be true or false"),
        ({"chunk": "0MB"}, "chunk = '0MB': a size must be positive"),
        ({"trace": "x.parquet"}, "a sweep is over models or over traces"),
        ({"trace": "x.parquet", "model": None, "kernels": ["eager", "fused"]}, "kernels is for models; a trace has"),
        (
            {"trace": "x.parquet", "model": None, "attention": "math"},
            "attention is for models; a trace has the kernels",
        ),
        ({"trace": "x.parquet", "model": None}, "trace = 'x.parquet': there is no such file"),
        ({"optimizer": "adamv"}, "unknown optimizer 'adamv'"),
        ({"lora": "r=0"}, "lora r=0: rank must be at least 1"),
        ({"lora": ["r=4", 4]}, "axis lora has the value 'r=4' twice"),
        ({"lora": 2.5}, "lora = 2.5: it must be an adapter, such as 'r=16'"),
        ({"lora": 4, "base": "nf5"}, "base = 'nf5'; it must be one of bf16, int8, nf4"),
        ({"seq": [[1, 2]]}, r"axis seq has the value \[1, 2\]; a value is a text, a number"),
    ],
)
def test_a_grid_that_is_wrong_is_one_clear_error_before_anything_is_computed(
    axes: dict[str, object], said: str
) -> None:
    with pytest.raises(PstarError, match=said) as error:
        sweep(changed(**axes))
    assert "\n" not in str(error.value)


def test_a_grid_may_say_its_version(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    axes = 'machine = "virtual"\nmodel = "tiny-gpt2"\nbatch = 2\nseq = 32\npolicy = "tide"\n'
    file.write_text("version = 1\n" + axes)
    assert "version" not in load_grid(file).axes
    file.write_text("version = 2\n" + axes)
    with pytest.raises(
        PstarError, match=r"g\.toml: was written by a newer pstar-sim \(grid version 2; this one reads 1\)"
    ):
        load_grid(file)


def test_a_policy_without_a_plan_for_a_machine_takes_no_other_along() -> None:
    """No policy can put states on the disks of a machine that has none; the other policies are what compare says."""
    policies = ["zero_infinity:states=nvme", "all_on_gpu", "tide"]
    disks, *others = sweep(changed(machine="v100-16", batch=2, policy=policies, set=None)).rows
    assert disks["fits"] is None and "'v100-16' has no disks" in str(disks["reason"])
    w = ps.preset("tiny-gpt2", batch=2, seq=32, dtype="fp16")
    same = ps.compare(w, ps.machine("v100-16"), policies=policies[1:], barrier_cost=False)
    assert [row["iteration_s"] for row in others] == [row.iteration_s for row in same.rows] != [None, None]


def test_a_point_that_makes_no_sense_by_itself_is_an_answer() -> None:
    """A sequence longer than the model's, and a batch that eight GPUs cannot share."""
    answer = sweep(changed(seq=[32, 4096], machine="virtual", set=None), jobs=1)
    refused = [row for row in answer.rows if row["fits"] is None]
    assert len(refused) == 4
    assert all(row["seq"] == 4096 and "positions" in str(row["reason"]) for row in refused)
    answer = sweep(changed(batch=[12], machine="v100-32x8", set=None), jobs=1)
    assert all("batch 12 cannot be shared evenly by the 8 ranks" in str(row["reason"]) for row in answer.rows)
    assert all("give 8 or 16" in str(row["reason"]) for row in answer.rows)


def test_a_results_file_of_another_grid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    sweep(GRID, path, jobs=1)
    with pytest.raises(
        PstarError, match=r"holds the results of another grid \(batch there: \[2, 4\], here: \[2, 8\]\)"
    ):
        sweep(changed(batch=[2, 8]), path)
    with pytest.raises(PstarError, match=r"clip there: no such axis, here: \[false\]"):
        sweep(changed(clip=False), path)
    foreign = tmp_path / "foreign.parquet"
    foreign.write_bytes(Path("traces/gpt2.parquet").read_bytes())
    with pytest.raises(PstarError, match="exists and is not a results file of a sweep; choose another output"):
        sweep(GRID, foreign)
    foreign.write_text("nothing")
    with pytest.raises(PstarError, match="exists and is not a results file"):
        sweep(GRID, foreign)
    with pytest.raises(PstarError, match=r"name a file that ends in \.parquet"):
        sweep(GRID, tmp_path / "r.csv")


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "r.parquet"
    grid.write_text(
        'machine = "virtual"\nmodel = "tiny-gpt2"\nbatch = [1, 2]\nseq = 32\npolicy = ["all_on_gpu", "tide"]\n'
        '[set]\n"link.bandwidth" = ["1GB/s", "x2"]\ngpu.memory = "2GB"\n'
    )
    job = ["sweep", str(grid), "-o", str(out), "--backend", "threading", "--quiet"]
    assert main(job) == 0
    assert "8 points, 8 fit; 0 were known already" in " ".join(capsys.readouterr().out.split())
    assert main([*job, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["set.link.bandwidth"] for row in rows[:4]] == ["1GB/s", "1GB/s", "x2", "x2"]
    spread = tmp_path / "spread.parquet"
    grid.write_text(grid.read_text().replace("[1, 2]", "[4]").replace('"1GB/s", ', "") + "nodes = 2\n")
    more = ["--nodes", "1,2", "--gpus", "1,2", "--json", "--quiet", "--backend", "threading"]
    assert main(["sweep", str(grid), "-o", str(spread), *more]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    sizes = [(row["set.nodes"], row["set.gpus"]) for row in rows if row["policy"] == "tide"]
    assert sorted(sizes) == [(1, 1), (1, 2), (2, 1), (2, 2)] and all(row["fits"] for row in rows)
    grid.write_text(grid.read_text().replace("[4]", "[1, 3]"))
    assert main(job) == 2
    said = capsys.readouterr().err
    assert "holds the results of another grid" in said and said.count("\n") == 1
    grid.write_text('machine = "virtual"\nnonsense = 1\n')
    assert main(job) == 2
    assert "'nonsense' is not an axis" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path / "none.toml"), "-o", str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_ctrl_c_on_the_command_line_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pstar_sim.planner.sweep as module

    grid, out = tmp_path / "grid.toml", tmp_path / "r.parquet"
    grid.write_text('machine = "virtual"\nmodel = "tiny-gpt2"\nbatch = [1, 2, 4]\nseq = 32\npolicy = "all_on_gpu"\n')
    evaluate, calls = module.evaluate, []

    def interrupted(group: object) -> object:
        calls.append(group)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(group)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "evaluate", interrupted)
    job = ["sweep", str(grid), "-o", str(out), "--jobs", "1", "--quiet"]
    assert main(job) == 130
    assert "1 of 3 points are kept; the same command continues from there" in capsys.readouterr().err
    monkeypatch.setattr(module, "evaluate", evaluate)
    assert main(job) == 0
    assert "3 points, 3 fit; 1 were known already" in " ".join(capsys.readouterr().out.split())


def test_a_cached_point_is_of_all_code_that_determines_it() -> None:
    root = Path(pstar_sim.__file__).parent
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert {*CODE} == folders - {"cli", "frameworks", "recorded", "report", "validation"}
