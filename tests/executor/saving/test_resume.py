"""Going on from a checkpoint: bit by bit under the same plan, and under any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thinned import by_turns

import executor
from pstar_sim.core.plan import Settings

STEPS, SAVED_AFTER = 4, 2


def steps(kit: Any, run: Any, count: int) -> list[float]:
    micro_batches = run.plan.workload.micro_batches
    return [kit.train_alone(run.model, run.optimizer, run.batches, micro_batches) for _ in range(count)]


def everything(run: Any) -> dict[str, torch.Tensor]:
    """Parameters, masters and moments by name."""
    session = run.session
    found = {f"param/{n}": torch.as_tensor(t).clone() for n, t in run.model.state_dict().items()}
    for index, tensor in enumerate(run.plan.workload.tensors):
        if tensor.tied_to is None and not tensor.frozen:
            for name in ("param32", "momentum", "variance"):
                found[f"{name}/{tensor.name}"] = session.reader.state_value(index, name)
    return found


def skip(run: Any, count: int) -> None:
    for _ in range(count * run.plan.workload.micro_batches):
        next(run.batches)


@pytest.mark.parametrize(
    ("policy", "micro_batches", "update", "dtype"),
    by_turns(
        [("tide", 1), ("tide", 2), ("zero_offload", 1), ("zero_offload", 2)],
        [("step", torch.float32), ("step", torch.bfloat16), ("eager", torch.float32), ("eager", torch.bfloat16)],
    ),
)
def test_the_loss_curve_is_that_of_the_uninterrupted_run(
    start: Callable[..., Any],
    kit: Any,
    tmp_path: Path,
    policy: str,
    micro_batches: int,
    update: str,
    dtype: torch.dtype,
) -> None:
    """Four rows of 16 without --whole."""
    options: Any = {"micro_batches": micro_batches, "update": update, "dtype": dtype}
    whole = start("gpt2", policy, **options)
    curve = steps(kit, whole, SAVED_AFTER)
    whole.optimizer.save(tmp_path / "c")  # right behind step(): its updates are in flight, and are waited for
    curve += steps(kit, whole, STEPS - SAVED_AFTER)
    again = start("gpt2", policy, plan=whole.plan, **options)
    steps(kit, again, 1)  # other values and moments than the checkpoint's
    assert again.optimizer.load(tmp_path / "c").iteration == SAVED_AFTER
    again.batches = kit.batches(kit.build("gpt2")[1])
    skip(again, SAVED_AFTER)
    assert steps(kit, again, STEPS - SAVED_AFTER) == curve[SAVED_AFTER:]
    mine, theirs = everything(again), everything(whole)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_on_streams_that_come_late(start: Callable[..., Any], kit: Any, tmp_path: Path, micro_batches: int) -> None:
    from executor.devices.virtual_streams import VirtualStreams

    def late() -> VirtualStreams:
        return VirtualStreams(delays=lambda queue: 1e-3)

    whole = start("gpt2", "tide", micro_batches=micro_batches, backend=late())
    steps(kit, whole, SAVED_AFTER)
    whole.optimizer.save(tmp_path / "c")
    curve = steps(kit, whole, 2)
    again = start("gpt2", "tide", micro_batches=micro_batches, plan=whole.plan, backend=late())
    again.optimizer.load(tmp_path / "c")
    skip(again, SAVED_AFTER)
    assert steps(kit, again, 2) == curve


@pytest.mark.parametrize(
    "policy, options",
    [
        ("all_on_gpu", {}),
        ("zero_offload", {}),
        ("patrickstar", {}),
        ("tide", {"micro_batches": 2}),
        ("tide", {"update": "eager"}),
        ("tide", {"clip": 1e6}),
    ],
    ids=["all_on_gpu", "zero_offload", "patrickstar", "micro-batches", "eager", "clip"],
)
def test_under_another_plan(
    start: Callable[..., Any], kit: Any, tmp_path: Path, policy: str, options: dict[str, Any]
) -> None:
    first = start("gpt2", "static_partition", dtype=torch.bfloat16)
    steps(kit, first, SAVED_AFTER)
    first.optimizer.save(tmp_path / "c")
    second = start("gpt2", policy, dtype=torch.bfloat16, **options)
    second.optimizer.load(tmp_path / "c")
    mine, theirs = everything(second), everything(first)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    steps(kit, second, 1)
    with second.session.still():
        assert set(second.session.contents.steps_taken.values()) == {SAVED_AFTER + 1}


def test_under_another_chunk_size(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    model, draw = kit.build("llama")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    plans = [
        kit.tight_plan("static_partition", w, Settings(clip=False, update="step", chunk_bytes=size))
        for size in (2 << 20, 4 << 20)
    ]
    runs = [start("llama", "static_partition", plan=plan) for plan in plans]
    steps(kit, runs[0], 2)
    runs[0].optimizer.save(tmp_path / "c")
    runs[1].optimizer.load(tmp_path / "c")
    skip(runs[1], 2)
    assert steps(kit, runs[1], 2) == pytest.approx(steps(kit, runs[0], 2), rel=1e-6)


def test_from_bf16_to_fp32_the_masters_are_kept(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    first = start("llama", "tide", dtype=torch.bfloat16)
    steps(kit, first, 1)
    first.optimizer.save(tmp_path / "c")
    second = start("llama", "tide")
    second.optimizer.load(tmp_path / "c")
    mine, theirs = everything(second), everything(first)
    assert all(torch.equal(mine[k], theirs[k]) for k in theirs if not k.startswith("param/"))
    assert all(torch.equal(mine[k.replace("param32/", "param/")], theirs[k]) for k in theirs if k.startswith("param32"))


def test_random_numbers_go_on_where_they_were(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    import random

    import numpy

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    run = start("mlp", "tide")
    run.optimizer.save(tmp_path / "c")
    first = draw()
    run.optimizer.load(tmp_path / "c", generators=False)
    assert draw() != first
    run.optimizer.load(tmp_path / "c")
    assert draw() == first


def test_the_scale_and_the_groups_go_on(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = start("gpt2", "tide", dtype=torch.float16)
    steps(kit, run, 2)
    run.optimizer.param_groups[0]["lr"] = 0.123
    run.session.scaling.scale = 512.0
    run.optimizer.save(tmp_path / "c")
    again = start("gpt2", "tide", plan=run.plan, dtype=torch.float16)
    again.optimizer.load(tmp_path / "c")
    assert again.optimizer.param_groups[0]["lr"] == 0.123 and again.session.scaling.scale == 512.0
    again.batches = run.batches
    rows = [next(run.batches) for _ in range(2)]
    losses = []
    for one in (run, again):
        one.batches = iter(rows)
        losses.append(steps(kit, one, 2))
    assert losses[0] == losses[1]


def test_frozen_parameters_come_from_the_weights(kit: Any, tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        model, draw = kit.build("llama", seed=seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        return model.bfloat16(), draw

    model, draw = build(0)
    batch = draw(torch.Generator().manual_seed(9))
    plan = kit.tight_plan("tide", kit.workload_of(model, batch), Settings(clip=False, update="step"))
    model, optimizer = executor.prepare(model, plan, executor.AdamW())
    kit.train_alone(model, optimizer, kit.batches(draw), 1)
    optimizer.save(tmp_path / "c")
    other, again = executor.prepare(build(3)[0], plan, executor.AdamW())
    again.load(tmp_path / "c")
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
    for one in (optimizer, again):
        one.session.close()


def test_the_iterations_of_both_runs_are_counted(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = start("mlp", "tide")
    steps(kit, run, 3)
    run.optimizer.save(tmp_path / "c")
    again = start("mlp", "tide", plan=run.plan)
    steps(kit, again, 1)
    assert again.optimizer.load(tmp_path / "c").iteration == 3
    steps(kit, again, 2)
    again.optimizer.save(tmp_path / "c")
    assert run.optimizer.load(tmp_path / "c").iteration == 5


# -- pstar run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A job on a tiny GPT-2 with its plan, and its folder."""
    from executor.capture import capture
    from executor.run import TrainingJob
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.policy.registry import find_policy

    folder = tmp_path_factory.mktemp("job")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("to be or not to be, that is the question; " * 50)
    w = capture("tiny-gpt2", batch=2, sequence=32, micro_batches=2, dtype="bf16")
    plan = find_policy("tide")(w, load_machine("virtual", gpu_memory="20MB"), Settings(update="step", clip=True))
    return plan, TrainingJob.of_plan(plan, "tiny-gpt2", data=f"text:{folder / 'text'}", lr=1e-3, seed=3), folder


