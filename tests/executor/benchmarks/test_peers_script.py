"""benchmarks/peers.py and the gpu commands: what they refuse, how they go on after a cut, the arithmetic, and one real
comparison of two contenders in their own processes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pstar_sim.core.step import Place

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


class TestArguments:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--contenders", "ours,gemini"], "'gemini' is not known; choose from ours, ours_eager, ours_half"),
            (["--micro", "3"], "every one has to divide --batch 4"),
            (["--micro", "two"], "invalid literal"),
            (["--batch", "0"], "--batch 0: must be at least 1"),
            (["--largest", "much"], "'much' is not a size"),
            (["--threads", "4096"], "--threads 4096: this process may use"),
            (["--device", "tpu"], "invalid choice: 'tpu'"),
        ],
    )
    def test_refused(
        self, load: Callable[[str], Any], argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            load("peers").parse(argv)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err

    def test_defaults_of_a_card(self, load: Callable[[str], Any]) -> None:
        args = load("peers").parse(["--device", "cuda"])
        assert (args.model, args.gpu_memory, args.largest, args.minutes) == ("llama-7b", 24 * 10**9, 64 * 10**9, 8.0)
        assert load("peers").parse(["--largest", "0"]).largest is None

    def test_a_task_knows_what_it_cannot_be(self, load: Callable[[str], Any]) -> None:
        task = load("contenders.task").Task
        fields: dict[str, Any] = {
            "contender": "zero3", "model": "gpt2", "global_batch": 8, "micro_batch": 2, "sequence": 64, "dtype": "bf16",
            "checkpointing": True, "clip": True, "device": "cpu", "threads": 1,
        }  # fmt: skip
        made = task(**fields)
        assert (made.micro_batches, made.tokens) == (4, 512)
        for wrong, message in (
            ({"micro_batch": 3}, "a micro-batch of 3 does not divide the global batch of 8"),
            ({"contender": "gemini"}, "contender 'gemini' is not known"),
            ({"device": "mps"}, "device 'mps' is not known"),
        ):
            with pytest.raises(ValueError, match=message):
                task(**{**fields, **wrong})
        config = load("contenders.zero").config_of(made, load("contenders.task").settings_of("zero3"))
        assert config["gradient_accumulation_steps"] == 4 and config["gradient_clipping"] == 1.0
        assert config["zero_optimization"]["sub_group_size"] == 10**8 and config["bf16"] == {"enabled": True}


def test_the_machine_that_was_measured_beside_the_results_makes_our_plans(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    peers = load("peers")
    assert peers.measured_machine("NVIDIA X1", [tmp_path]) is None
    (tmp_path / "nvidia-x1.toml").touch()
    assert peers.measured_machine("NVIDIA X1", [tmp_path]) == str(tmp_path / "nvidia-x1.toml")


def test_what_is_missing_is_named(load: Callable[[str], Any]) -> None:
    preflight = load("preflight")
    assert preflight.missing(("torch", "numpy")) == {}
    preflight.NEEDED_FOR["no_such_package"] = "a test"
    try:
        assert preflight.missing(("torch", "no_such_package")) == {"no_such_package": "a test"}
        assert "missing: no_such_package, needed for a test" in preflight.report()
    finally:
        del preflight.NEEDED_FOR["no_such_package"]


class TestStages:
    def stages(self, load: Callable[[str], Any], path: Path, **changes: Any) -> tuple[Any, list[str]]:
        said: list[str] = []
        now = SimpleNamespace(s=0.0)
        made = load("contenders.stages").Stages(
            path, **{"minutes": 1.0, "expected_s": 10.0, **changes}, say=said.append, clock=lambda: now.s
        )
        made.now = now
        return made, said

    def test_what_is_done_is_not_done_again(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        path = tmp_path / "some.jsonl"
        first, _ = self.stages(load, path)
        assert first.run("a", "A", lambda left_s: {"left": left_s}) == {"left": 60.0}
        with path.open("a", encoding="utf-8") as file:
            file.write('{"key": "b", "resu')  # cut off while it wrote
        second, said = self.stages(load, path)
        assert second.run("a", "A", lambda left_s: {}) == {"left": 60.0}
        assert second.run("b", "B", lambda left_s: {"x": 1}) == {"x": 1}
        assert "line 2: not a result" in said[0] and "1 stages are done already" in said[1]

    def test_no_time_left(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        """A minute; the first takes 45 s, so the second, reckoned to take as long, waits for the next run."""
        stages, _ = self.stages(load, tmp_path / "some.jsonl")

        def long(left_s: float) -> dict[str, Any]:
            stages.now.s += 45.0
            return {}

        assert stages.run("a", "A", long) == {}
        assert stages.run("b", "B", long) is None
        assert (len(stages), stages.left_out) == (1, 1)

    def test_a_failure_is_kept_unless_time_was_up(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        failed = load("contenders.process").Failed
        stages, _ = self.stages(load, tmp_path / "some.jsonl")

        def dies(left_s: float) -> dict[str, Any]:
            raise failed("out of memory")

        def hangs(left_s: float) -> dict[str, Any]:
            stages.now.s += left_s
            raise failed("no answer", lasting=False)

        assert stages.run("a", "A", dies) == {"failed": "out of memory"}
        assert stages.run("b", "B", hangs) is None
        again, _ = self.stages(load, tmp_path / "some.jsonl")
        assert again.run("a", "A", lambda left_s: {}) == {"failed": "out of memory"}
        assert again.run("b", "B", lambda left_s: {"done": True}) == {"done": True}


class TestLargest:
    def test_the_line_through_two_points(self, load: Callable[[str], Any]) -> None:
        """Peaks of 100 + 10 a layer, thought to be 20 a layer: from 2 layers (120) towards 1,000: 46 layers would be
        too bold, so 8 (180), 32 (420), then 90 (1,000), then 91 is one too many."""
        largest = load("contenders.room").largest_by_trial
        assert largest(
            lambda layers: 100 + 10 * layers, cap_bytes=1000, small_layers=2, small_bytes=120, layer_bytes=20.0
        ) == (90, 91, [(8, 180), (32, 420), (90, 1000), (91, 1010)])

    def test_two_peaks_that_happen_to_be_equal(self, load: Callable[[str], Any]) -> None:
        """12 and 14 layers both took 360: a layer adds a quarter of the 20 it was reckoned to, at the least, so 22 is
        next (520, too much), then 16 (400) and 17 by the line."""
        largest = load("contenders.room").largest_by_trial
        fits, fails, tried = largest(
            lambda layers: 360 + 20 * max(0, layers - 14),
            cap_bytes=400, small_layers=12, small_bytes=360, layer_bytes=20.0,
        )  # fmt: skip
        assert (fits, fails) == (16, 17) and tried == [(14, 360), (22, 520), (16, 400), (17, 420)]

    def test_a_known_run_above_the_cap(self, load: Callable[[str], Any]) -> None:
        """32 layers took 420 = 100 + 10 a layer: 20 would take the cap of 300, and do."""
        largest = load("contenders.room").largest_by_trial
        fits, fails, tried = largest(
            lambda layers: 100 + 10 * layers, cap_bytes=300, small_layers=32, small_bytes=420, layer_bytes=10.0
        )
        assert (fits, fails, tried) == (20, 21, [(20, 300), (21, 310)])

    def test_one_that_dies(self, load: Callable[[str], Any]) -> None:
        """Dies above 12 layers: 8, then 20 dies, then the middle of what ran and what died: 14 dies, 11, 12, 13."""
        largest = load("contenders.room").largest_by_trial
        fits, fails, tried = largest(
            lambda layers: None if layers > 12 else 10 * layers,
            cap_bytes=200, small_layers=2, small_bytes=20, layer_bytes=10.0,
        )  # fmt: skip
        assert (fits, fails) == (12, 13) and [layers for layers, _ in tried] == [8, 20, 14, 11, 12, 13]

    def test_bytes_by_hand(self, load: Callable[[str], Any]) -> None:
        """ZeRO-3 offload in bf16: 2 param + 4 master + 8 moments + 4 gradient = 18 on the host."""
        task = load("contenders.task").Task(
            contender="zero3", model="gpt2", global_batch=1, micro_batch=1, sequence=8, dtype="bf16",
            checkpointing=False, clip=False, device="cuda", threads=1,
        )  # fmt: skip
        of = load("contenders.room").bytes_per_param
        assert of(task) == {"gpu": 0, "host": 18}
        assert of(task.changed(contender="zero2")) == {"gpu": 2, "host": 16}
        assert of(task.changed(contender="fsdp2")) == {"gpu": 0, "host": 16}
        assert of(task.changed(contender="plain", dtype="fp32")) == {"gpu": 16, "host": 0}
        assert of(task.changed(contender="ours")) is None


class TestRecording:
    def test_bytes_of_memcpy_events(self, load: Callable[[str], Any]) -> None:
        events = [
            {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 4096}},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 100}},
            {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 4}},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 7}},
            {"cat": "kernel", "name": "gemm"},
            {"ph": "M", "name": "process_name"},
        ]
        assert load("recording.memcpy").bytes_by_direction(events) == {"h2d": 4100, "d2h": 100}

    def test_payload_of_each_moment(self, load: Callable[[str], Any]) -> None:
        """100 held at first; +50 in moment 1, -120 in moment 1, +10 in moment 3 and, the border passed, +5."""

        def change(size: int, moment: int, place: Place = Place.GPU, category: str = "param") -> Any:
            return SimpleNamespace(place=place, category=category, change=size, mark=("in", moment))

        changes = [
            change(50, 1), change(-120, 1), change(999, 1, Place.HOST), change(999, 2, category="non-model"),
            change(10, 3), change(5, 0),
        ]  # fmt: skip
        assert load("recording.planned").payload_peaks(100, changes, 5) == [100, 150, 30, 40, 45]

    def test_the_worst_moment_is_named(self, load: Callable[[str], Any]) -> None:
        worst = load("recording.planned").worst_row(["a", "b", "c"], [10, 20, 30], [11, 15, 30])
        assert worst == {"moment": 1, "name": "b", "predicted_bytes": 20, "measured_bytes": 15}

    def test_moments_that_differ_are_said(self, load: Callable[[str], Any], kit: Any) -> None:
        from executor.capture import capture

        workload = capture("tiny-gpt2", sequence=8, dtype="fp32")
        names = tuple(m.name for m in workload.moments)
        tide_rows = load("recording.tide").tide_rows
        peaks = tuple(m.peak_bytes + (7 if i == 3 else 0) for i, m in enumerate(workload.moments))
        rows = tide_rows(workload, names, peaks)
        assert rows["worst"]["moment"] == 3 and rows["worst"]["measured_bytes"] - rows["worst"]["predicted_bytes"] == 7
        assert tide_rows(workload, (*names[:5], "other"), peaks[:6])["moments_differ_at"] == 5

    def test_peaks_fall_into_the_moments_of_the_clock(self, load: Callable[[str], Any]) -> None:
        from executor.moments.hooks import ModuleEvent
        from pstar_sim.workload.workload import Phase

        values = iter([5, 9, 7])
        peaks = load("recording.tide").Peaks(read=lambda: next(values), forget=lambda: None)
        for name in ("begin:a", "end:a", "step"):
            peaks(ModuleEvent("begin", "a", name, Phase.FWD, 0))
        peaks.finish()
        assert (peaks.names, peaks.bytes) == (["begin:a", "end:a", "step"], [5, 9, 7])


class TestAnswers:
    @pytest.mark.whole
    def test_a_worker_that_fails_says_why_and_leaves(
        self, load: Callable[[str], Any], tmp_path: Path, python: str
    ) -> None:
        process, task = load("contenders.process"), load("contenders.task")
        wrong = task.Task(
            contender="plain", model="no-such-model", global_batch=1, micro_batch=1, sequence=8, dtype="fp32",
            checkpointing=False, clip=False, device="cpu", threads=1,
        )  # fmt: skip
        made = process.Process(wrong, interpreter=python, log=tmp_path / "log", environment={})
        with process.processes([made]):
            made.start_building()
            with pytest.raises(process.Failed, match="no-such-model"):
                made.answer(250)

    def test_a_process_that_dies_is_told_by_its_last_words(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        process, task = load("contenders.process"), load("contenders.task")
        some = task.Task(
            contender="plain", model="gpt2", global_batch=1, micro_batch=1, sequence=8, dtype="fp32",
            checkpointing=False, clip=False, device="cpu", threads=1,
        )  # fmt: skip
        fake = tmp_path / "python"
        fake.write_text("#!/bin/sh\nread line\necho 'killed by the weather' >&2\nexit 9\n", encoding="utf-8")
        fake.chmod(0o755)
        made = process.Process(some, interpreter=str(fake), log=tmp_path / "log", environment={})
        with process.processes([made]):
            made.start_building()
            with pytest.raises(process.Failed, match=r"ended \(9\): killed by the weather"):
                made.answer(60)


def know_alone(peers: Any, argv: list[str], folder: Path, names: list[str], peak_bytes: int) -> None:
    """As if a run before this one had measured these contenders alone."""
    args = peers.parse(argv)
    run = peers.Run(args, folder)
    held = {"start": {"start_peak_bytes": 1}, "memory": {"host_peak_bytes": peak_bytes, "baseline_bytes": 0}}
    with run.keep.partial.open("a", encoding="utf-8") as file:
        for name in names:
            key = f"alone 1 {run.task(name, clip=args.clip == 'yes').key}"
            file.write(json.dumps({"key": key, "result": held}) + "\n")


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.timeout(900)  # eight seconds of imports per process, on a loaded machine minutes
def test_contenders_in_turns(
    load: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    python: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain PyTorch, and ours with room for half, on a tiny model: the same losses to the last bit, two tables, and a
    file that says everything. Ours is measured alone, then runs in its group; of plain PyTorch the first is known."""
    monkeypatch.setattr("sys.executable", python)
    peers = load("peers")
    argv = ["--model", "tiny-gpt2", "--sequence", "16", "--micro", "4", "--steps", "2", "--threads", "1"]
    argv += ["--largest", "0", "--clip", "yes", "--name", "some"]
    argv += ["--contenders", "plain,ours_half", "--out", str(tmp_path)]
    know_alone(peers, argv, tmp_path, ["plain"], 10**8)
    assert peers.main(argv) == 0
    result = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    tables = result["tables"]
    assert tables["everything resident"]["losses_apart"] == {"unclipped": {}, "clipped": {"plain": 0.0}}
    assert tables["model data leave"]["losses_apart"] == {"unclipped": {}, "clipped": {"ours_half": 0.0}}
    (plain,), (half,) = (tables[name]["rows"] for name in ("everything resident", "model data leave"))
    assert (plain["leaves"], half["contender"]) == ("nothing", "ours, room for half")
    assert 50 <= float(half["leaves"].rstrip(" %")) < 100
    for table in tables.values():
        (group,) = table["groups"]["clipped"]
        assert sum(group["need_bytes"].values()) <= group["available_bytes"] - result["job"]["keep_free_bytes"]
    assert result["bytes_per_param"]["ours_half"]["predicted"]["gpu_bytes_per_param"] < 8
    assert result["bytes_per_param"]["plain"]["arithmetic"] == {"gpu": 16, "host": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"some.json", "some.log", "some.partial.jsonl"}
    assert "skipped" not in capsys.readouterr().out
    assert peers.main(argv) == 0  # from the folder: nothing runs again
    assert "..." not in capsys.readouterr().out


