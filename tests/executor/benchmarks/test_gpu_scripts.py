"""The scripts for a machine with a GPU: what they do without one, what they keep, and how they go on from it."""

from __future__ import annotations

import _thread
import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: these would run for minutes")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@NO_CUDA
@pytest.mark.parametrize(
    ("word", "script", "argv"),
    [
        ("gpu-smoke", "gpu_smoke", []),
        ("gpu-test", "gpu_test", []),
        ("gpu-steady", "gpu_test", ["--slow"]),
        ("gpu-parity", "gpu_parity", []),
        ("gpu-record", "gpu_record", []),
        ("gpu-largest", "gpu_largest", []),
        ("gpu-peers", "peers", ["--device", "cuda"]),
    ],
)
def test_without_a_device_there_is_one_line_and_a_status_of_its_own(
    load: Callable[[str], Any], word: str, script: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(script).main(argv) == load("preflight").NO_DEVICE == 3
    assert capsys.readouterr().out == f"{word}: skipped: no CUDA device (torch {torch.__version__} finds none)\n"


def test_a_missing_package_has_another_status(
    load: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight = load("preflight")
    monkeypatch.setitem(preflight.NEEDED_FOR, "no_such_package", "a test")
    assert preflight.cannot_run("gpu-x", ("no_such_package",), device=False) == preflight.NO_PACKAGE == 4
    assert capsys.readouterr().out.startswith("gpu-x: skipped: no_such_package cannot be imported by ")


class TestKeep:
    def test_what_was_carried_along_stays_importable(
        self, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", "/carried/wheels")
        assert load("_keep").python_path(ROOT).split(os.pathsep) == [str(ROOT), "/carried/wheels"]
        monkeypatch.delenv("PYTHONPATH")
        assert load("_keep").python_path(ROOT) == str(ROOT)

    def test_a_process_that_hangs_says_where_and_ends(
        self, load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It hangs in C code that keeps the interpreter to itself: no handler of Python's own could run."""
        keep = load("_keep").Keep(tmp_path / "out", "some")
        code = "import ctypes\nprint('begun')\ndef hangs():\n    ctypes.PyDLL(None).sleep(60)\nhangs()"
        status, over = keep.run([sys.executable, "-c", code], limit_s=2.0, cwd=tmp_path)
        assert over and status < 0
        said = keep.log.read_text(encoding="utf-8")
        assert said.startswith("begun\n") and "in hangs" in said
        assert capsys.readouterr().out == said

    def test_what_a_process_started_ends_with_it(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        """A grandchild that holds the pipe open for a minute."""
        keep = load("_keep").Keep(tmp_path, "some")
        code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
        status, over = keep.run([sys.executable, "-c", code], limit_s=1.0, cwd=tmp_path)
        assert over or status == 0

    def test_a_log_has_room_for_the_way_back(
        self, load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = load("_keep")
        monkeypatch.setattr(module, "FILE_BYTES", 1000)
        keep = module.Keep(tmp_path, "some")
        for _ in range(100):
            keep.note("x" * 29)
        text = keep.log.read_text(encoding="utf-8")
        assert len(text) <= 1000 and text.startswith("x" * 29) and text.endswith("(the log is full)\n")


@pytest.fixture
def stages_here(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages of a script run in this process, by the worker's own code: most of what a process of its own takes is
    imports. TestSmoke, and the first stages of TestRecord, have processes of their own."""
    worker = load("recording.worker")

    def run_here(self: Any, command: Sequence[str], **_: Any) -> tuple[int, bool]:
        *_, module, job_file, result_file = command
        assert module == worker.__name__
        worker.main(job_file, result_file)
        return 0, False

    monkeypatch.setattr(load("_keep").Keep, "run", run_here)


STORY = """
import ctypes, os, signal, warnings

def test_a_passes():
    warnings.warn("torch says so once")

def test_b_fails():
    assert 1 + 1 == 3

def test_c_hangs():
    ctypes.PyDLL(None).sleep(60)

def test_d_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_first_of_all():
    assert os.environ["PYTHONPATH"].endswith("/carried/wheels")
"""


@pytest.mark.slow
def test_tests_that_hang_or_die_leave_a_trace_and_the_others_run(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every outcome is kept, a warning is none, and a second run has nothing left to do; one row taken away, that test
    runs again, and no other."""
    gpu_test = load("gpu_test")
    monkeypatch.setenv("PYTHONPATH", "/carried/wheels")
    monkeypatch.setattr(gpu_test, "FIRST", ("test_first_of_all",))
    story, out = tmp_path / "test_story.py", tmp_path / "out"
    story.write_text(STORY, encoding="utf-8")
    argv = ["--marked", "not gpu", "--without-device", "--test-limit-s", "2", "--out", str(out), str(story)]
    assert gpu_test.main(argv) == 1
    partial = out / "gpu_test.partial.jsonl"
    rows = gpu_test.read(partial)
    found = {name.split("::")[-1]: row for name, row in gpu_test.results(rows).items()}
    assert {name: row["outcome"] for name, row in found.items()} == {
        "test_first_of_all": "passed", "test_a_passes": "passed", "test_b_fails": "failed", "test_c_hangs": "hung",
        "test_d_dies": "died",
    }  # fmt: skip
    assert next(iter(found)) == "test_first_of_all"
    assert "assert (1 + 1) == 3" in found["test_b_fails"]["text"]
    log = (out / "gpu_test.log").read_text(encoding="utf-8")
    assert "in test_c_hangs" in log and "warned 1 times: UserWarning: torch says so once" in log
    written = json.loads((out / "gpu_test.json").read_text(encoding="utf-8"))
    assert written["counts"] == {"passed": 2, "failed": 1, "hung": 1, "died": 1} and written["tests_left"] == 0
    assert len(list(out.iterdir())) <= 8

    kept = [line for line in partial.read_text(encoding="utf-8").splitlines() if "test_a_passes" not in line]
    partial.write_text("\n".join(kept) + "\n", encoding="utf-8")
    assert gpu_test.main(argv) == 1
    again = gpu_test.read(partial)[len(kept) :]
    assert [row["started"].split("::")[-1] for row in again if "started" in row] == ["test_a_passes"]
    capfd.readouterr()


AN_HOUR = """
import time

def test_a():
    clock = time.monotonic
    time.monotonic = lambda: clock() + 3600

def test_b():
    pass
"""


def test_no_time_left(load: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first test uses the minutes up, by the clock that it puts forward; the second is left for the next run."""
    story = tmp_path / "test_story.py"
    story.write_text(AN_HOUR, encoding="utf-8")
    gpu_test = load("gpu_test")
    argv = ["--marked", "not gpu", "--without-device", "--out", str(tmp_path / "out"), str(story)]
    assert gpu_test.main(["--minutes", "4", *argv]) == 0
    assert "1 passed; 1 left" in capfd.readouterr().out
    assert gpu_test.main(argv) == 0
    assert "2 passed; 0 left" in capfd.readouterr().out


def test_waits_of_training_are_told_from_those_of_queues(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait counts in the training thread, and in a thread that Python does not know, as autograd's are; once the
    patch is undone none does."""

    class Event:
        def synchronize(self) -> None:
            pass

    ended = threading.Event()

    def unknown() -> None:
        Event().synchronize()
        ended.set()

    waits = kit.waits_of_training(monkeypatch, [(Event, "Event")])
    queue = threading.Thread(target=Event().synchronize)
    queue.start()
    queue.join()
    assert waits == []
    Event().synchronize()
    _thread.start_new_thread(unknown, ())
    assert ended.wait(60)
    assert waits == ["Event", "Event, in backward's own thread"]
    monkeypatch.undo()
    Event().synchronize()
    assert len(waits) == 2


def test_what_a_profile_does_at_its_end_is_not_within_what_is_marked(kit: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        with torch.profiler.record_function("steady"):
            torch.ones(2).exp()
        torch.ones(2).cos()
    names = kit.names_within(profile.events(), "steady")
    assert "aten::exp" in names and "aten::cos" not in names


class TestSmoke:
    def test_a_part_that_takes_too_long_ends_with_its_stacks_and_the_next_one_runs(
        self,
        load: Callable[[str], Any],
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        python: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """No import of torch ends within so short a time: both parts are cut off, each in a process of its own."""
        argv = ["--device", "virtual", "--parts", "versions,training", "--part-limit-s", "0.01", "--out", str(tmp_path)]
        assert load("gpu_smoke").main(argv) == 1
        parts = json.loads((tmp_path / "gpu_smoke.json").read_text(encoding="utf-8"))["parts"]
        assert parts == {name: {"failed": "longer than 0.01 s"} for name in ("versions", "training")}
        log = (tmp_path / "gpu_smoke.log").read_text(encoding="utf-8")
        stacks = re.findall(
            r"^-- (\w+)\n(?:Current t|T)hread .* \(most recent call first\):\n(?:  Garbage-collecting\n)?  File",
            log,
            re.MULTILINE,
        )
        assert stacks == ["versions", "training"]
        assert load("gpu_smoke").main(["--device", "virtual", "--parts", "versions", "--out", str(tmp_path)]) == 1
        monkeypatch.setattr("sys.executable", python)
        argv = ["--device", "virtual", "--parts", "versions", "--again", "--out", str(tmp_path)]
        assert load("gpu_smoke").main(argv) == 0
        capfd.readouterr()

    @pytest.mark.slow
    def test_on_the_virtual_accelerator(
        self,
        load: Callable[[str], Any],
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        python: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What needs a card says so, the training is plain torch's; a second run has nothing left to do."""
        monkeypatch.setattr("sys.executable", python)
        argv = ["--device", "virtual", "--out", str(tmp_path)]
        assert load("gpu_smoke").main(argv) == 0
        parts = json.loads((tmp_path / "gpu_smoke.json").read_text(encoding="utf-8"))["parts"]
        assert [name for name, row in parts.items() if row == {"skipped": "needs a card"}] == [
            "context", "pinning", "copies", "pool",
        ]  # fmt: skip
        for row in parts["training"].values():
            assert row["deviations"] == 0 and row["loss_apart"] <= 1e-6 and row["parameters_apart"] <= 1e-6
        kept = (tmp_path / "gpu_smoke.partial.jsonl").read_text(encoding="utf-8")
        assert load("gpu_smoke").main(argv) == 0
        assert (tmp_path / "gpu_smoke.partial.jsonl").read_text(encoding="utf-8") == kept
        capfd.readouterr()


class TestRecord:
    @pytest.mark.slow
    def test_goes_on_in_another_folder_where_it_stopped(
        self,
        load: Callable[[str], Any],
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        request: pytest.FixtureRequest,
        python: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A real plan on the virtual accelerator, in a process of its own; what it left is carried elsewhere, and a cap
        more is asked for."""
        monkeypatch.setattr("sys.executable", python)
        record = load("gpu_record")
        argv = ["--device", "virtual", "--models", "tiny-gpt2", "--caps"]
        assert record.main([*argv, "none", "--out", str(tmp_path / "one")]) == 0
        assert len(list((tmp_path / "one").iterdir())) <= 8
        request.getfixturevalue("stages_here")
        (tmp_path / "one").rename(tmp_path / "two")
        capfd.readouterr()
        assert record.main([*argv, "3MB,none", "--out", str(tmp_path / "two")]) == 0
        said = capfd.readouterr().out
        assert "tiny-gpt2: a plan of tide, 0.003 GB ..." in said and "tiny-gpt2: a plan of tide, no cap ..." not in said
        stages = json.loads((tmp_path / "two" / "gpu_record.json").read_text(encoding="utf-8"))["stages"]
        assert list(stages) == ["tiny-gpt2: a plan of tide, 0.003 GB", "tiny-gpt2: a plan of tide, no cap"]
        for row in stages.values():
            assert row["deviations"] == [] and row["moved_bytes"]["profiler"] is None
            assert row["iteration_s"]["measured"] > 0
        # Another file of figures: it goes on from the same stages, and the first stays as it is.
        assert record.main([*argv, "none", "--name", "gpu_other", "--out", str(tmp_path / "two")]) == 0
        assert " ...\n" not in capfd.readouterr().out
        written = {
            n: json.loads((tmp_path / "two" / f"{n}.json").read_text("utf-8")) for n in ("gpu_record", "gpu_other")
        }
        assert [len(content["stages"]) for content in written.values()] == [2, 1]

    def test_stages_are_chosen_and_the_smallest_comes_first(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        record = load("gpu_record")
        args = record.parse(["--models", "llama-7b,gpt2-xl", "--caps", "8GB,none", "--policies", "tide,optimal"])
        assert [what for what, _ in record.jobs(args, "NVIDIA H200", tmp_path)] == [
            "calibration",
            "gpt2-xl: the tide", "gpt2-xl: a plan of tide, 8 GB", "gpt2-xl: a plan of optimal, 8 GB",
            "gpt2-xl: a plan of tide, no cap", "gpt2-xl: a plan of optimal, no cap",
            "llama-7b: the tide", "llama-7b: a plan of tide, 8 GB", "llama-7b: a plan of optimal, 8 GB",
            "llama-7b: a plan of tide, no cap", "llama-7b: a plan of optimal, no cap",
        ]  # fmt: skip
        args = record.parse(["--models", "vit-b-16", "--stages", "planned", "--caps", "8GB", "--machine", "m.toml"])
        ((what, job),) = record.jobs(args, "NVIDIA H200", tmp_path)
        assert (what, job["machine"]) == ("vit-b-16: a plan of tide, 8 GB", "m.toml")

    @pytest.mark.parametrize("argv", [["--models", "gpt-9"], ["--stages", "all"], ["--caps", "much"]])
    def test_refused(self, load: Callable[[str], Any], argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            load("gpu_record").parse(argv)
        assert argv[1] in capsys.readouterr().err


class TestNotMeasurable:
    def test_a_kernel_without_peaks(
        self, load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A /proc without VmHWM and clear_refs, as a sandbox has: no peak, no difference, nothing forgotten."""
        memory = load("contenders.memory")
        assert memory.host_bytes() > 0 and memory.less(7, 5) == 2
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "status").write_text("Name: x\nVmRSS:\t  12 kB\n", encoding="ascii")
        monkeypatch.setattr(memory, "PROC", tmp_path)
        assert (memory.host_bytes(), memory.peak_host_bytes(), memory.forget_peak()) == (12 * 1024, None, False)
        assert memory.less(memory.peak_host_bytes(), memory.host_bytes()) is None

    def test_a_kernel_that_only_seems_to_forget(
        self, load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = load("contenders.memory")
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "status").write_text("VmHWM: 9000 kB\nVmRSS: 12 kB\n", encoding="ascii")
        monkeypatch.setattr(memory, "PROC", tmp_path)
        assert memory.forget_peak() is False

    def test_tables_say_so(self, load: Callable[[str], Any]) -> None:
        peers = load("peers")
        ran = {"start": {"start_peak_bytes": None}, "memory": {"host_peak_bytes": None, "params": 4}}
        assert peers.most_host_bytes(ran) is None and peers.per_param(ran["memory"]) is None
        row = {"host_peak_bytes": None, "host_bytes_per_param": None}
        assert peers.host_columns(row) == ("not measurable here", "-")


class TestDrawnWeights:
    def test_one_buffer_for_all_and_no_two_tied(self, load: Callable[[str], Any]) -> None:
        """The same values for one seed, however they are kept; ties hold; a vector is ones."""
        from executor.devices.on_meta import parameters_on_meta
        from executor.models import build
        from executor.moments.recorder import describe_parameters

        draw = load("contenders.drawn").draw_weights

        def model(shared: bool) -> torch.nn.Module:
            with parameters_on_meta():
                built = build("tiny-gpt2", batch=1, sequence=8, dtype="fp32")
            return draw(built.module, seed=3, shared=shared)

        one, other = model(True), model(False)
        plain, _ = describe_parameters(build("tiny-gpt2", batch=1, sequence=8, dtype="fp32", device="meta").module)
        assert describe_parameters(one)[0] == describe_parameters(other)[0] == plain
        assert any(t.tied_to is not None for t in plain)
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b) and (a.dim() > 1 or bool((a == 1).all()))
        matrices = [p for p in one.parameters() if p.dim() > 1]
        assert len({p.untyped_storage()._cdata for p in matrices}) == 1
        held = sys.modules["executor.prepare"]._host_bytes
        assert (
            held(list(one.parameters())) < held(list(other.parameters())) == sum(p.nbytes for p in other.parameters())
        )


class TestParity:
    def test_the_difference_is_reckoned_in_what_training_changed(self, load: Callable[[str], Any]) -> None:
        """Training changed a by 3 and b by 4, length 5; b is off by 1: a fifth."""
        begun = {"a": torch.zeros(1), "b": torch.zeros(1)}
        theirs = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        mine = {"a": torch.tensor([3.0]), "b": torch.tensor([5.0])}
        assert load("recording.parity").apart(mine, theirs, begun) == (pytest.approx(0.2), "b")

    @pytest.mark.slow
    def test_on_the_virtual_accelerator_and_again_what_failed(
        self, load: Callable[[str], Any], stages_here: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A model that is not known fails, and is tried again when asked for; the other is plain training and kept."""
        argv = [
            "--device", "virtual", "--models", "tiny-gpt2,no-such-model", "--dtypes", "bf16", "--policies", "tide",
            "--steps", "2", "--sequence", "16", "--out", str(tmp_path),
        ]  # fmt: skip
        parity = load("gpu_parity")
        assert parity.main(argv) == 1
        stages = json.loads((tmp_path / "gpu_parity.json").read_text(encoding="utf-8"))["stages"]
        assert "no-such-model" in stages["no-such-model, bf16"]["failed"]
        runs = stages["tiny-gpt2, bf16"]["runs"]
        assert list(runs) == ["tide, step", "tide, eager"]
        assert all(row["equal"] and row["deviations"] == 0 and row["losses"] <= 1e-3 for row in runs.values())
        capfd.readouterr()
        assert parity.main(argv) == 1
        assert " ...\n" not in capfd.readouterr().out
        assert parity.main([*argv, "--again"]) == 1
        said = capfd.readouterr().out
        assert "no-such-model, bf16 ..." in said and "tiny-gpt2, bf16 ..." not in said


class TestLargestModel:
    def test_layers_by_arithmetic(self, load: Callable[[str], Any]) -> None:
        """14 bytes per parameter: 1,400 bytes hold 100 parameters, 10 of them fixed, so 9 layers of 10; then fewer."""
        largest = load("gpu_largest")
        sizes = {"fixed_params": 10, "layer_params": 10, "gpu_bytes": 400, "host_bytes": 1000}
        assert largest.layers_by_arithmetic(dtype="bf16", **sizes) == 9
        assert largest.layers_by_arithmetic(dtype="fp32", **sizes) == 7  # 16 bytes: 87 parameters
        assert [largest.fewer(layers) for layers in (94, 20, 9)] == [90, 19, 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none")
def test_the_measured_tide_is_without_workspaces(load: Callable[[str], Any]) -> None:
    """Two layers of 256 x 256 in fp32 on 256 rows: a tensor has 256 KiB. Workspaces have 8 MiB a thread or more."""
    from executor.capture import capture_module

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(torch.relu(self.one(x))).square().mean()

    x = torch.ones(256, 256)
    captured = capture_module(Small(), {"x": x}, name="small", batch=256, sequence=1)
    tide = load("recording.tide").record_tide(Small().cuda(), {"x": x.cuda()})
    assert list(tide.names) == [moment.name for moment in captured.moments]
    assert max(tide.bytes) == pytest.approx(captured.peak_non_model_bytes, abs=600 * 1024)


class TestMemory:
    def test_it_runs_on_the_emulated_device_only(
        self, load: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("EMULATED_CUDA_OPERATORS", raising=False)
        assert load("gpu_memory").main([]) == 3
        assert capsys.readouterr().out.startswith("gpu-memory: skipped: no emulated device; ")

    def test_the_table_and_its_bounds(
        self,
        load: Callable[[str], Any],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Budgets of 1 GiB: 64 MiB more are within the goal, 656 within the bounds where committed runs have 592;
        one run ends at its smallest cap; one makes three exchanges per step, one of them torch's, where the committed
        run made 2.3, and one two where it made none."""
        memory, reserved = load("gpu_memory"), load("recording.reserved")
        for name in memory.DEVICE:
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("EMULATED_CUDA_OPERATORS", "there")
        monkeypatch.setattr(reserved, "MODELS", {"small": None, "large": None})
        more_mib = {"small": (64, 65, 656), "large": (657, 0, 0)}
        gib = 1 << 30

        def run(keep: Any, job: dict[str, Any], left_s: float) -> dict[str, Any]:
            index = memory.SHARES.index(job["share"])
            row = {"cap_bytes": int(job["share"] * 2e9), "budget_bytes": gib, "iterations": 6, "deviations": 0}
            row["reserved_peak_bytes"] = gib + (more_mib[job["model"]][index] << 20)
            if (job["model"], index) == ("small", 0):
                return {**row, "died": "step 2: out of memory"}
            exchanges = {("large", 1): 2.0, ("large", 2): 1.0}.get((job["model"], index), 0.0)
            return {
                **row,
                "exchanges_per_step": exchanges,
                "retries_per_step": float(job["model"] == "large"),
                "cudaMalloc_per_step": 0.0,
                "cuMemMap_per_step": 0.0,
            }

        before = {"reserved_peak_bytes": gib + (592 << 20)}
        rows = {
            **dict.fromkeys(["small, 1.1", "small, 1.5", "large, 1"], before),
            "large, 1.1": {"exchanges_per_step": 2.3},
        }
        monkeypatch.setattr(memory, "committed", lambda: rows)
        monkeypatch.setattr(memory, "in_process", run)
        assert memory.main(["--out", str(tmp_path)]) == 1
        result = json.loads((tmp_path / "gpu_memory.json").read_text(encoding="utf-8"))
        assert result["faults"] == [
            "small, 1: step 2: out of memory",
            f"large, 1: {gib + (657 << 20)} bytes reserved, with a budget of {gib}",
            "large, 1.5: 2 exchanges per step, at most 1 were to be",
        ]
        assert result["above_goal"] == ["small, 1.1", "small, 1.5", "large, 1"]
        assert result["smallest_cap_bytes"] == {"small": 2_200_000_000, "large": 2_000_000_000}
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [
            "small,",
            "1.5",
            "3.0",
            "1.07",
            "164.1",
            "%",
            "656",
            "0.0",
            "0.0",
            "0.0",
            "0.0",
            "0",
            "of",
            "6",
        ] in lines