def losses(result: Any) -> list[tuple[int, float]]:
    return [(r.step, r.loss) for r in result.reports]


def test_a_text_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    """A folder's files stand where its name does; nothing behind a link to a folder, nothing without a known suffix."""
    from executor.running.data import open_data

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.txt").write_text("x")
    text = tmp_path / "text"
    for name, content in {
        "a.txt": "3",
        "a/z.md": "1",
        "a-b/c/y.py": "2",
        "b.bin": "-",
        "b/w": "-",
        "c.txt": "4",
    }.items():
        (text / name).parent.mkdir(parents=True, exist_ok=True)
        (text / name).write_text(content)
    (text / "linked").symlink_to(tmp_path / "elsewhere")
    assert bytes(open_data(f"text:{text}").bytes.tolist()) == b"1234"


def test_a_job_goes_on_with_its_data(job: Any, tmp_path: Path) -> None:
    from executor.running.keeping import Keeping

    plan, job, _ = job
    ck = str(tmp_path / "c")
    whole = losses(job.run(plan, steps=5))
    first = job.run(plan, steps=3, keeping=Keeping(save=ck, every=2))
    second = job.run(plan, steps=5, keeping=Keeping(save=ck, resume=ck))
    assert losses(first) + losses(second) == whole
    assert [step for step, _ in losses(second)] == [3, 4]
    assert any("checkpoint" in note for note in second.notes)


