"""pstar launch: unchanged scripts, in this process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pstar_sim.cli import main

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = str(Path(__file__).parents[1] / "executor" / "scripts" / "trainer_bf16.py")


@pytest.fixture(autouse=True)
def _warnings() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["launch", *words])
    out = capsys.readouterr()
    return status, out.out, " ".join(out.err.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_script_runs_by_a_plan_and_predicted_stands_beside_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu-memory", "1.3MB", "--policy", "tide", "--", "--steps", "2")
    status, out, _ = launched(capsys, SCRIPT, *words)
    told = " ".join(out.split())
    assert status == 0
    assert "LlamaForCausalLM: 0.2 M parameters in bf16, 2 x batch 2 per step" in told
    assert "policy tide: 27 chunks" in told and "predicted: " in told
    assert "per step (at least: matrix products, copies and updates count" in told and "), GPU 1.2" in told
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["h2d"][-1] == rows["d2h"][-1] == "equal" and rows["h2d"][1] == "1.106"
    assert "2 steps, measured: the last on plan with the planned batch; all on plan" in told


TWO_STAGES = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=96, n_positions=32))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(96, (4, 12))]
args = TrainingArguments(output_dir=sys.argv[1], max_steps=1, per_device_train_batch_size=2, use_cpu=True,
    report_to=[], save_strategy="no", disable_tqdm=True)
def stage():
    Trainer(model=model, args=args, train_dataset=rows).train()
stage()
before = model.transformer.wte.weight.clone()
stage()
assert not torch.equal(before, model.transformer.wte.weight)
model.save_pretrained(sys.argv[1])
"""


@pytest.mark.filterwarnings("ignore")
def test_one_model_is_trained_by_one_trainer_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainers that a function drops, of one model; its weights are there to be saved."""
    (tmp_path / "train.py").write_text(TWO_STAGES)
    words = ("--gpu-memory", "290KB", "--policy", "tide", "--", str(tmp_path))
    status, out, err = launched(capsys, str(tmp_path / "train.py"), *words)
    assert status == 0, err
    assert out.count("1 step, measured: the last on plan with the planned batch; all on plan") == 2
    assert (tmp_path / "model.safetensors").is_file()


PADDED = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
def joined(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "labels": ids}
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=96, n_positions=32))
rows = [{"input_ids": [1] * length} for length in (20, 9, 8, 9, 12, 12, 8, 7)]  # the longest two never meet
args = TrainingArguments(output_dir=sys.argv[1], max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[],
    save_strategy="no", disable_tqdm=True)
class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(rows[2:])
InOrder(model=model, args=args, train_dataset=rows[2:] + rows[:2], data_collator=joined).train()
"""


@pytest.mark.filterwarnings("ignore")
def test_shorter_batches_are_compared_with_a_prediction_of_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch has the planned length (20): none is captured, and the last one, of 9 tokens, has its own prediction."""
    (tmp_path / "train.py").write_text(PADDED)
    captured: list[object] = []
    monkeypatch.setattr("executor.session.batches.Shapes.capture", lambda *given: captured.append(given))
    status, out, err = launched(
        capsys, str(tmp_path / "train.py"), "--gpu-memory", "600KB", "--policy", "tide", "--", str(tmp_path)
    )
    told = " ".join(out.split())
    assert status == 0 and not captured, err
    assert "4 steps, measured: step 3, on plan with smaller batches (46% of the planned elements, to which" in told
    assert "all on plan, 4 batches of another shape than planned" in told


INTERRUPTED = """
import signal, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
folder, where, resume = sys.argv[1], sys.argv[2], len(sys.argv) > 3
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore the signal
class Stopped(Trainer):
    def stop(self, here, step):
        if here == where and self.state.global_step == step:
            signal.raise_signal(signal.SIGINT)
    def compute_loss(self, *args, **kwargs):
        self.stop("step", 3)
        return super().compute_loss(*args, **kwargs)
    def _save_rng_state(self, folder):
        self.stop("save", 4)
        super()._save_rng_state(folder)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=96, n_positions=32))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(96, (8, 12))]
args = TrainingArguments(output_dir=folder, max_steps=6, per_device_train_batch_size=2, use_cpu=True, bf16=True,
    report_to=[], save_strategy="steps", save_steps=2, logging_steps=1, disable_tqdm=True)
