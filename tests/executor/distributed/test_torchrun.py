"""`torchrun -m executor PLAN --model M`: real processes, started as a user starts them, by the line in docs/."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.models import forward_loss
from executor.run import MAX_GRAD_NORM, TrainingJob
from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.core.plan import load_plan
from pstar_sim.core.run_file import load_run
from pstar_sim.workload.trace import load_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 400.0  # imports of torch and transformers, twice, beside whatever else runs

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "several-gpus.md"
(LINE,) = re.findall(
    r"^torchrun (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)  # of two.json and small.json, in two processes
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2, "n_embd": 64,
    "vocab_size": 256, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MACHINE = '[machines.two]\ngpu = "virtual"\ngpus = 2\nlink = "virtual"\nhost = "virtual"\n'


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def torchrun(python: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """On a port that is free: torchrun's own is the same for all on the machine."""
    return subprocess.run(
        [python, "-W", "ignore", "-m", "torch.distributed.run", *shlex.split(LINE), *more],
        env={**os.environ, **ENVIRONMENT, "PET_STANDALONE": "1", "ZYGOTE_END": "whole"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def without_torchrun(python: str, folder: Path, **runs: dict[str, Any]) -> dict[str, list[tuple[int, str]]]:
    """(status, stderr) of each of the two processes of the line with more arguments, by the name of the run
    (ranks_of_a_line.py).

    runs: name -> {"arguments", "stop"}.
    """
    words = shlex.split(LINE)
    rows = [
        {**run, "name": name, "port": port, "arguments": [*words[words.index("executor") + 1 :], *run["arguments"]]}
        for (name, run), port in zip(runs.items(), free_ports(len(runs)), strict=True)
    ]
    place = folder / "said"
    place.mkdir()
    (place / "runs.json").write_text(json.dumps(rows))
    done = subprocess.run(
        [python, "-W", "ignore", str(Path(__file__).parents[1] / "ranks_of_a_line.py"), str(place)],
        env={**os.environ, **ENVIRONMENT},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: [
            (status, (place / f"{name}.{rank}.txt").read_text())
            for rank, status in enumerate(json.loads((place / f"{name}.json").read_text()))
        ]
        for name in runs
    }


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def test_two_processes_from_the_command_line(python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, trace, machine, file = (tmp_path / name for name in ("small.json", "t.parquet", "two.toml", "two.json"))
    config.write_text(json.dumps(CONFIG))
    machine.write_text(MACHINE)
    model = f"hf:{config}"
    assert main(["trace", model, "--batch", "2", "--seq", "16", "--dtype", "fp32", "-o", str(trace)]) == 0
    plan_for = ["plan", "--trace", str(trace), "--machine", str(machine), "--gpu-memory", "3MB", "--policy", "tide"]
    assert main([*plan_for, "-o", str(file)]) == 0
    capsys.readouterr()
    kept = ["--timeline", "run.{rank}.json", "--perfetto", "lanes.json", "--plot", "tide.{rank}.png"]
    kept += ["--record", "rec.pq", "--log-to", "steps.jsonl"]
    done = torchrun(python, tmp_path, "--json", *kept)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)  # the first rank speaks for all
    assert said["deviations"] == []
    assert set(said["moved_bytes"]) == {"h2d", "d2h", "net"}
    assert said["moved_bytes"] == said["predicted_moved_bytes"]
    assert max(said["peak_gpu_bytes"]) <= said["peak_gpu_bytes_at_most"]

    # What was kept: with {rank} in its name one file a rank, else the first rank's alone.
    assert {p.name for p in tmp_path.iterdir()} - {"small.json", "t.parquet", "two.toml", "two.json"} == {
        "run.0.json", "run.1.json", "lanes.json", "tide.0.png", "tide.1.png", "rec.pq", "rec.toml",
        "steps.jsonl",
    }  # fmt: skip
    for rank in range(2):
        both = load_run(tmp_path / f"run.{rank}.json")
        assert all(both.predicted.moved_bytes[lane] == both.measured.moved_bytes[lane] for lane in ("h2d", "d2h"))
        assert both.measured.peak_bytes["gpu"] <= load_plan(file).gpu_budget_bytes
        assert (tmp_path / f"tide.{rank}.png").read_bytes().startswith(b"\x89PNG")
    lanes = json.loads((tmp_path / "lanes.json").read_text())
    names = {e["args"]["name"] for e in lanes["traceEvents"] if e["name"] == "process_name"}
    assert names == {"tide (simulated)", "tide (measured)"}
    recorded = load_trace(tmp_path / "rec.pq")
    assert (recorded.source, recorded.params) == ("recorded", load_plan(file).workload.params)
    again = load_machine(str(tmp_path / "rec.toml"))
    assert len(again.ranks) == 2 and again.gpu.measured and again.host.measured

    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == said["losses"]  # of all ranks
    assert all(row["grad_norm"] > 0 for row in rows)

    # One process, the two ranks' batches joined: rank r takes every second batch of the same stream.
    job = TrainingJob.of_plan(load_plan(file), model, data=None, lr=3e-4, seed=0)
    built = job.build()
    batches = job.batches(built)
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=3e-4, fused=True)
    losses = []
    for _ in range(3):
        pair = [next(batches) for _ in range(2)]
        loss = forward_loss(built.module, {key: torch.cat([one[key] for one in pair]) for key in pair[0]})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(built.module.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert said["losses"] == pytest.approx(losses, rel=1e-6, abs=0)

    (tmp_path / "run.1.json").unlink()
    (tmp_path / "run.1.json").mkdir()
    log = tmp_path / "more.jsonl"
    saving = ["--save", "kept", "--keep", "1", "--log", log.name, "--steps", "9999"]
    ends = without_torchrun(
        python,
        tmp_path,
        stopped={"arguments": saving, "stop": str(log)},
        refused={"arguments": ["--timeline", "run.{rank}.json"]},
    )

    # SIGTERM, to one of them: both save after the same step, and end with its status.
    assert [status for status, _ in ends["stopped"]] == [143, 143]
    assert [text.count("pstar: stopped by SIGTERM after step") for _, text in ends["stopped"]] == [1, 0]
    (kept_folder,) = (tmp_path / "kept").iterdir()
    assert int(kept_folder.name.removeprefix("step-")) == len(log.read_text().splitlines())

    # A file that the second rank alone could not write: each says so, before anything is built.
    assert [
        (status, [line for line in text.splitlines() if line.startswith("pstar: ")]) for status, text in ends["refused"]
    ] == [
        (2, ["pstar: rank 1: argument --timeline: run.1.json is a folder; name a file"]),
        (2, ["pstar: argument --timeline: run.1.json is a folder; name a file"]),
    ]