def test_the_seed_is_that_of_dropout_too(tmp_path: Path) -> None:
    from executor.capture import capture
    from executor.run import TrainingJob
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.policy.registry import find_policy

    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 32, '
        '"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.5}'
    )
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question; " * 50)
    name = f"hf:{tmp_path / 'config.json'}"
    w = capture(name, batch=2, sequence=32, dtype="fp32")
    plan = find_policy("tide")(w, load_machine("virtual", gpu_memory="20MB"), Settings(clip=True))
    job = TrainingJob.of_plan(plan, name, data=f"text:{tmp_path}", lr=1e-3, seed=3)
    curves = []
    for state in (0, 1):
        torch.manual_seed(state)  # whatever was drawn before
        curves += [losses(job.run(plan, steps=2)), [(r.step, r.loss) for r in job.run_plain(plan, steps=2)]]
    assert curves[1:] == curves[:-1]


def test_another_text_begins_anew_and_says_so(job: Any, tmp_path: Path) -> None:
    import dataclasses

    from executor.running.keeping import Keeping

    plan, job, _ = job
    ck = str(tmp_path / "c")
    job.run(plan, steps=1, keeping=Keeping(save=ck))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.txt").write_text("all the world is a stage " * 40)
    other = dataclasses.replace(job, data=f"text:{tmp_path / 'other'}")
    result = other.run(plan, steps=2, keeping=Keeping(resume=ck))
    assert result.notes == (f"continued from checkpoint {ck}; the data is not the checkpoint's and begins anew",)


def test_a_job_begins_from_weights(job: Any, tmp_path: Path) -> None:
    import dataclasses

    from executor.running.keeping import Keeping

    plan, job, _ = job
    job.run(plan, steps=1, keeping=Keeping(save=str(tmp_path / "c")))
    begun = dataclasses.replace(job, weights=str(tmp_path / "c")).run(plan, steps=1)
    assert "stored in bfloat16: fp32 masters from the file's values, working copies in bf16" in begun.notes[0]


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    from pstar_sim.cli import main

    status = main(list(arguments))
    return status, capsys.readouterr().err.strip()


def test_what_the_command_line_refuses(job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from executor.running.keeping import Keeping

    plan, job, _ = job
    plan.save(tmp_path / "plan.json")
    ck = str(tmp_path / "c")
    job.run(plan, steps=2, keeping=Keeping(save=ck))
    run = ("run", str(tmp_path / "plan.json"), "--model", "tiny-gpt2")
    for flags, message in (
        (("--save-every", "2"), "--save-every 2 needs a folder: add --save FOLDER"),
        (("--save", ck), "the folder holds a checkpoint, of iteration 2, that would be lost"),
        (("--resume", ck, "--steps", "2"), "2 steps are done and --steps 2 asks for no more"),
        (("--resume", str(tmp_path / "no")), "is not a folder; give a folder that optimizer.save wrote"),
    ):
        status, error = run_cli(capsys, *run, *flags)
        assert status == 2 and message in error and "\n" not in error, error


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_times_every_run_goes_on(python: str) -> None:
    """One job without disks and one with them."""
    import subprocess

    script = Path(__file__).parents[3] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [python, str(script), "--count", "4", "--only", "bf16, 1 ", "--seed", "5", "--no-write"],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n4 kills, " in done.stdout and ", 0 problems" in done.stdout and "tide on disks" in done.stdout


def test_dropout_goes_on_with_its_random_numbers(kit: Any, tmp_path: Path) -> None:
    from torch import nn

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(24, 32), nn.Linear(32, 24)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((self.b(nn.functional.dropout(self.a(x), 0.5)) - y) ** 2).mean()

    torch.manual_seed(0)
    draw = kit.build("mlp")[1]
    plan = kit.tight_plan(
        "tide", kit.workload_of(Noisy(), draw(torch.Generator().manual_seed(9))), Settings(clip=False, update="step")
    )
    curves = []
    for resumes in (False, True):
        model, optimizer = executor.prepare(Noisy(), plan, executor.AdamW(lr=1e-2))
        rows = kit.batches(draw)
        curve = [kit.train_alone(model, optimizer, rows, 1) for _ in range(2)]
        if resumes:
            optimizer.load(tmp_path / "c")
        else:
            optimizer.save(tmp_path / "c")
        curves.append([kit.train_alone(model, optimizer, rows, 1) for _ in range(3)])
        optimizer.session.close()
        torch.manual_seed(99)
        assert curve
    assert curves[0] == curves[1]