class TestWhereResultsGo:
    """Refused in one line before anything is built: the model does not exist, which would be the next thing said."""

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--out", "{tmp}/new.json"], "is the name of a file; name the folder"),
            (["--out", "{tmp}/file"], "is a file; name a folder"),
            (["--out", "{tmp}/file/below"], "cannot be written"),
            (["--out", "/proc/nowhere"], "cannot be written"),
            (["--out", "{tmp}", "--name", "a/b"], "'a/b' is not a name of a file; the folder is given by --out"),
            (["--out", "{tmp}", "--name", ".json"], "is not a name of a file"),
            (["--out", "{tmp}", "--name", "taken.json"], "taken.json: cannot be written: it is not a file"),
            (["--out", "{tmp}", "--name", "n" * 300], "cannot be written"),
        ],
    )
    def test_refused_before_the_work(
        self,
        load: Callable[[str], Any],
        tmp_path: Path,
        argv: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "taken.json").mkdir()
        argv = [part.format(tmp=tmp_path) for part in argv]
        with pytest.raises(SystemExit) as stopped:
            load("peers").main(["--model", "no-such-model", "--contenders", "plain", "--largest", "0", *argv])
        said = capsys.readouterr().err + str(stopped.value)
        assert message in said and "Traceback" not in said

    def test_outside_the_repository_with_an_ending(
        self, load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A folder that is not there yet, and a name with .json, which is not doubled. No memory, so nothing runs."""
        argv = ["--model", "tiny-gpt2", "--micro", "4", "--largest", "0", "--contenders", "plain,fsdp2,ours_half"]
        folder = tmp_path / "not" / "there"
        argv += ["--keep-free", "900000TB", "--out", str(folder), "--name", "some.json"]
        assert load("peers").main(argv) == 0
        assert {path.name for path in folder.iterdir()} == {"some.json", "some.log"}
        result = json.loads((folder / "some.json").read_text(encoding="utf-8"))
        assert list(result["skipped"]) == ["plain", "fsdp2", "ours_half"]


class TestMemory:
    ARGV = ("--model", "tiny-gpt2", "--sequence", "16", "--micro", "4", "--largest", "0", "--clip", "no")

    def test_what_does_not_fit_by_arithmetic_is_not_started(
        self, load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Plain PyTorch: 400 MiB of a process and 16 bytes x 124,672 parameters: 421 MB."""
        argv = [*self.ARGV, "--contenders", "plain", "--keep-free", "900000TB", "--out", str(tmp_path)]
        assert load("peers").main(argv) == 0
        out = capsys.readouterr().out
        assert "skipped: plain PyTorch: it needs 421.4 MB of host memory (the least, by arithmetic);" in out
        assert "9e+05 TB of them stay free (--keep-free)" in out and "..." not in out

    def test_what_was_measured_alone_is_asked_for_when_a_group_starts(
        self, load: Callable[[str], Any], tmp_path: Path
    ) -> None:
        """Only one micro-batch, so nothing was searched: each is measured alone all the same. Ours and plain are said
        to have held 10**15 bytes: 1.1 x that is in no machine."""
        peers = load("peers")
        argv = [*self.ARGV, "--contenders", "plain,ours", "--out", str(tmp_path)]
        know_alone(peers, argv, tmp_path, ["ours", "plain"], 10**15)
        run = peers.Run(peers.parse(argv), tmp_path)
        assert run.timed(run.best_micro_batches(), peers.TABLES[0], clip=False) == []
        assert set(run.skipped) == {"ours", "plain"}
        assert run.skipped["plain"].startswith("it needs 1100 TB of host memory (by what it held alone); ")

    def test_the_search_for_the_largest_asks_too(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        peers = load("peers")
        run = peers.Run(peers.parse([*self.ARGV, "--contenders", "plain", "--out", str(tmp_path)]), tmp_path)
        run.args.largest = 10**15
        assert run.largest({}, {}) == {}
        assert run.skipped["largest model"].startswith("it needs 1300 TB of host memory (the most that a trial")


class TestWhatLeaves:
    def test_by_the_plan_or_by_the_peer(self, load: Callable[[str], Any]) -> None:
        """4 of 16 bytes per parameter stay: 75 % leave."""
        said = load("peers").what_leaves
        assert said("zero2", {}) == "gradients, states" and said("fsdp2", {}) == "everything"
        plans = {"nothing": (16, 0.0), "75 %": (4, 12), "everything": (0.01, 16)}
        for words, (gpu, host) in plans.items():
            memory = {"predicted": {"gpu_bytes_per_param": gpu, "host_bytes_per_param": host}}
            assert said("ours_half", memory) == words

    def test_budgets_of_ours(self, load: Callable[[str], Any]) -> None:
        """Half: the peak of the rest and 8 of 16 bytes per parameter. None: the least in which tide trains; a byte
        less and it is refused."""
        from executor.capture import capture
        from pstar_sim.catalog.loader import load_machine
        from pstar_sim.core.plan import Settings
        from pstar_sim.errors import DoesNotFit
        from pstar_sim.policy.registry import find_policy

        ours, tasks = load("contenders.ours"), load("contenders.task")
        workload = capture("tiny-gpt2", sequence=16, dtype="fp32")
        task = tasks.Task(
            contender="ours_half", model="tiny-gpt2", global_batch=1, micro_batch=1, sequence=16, dtype="fp32",
            checkpointing=False, clip=False, device="cpu", threads=1,
        )  # fmt: skip
        half, away = (ours.plan_of(task, tasks.settings_of(name), workload) for name in ("ours_half", "ours_away"))
        assert half.gpu_budget_bytes == workload.peak_non_model_bytes + 8 * workload.params
        assert away.gpu_budget_bytes < half.gpu_budget_bytes
        assert ours.predicted(away)["gpu_bytes_per_param"] < 0.1 * ours.predicted(away)["host_bytes_per_param"]
        with pytest.raises(DoesNotFit):
            less = load_machine("virtual", gpu_memory=away.gpu_budget_bytes - 1)
            find_policy("tide")(workload, less, Settings(clip=False))


class TestGroups:
    def test_as_many_as_fit_with_the_references_in_each(self, load: Callable[[str], Any]) -> None:
        """Room for 17: ours 3, plain 3 and zero2 5 leave 6 for zero3; then fsdp2 4 and ours_eager 3 beside them."""
        need = {"ours": 3, "plain": 3, "zero2": 5, "zero3": 6, "fsdp2": 4, "ours_eager": 3}
        next_group, references = load("contenders.groups").next_group, ["ours", "plain"]
        assert next_group(list(need), references, need, 17) == ["ours", "plain", "zero2", "zero3"]
        assert next_group(["fsdp2", "ours_eager"], references, need, 17) == ["ours", "plain", "fsdp2", "ours_eager"]

    def test_a_table_of_peers_alone_is_not_made_beside_another(self, load: Callable[[str], Any]) -> None:
        groups = load("contenders.groups")

        def names(*contenders: str) -> list[str]:
            return [table.name for table in groups.tables_of(contenders, "cpu")]

        assert names("ours_half", "zero3") == ["model data leave"]
        assert names("plain", "ours_away", "zero3") == ["everything resident", "model data leave"]
        assert names("zero2", "zero3") == ["everything resident"]
        assert groups.tables_of(("ours", "zero3"), "cuda") == [*groups.ON_A_CARD]

    def test_no_group_needs_more_than_there_is(self, load: Callable[[str], Any]) -> None:
        """Room for 9: zero3 6 and ours 3, plain has to stay out; for 6: zero3 alone; for 5: zero3 never."""
        need = {"ours": 3, "plain": 3, "zero3": 6}
        next_group, references = load("contenders.groups").next_group, ["ours", "plain"]
        assert next_group(["zero3"], references, need, 9) == ["ours", "zero3"]
        assert next_group(["zero3"], references, need, 6) == ["zero3"]
        assert next_group(["zero3"], references, need, 5) == []
        assert next_group(["ours", "plain"], references, need, 5) == ["ours"]

    def test_ratios_are_of_the_same_rounds(self, load: Callable[[str], Any]) -> None:
        """Two groups, the second at a third of the speed: zero2 took 2, 4 and 2 times what ours did, plain the same."""
        fast = {"ours": {"times_s": [1.0, 1.0, 2.0]}, "plain": {"times_s": [1.0, 1.0, 2.0]}}
        fast["zero2"] = {"times_s": [2.0, 4.0, 4.0]}
        slow = {"ours": {"times_s": [3.0]}, "plain": {"times_s": [3.0]}, "fsdp2": {"failed": "died"}}
        found = load("contenders.groups").ratios([fast, slow])
        assert found["ours / zero2"] == {"medians": 0.25, "rounds": 0.5, "number": 3}
        assert found["ours / plain"] == {"medians": 1.0, "rounds": 1.0, "number": 4}
        assert "ours / fsdp2" not in found

    def test_a_contender_of_two_groups_has_the_times_of_both(self, load: Callable[[str], Any]) -> None:
        first = {"ours": {"times_s": [1.0, 2.0], "median_s": 1.5, "tokens_per_s": 400.0, "losses": [5.0]}}
        second = {"ours": {"times_s": [3.0], "median_s": 3.0, "tokens_per_s": 200.0}, "fsdp2": {"failed": "died"}}
        found = load("contenders.groups").merged([first, second])
        assert found["ours"] == {"times_s": [1.0, 2.0, 3.0], "median_s": 2.0, "tokens_per_s": 300.0, "losses": [5.0]}
        assert found["fsdp2"] == {"failed": "died"}


def test_what_is_too_large_for_the_card_is_not_built(load: Callable[[str], Any], tmp_path: Path) -> None:
    """A Llama-7B in bf16 in plain PyTorch: 20 bytes x 6.74 G parameters is 135 GB, more than 24 GB."""
    peers = load("peers")
    args = peers.parse(["--device", "cuda", "--contenders", "plain,ours,fsdp2", "--out", str(tmp_path)])
    run = peers.Run(args, tmp_path)
    assert run.skipped == {
        "plain": "20 bytes per parameter on the GPU x 6.74 G = 135 GB, the cap is 24 GB",
    }
    assert run.names == ["ours", "fsdp2"]


def test_verdict_on_a_card(load: Callable[[str], Any]) -> None:
    """Twice as fast as ZeRO-3, 5 % slower than predicted, 1 % under the plan's budget; 7,000 parameters."""
    memory = {
        "predicted": {"iteration_s": 1.0}, "plan": {"gpu_budget_bytes": 1000}, "gpu_reserved_bytes": 990,
    }  # fmt: skip
    mine = {"median_s": 1.05, "memory": memory}
    pair = {"medians": 0.5, "rounds": 0.5, "number": 3}
    compared = {
        "unclipped": {"ours_eager": mine},
        "clipped": {},
        "ratios": {"unclipped": {"ours_eager / zero3": pair, "ours_eager / fsdp2": pair}, "clipped": {}},
    }
    assert load("peers").verdict(
        {
            "job": {"device": "cuda"},
            "tables": {"on a card": compared},
            "largest": {"ours": {"params": 7_000}, "zero3": {"params": 4_000}, "fsdp2": {"params": 5_500}},
        }
    ) == [
        "on a card, unclipped: ours, eager is 2.00 times as fast as DeepSpeed ZeRO-3 offload, goal 2: met",
        "on a card, unclipped: ours, eager is 2.00 times as fast as FSDP2 CPU offload, goal 1: met",
        "on a card, unclipped: iteration +5.0% of the prediction, goal 10 %: met",
        "on a card, unclipped: reserved -1.0% of the plan's budget, goal 3 %: met",
        "largest model 1.75 times that of DeepSpeed ZeRO-3 offload, goal 1.6: met",
        "largest model 1.27 times that of FSDP2 CPU offload, goal 1.3: missed",
    ]