trainer = Stopped(model=model, args=args, train_dataset=rows)
trainer.train(resume_from_checkpoint=resume)
print("loss", trainer.state.log_history[-2]["loss"])
"""


@pytest.mark.filterwarnings("ignore")
def test_ctrl_c_leaves_whole_checkpoints_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGINT inside a forward, and while a checkpoint is written; killed while it is written; then as if nothing had
    happened."""
    (tmp_path / "train.py").write_text(INTERRUPTED)

    def run(folder: str, *more: str) -> tuple[int, str, str]:
        words = (str(tmp_path / "train.py"), "--gpu-memory", "400KB", "--policy", "tide", "--", str(tmp_path / folder))
        return launched(capsys, *words, *more)

    losses = [line for line in run("whole", "never")[1].splitlines() if line.startswith("loss ")]
    assert len(losses) == 1
    for where, steps in (("step", 3), ("save", 4)):
        status, _, err = run(where, where)
        kept = tmp_path / where / "checkpoint-2"
        assert status == 130 and "Traceback" not in err
        assert f"pstar: interrupted after {steps} steps; {kept} is whole: trainer.train(resume_from" in err
        assert [path.name for path in (tmp_path / where).iterdir()] == ["checkpoint-2"]
    (tmp_path / "save" / "checkpoint-4").mkdir()  # of a process that was killed
    status, out, _ = run("save", "never", "resume")
    assert status == 0 and losses[0] in out.splitlines()


@pytest.mark.filterwarnings("ignore")
def test_a_budget_into_which_nothing_fits_is_the_answer_no(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = launched(capsys, SCRIPT, "--gpu-memory", "500KB", "--policy", "tide")
    assert status == 3
    assert err.startswith("pstar: tide does not fit: gpu needs ") and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (
            "import sys\nassert sys.argv[1:] == ['--x', '1']\n",
            2,
            "ended without Trainer.train(): nothing ran by a plan",
        ),
        ("import sys\nsys.exit(5)\n", 5, ""),
        ("import sys\nsys.exit('no data')\n", 1, "no data"),
        ("raise KeyboardInterrupt\n", 130, "pstar: interrupted"),
        ("from pathlib import Path\nPath('nowhere').read_text()\n", 1, "FileNotFoundError"),
        ("if True\n", 1, "SyntaxError"),
    ],
)
def test_a_script_that_does_not_train(
    text: str, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is the script's own stays its own; a traceback begins in the script."""
    script = tmp_path / "train.py"
    script.write_text(text)
    found, _, err = launched(capsys, str(script), "--", "--x", "1")
    assert found == status and words in err
    if "Traceback" in err:
        assert "launching.py" not in err and "runpy" not in err
    assert ("Traceback" in err) == ("FileNotFound" in words)


def test_a_pipe_that_nobody_reads_keeps_the_status_of_the_script(python: str, tmp_path: Path) -> None:
    """`pstar launch train.py | head`: what is left in the buffer is lost, the status is not."""
    (tmp_path / "train.py").write_text("import sys\nprint('x')\nsys.exit(5)\n")
    reading, writing = os.pipe()
    os.close(reading)
    words = [python, "-m", "pstar_sim", "launch", str(tmp_path / "train.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ZYGOTE_END": "whole"}
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, check=False, text=True, env=env)
    os.close(writing)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nowhere.py"], "argument SCRIPT: nowhere.py is not a file"),
        ([str(Path(__file__).parents[2] / "benchmarks" / "results" / "scripts.json")], "a plan runs by `pstar run"),
        ([SCRIPT, "--gpu-memory", "much"], "much"),
        ([SCRIPT, "--machine", "nowhere"], "nowhere"),
        ([SCRIPT, "--policy", "tidal"], "tidal"),
        ([SCRIPT, "--device", "tpu"], "device 'tpu' is not known"),
        ([SCRIPT, "--steps", "3"], "unknown flag '--steps'"),
        ([], "SCRIPT"),
    ],
)
def test_a_wrong_flag_is_one_line_before_the_script_runs(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = launched(capsys, *flags)
    assert status == 2 and not out and words in err and "Traceback" not in err
