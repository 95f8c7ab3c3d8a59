"""What each of two processes of test_scripts_of_ranks.py runs: a Trainer and a loop under DistributedDataParallel, and
the same by a plan. A launcher starts `scripts_of_ranks.py FOLDER`; results are in FOLDER/PART.RANK.json."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import executor
from pstar_sim.errors import PstarError

STEPS = 3


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference of two parameters."""
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - p).abs().max()) for name, p in theirs.items())


def refusal_of(action: Callable[[], object]) -> str:
    """The words in which the action is refused; "" if it is not."""
    try:
        action()
    except PstarError as error:
        return str(error)
    return ""


# -- a loop -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return x.square().mean()


def looped(model: nn.Module, optimizer: Any, rank: int, width: int = 48) -> list[float]:
    """Losses of steps on this rank's own rows."""
    torch.manual_seed(7 + rank)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(4, width))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    optimizer: torch.optim.Optimizer = Adafactor(
        model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False
    )
    return optimizer


def in_8_bits(model: nn.Module) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=1e-3, eps=1e-3)
    return optimizer


def others() -> list[tuple[str, Callable[[nn.Module], torch.optim.Optimizer], str]]:
    """Optimizers of each granularity: elements and blocks in slices, whole tensors where nothing is cut."""
    found: list[tuple[str, Callable[[nn.Module], torch.optim.Optimizer], str]] = [
        ("sgd", lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9), "tide"),
        ("adafactor", adafactor, "all_on_gpu"),
    ]
    if find_spec("bitsandbytes") is not None:
        found.append(("8 bits", in_8_bits, "tide"))
    return found


def beside(make: Callable[[nn.Module], torch.optim.Optimizer], policy: str, rank: int) -> float:
    """Returns how far the parameters of a plan are from those under DistributedDataParallel."""
    width = 80  # 6,400 elements: slices of two ranks end inside a matrix
    replica, model = nn.parallel.DistributedDataParallel(Net(width)), Net(width)
    losses = looped(replica, make(replica), rank, width)
    size = 4 * sum(p.numel() for p in model.parameters())
    memory, own = 40 * size if policy == "all_on_gpu" else 3 * size // 2, make(model)
    _, optimizer = executor.offload(model, own, (torch.zeros(4, width),), gpu_memory=memory, policy=policy)
    assert looped(model, optimizer, rank, width) == losses
    difference = apart(weights(model), weights(replica.module))
    optimizer.session.close()
    return difference


def loop(folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    model, replica = Net(), nn.parallel.DistributedDataParallel(Net())
    plain = looped(replica, torch.optim.AdamW(replica.parameters(), lr=1e-3, eps=1e-3), rank)
    own = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    model, optimizer = executor.offload(model, own, (torch.zeros(4, 48),), gpu_memory="40KB", policy="tide")
    losses = looped(model, optimizer, rank)
    session = optimizer.session
    other = Net()
    cut = refusal_of(
        lambda: executor.offload(other, adafactor(other), (torch.zeros(4, 48),), gpu_memory="80KB", policy="tide")
    )
    return {
        "others": {f"{name}, {policy}": beside(make, policy, rank) for name, make, policy in others()}, "cut": cut,
        "plain": plain, "losses": losses, "apart": apart(weights(model), weights(replica.module)),
        "ranks": len(session.plan.machine.ranks), "deviations": list(session.deviation_log),
        "renewed": refusal_of(lambda: session.renew(session.plan)),
        "moved": session.status().links["h2d"].moved_bytes,
    }  # fmt: skip


# -- a Trainer --------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from scripts_of_ranks import trainer
trainer(Path(sys.argv[1]), bf16=True).train()
"""


def trainer(folder: Path, **arguments: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    wanted = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "learning_rate": 1e-3, "adam_epsilon": 1e-3, "use_cpu": True, "report_to": [],
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**wanted, **arguments})
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 96, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, use_cache=False))
    tokens = torch.randint(96, (32, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4])


def said_by(trainer: Any) -> dict[str, Any]:
    """Losses and norms of each step, and the loss of an evaluation."""
    log = trainer.state.log_history
    found = {key: [row[key] for row in log if key in row] for key in ("loss", "grad_norm")}
    return {**found, "eval_loss": trainer.evaluate()["eval_loss"]}


def trained(folder: Path) -> dict[str, Any]:
    from pstar_sim.cli import main

    plain = trainer(folder / "plain")
    plain.train()
    mine = executor.hf.offload(trainer(folder / "mine", save_strategy="steps", save_steps=2), "400KB", policy="tide")
    mine.train()
    mine.save_model(str(folder / "saved"))
    done, said = weights(mine.model), said_by(mine)
    output = mine.model.lm_head.weight
    refused = refusal_of(lambda: output.detach().mul_(2))
    mine.offload_session.close()
    with torch.no_grad():
        output.mul_(2)
    written = bool(torch.equal(output, 2 * done["transformer.wte.weight"]))
    again = executor.hf.offload(trainer(folder / "again"), "400KB", policy="tide")
    again.train(resume_from_checkpoint=str(folder / "mine" / "checkpoint-2"))
    resumed = weights(again.model)
    again.offload_session.close(restore=False)
    plainly = trainer(folder / "plainly")
    plainly.train(resume_from_checkpoint=str(folder / "mine" / "checkpoint-2"))
    script = folder / f"{os.environ['RANK']}.py"
    script.write_text(SCRIPT)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        status = main(
            ["launch", str(script), "--gpu-memory", "400KB", "--policy", "tide", "--", str(folder / "launch")]
        )
    return {
        "plain": said_by(plain), "mine": said,
        "apart": apart(done, weights(plain.accelerator.unwrap_model(plain.model))),
        "plainly_apart": apart(done, weights(plainly.accelerator.unwrap_model(plainly.model))),
        "resumed_apart": apart(resumed, done), "launched": status, "told": told.getvalue(),
        "refused": refused, "written": written,
    }  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, part in (("trainer", trained), ("loop", loop)):  # the Trainer begins the process group
        (folder / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(part(folder)))
    dist.barrier()
    dist.destroy_process_group()
