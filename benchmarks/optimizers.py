"""Every optimizer under plans, beside itself in a plain loop: losses, parameters and states after 20 steps, to the bit.

Cells are drawn so that each pair of an optimizer, dtype, policy, update, number of micro-batches and clipping that goes
together occurs at least once. Policies have budgets of accelerator memory under which chunks leave; `all_on_gpu` keeps
everything resident. bitsandbytes' optimizers run where the package is installed (on PYTHONPATH).

On two ranks over gloo, each optimizer runs under plans whose slices cut tensors, and under all_on_gpu; the plain loop
takes the mean of both ranks' gradients. Updates of whole tensors (Muon, Adafactor) run under all_on_gpu alone.

A cell that a policy or the engine refuses is printed with the reason. The run fails if a cell differs, and where an
optimizer has no cell that ran, on one rank or on two.

    python benchmarks/optimizers.py [--seed 41] [--least 80]      # writes benchmarks/results/optimizers.json
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _results import write_result
from torch import nn
from transformers.optimization import Adafactor

import executor
from pstar_sim.errors import PstarError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from plain_loop import train

WIDTH, ROWS, STEPS, CLIP = 96, 4, 20, 0.02
POLICIES = ("all_on_gpu", "zero_offload", "tide", "optimal", "patrickstar", "stronghold")


def matrices_and_rest(model: nn.Module) -> list[torch.optim.Optimizer]:
    inner = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(inner, lr=2e-2), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def of(optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: optimizer(model.parameters(), **settings)


def known() -> dict[str, Callable[[nn.Module], Any]]:
    found: dict[str, Callable[[nn.Module], Any]] = {
        "AdamW": of(torch.optim.AdamW, lr=1e-2, fused=True),
        "Adam": of(torch.optim.Adam, lr=1e-2, weight_decay=0.1, fused=True),
        "SGD": of(torch.optim.SGD, lr=1e-1, weight_decay=0.1),
        "SGD, momentum": of(torch.optim.SGD, lr=1e-1, momentum=0.9, weight_decay=0.01),
        "Adafactor": of(Adafactor, lr=1e-2, relative_step=False, scale_parameter=False),
    }
    if hasattr(torch.optim, "Muon"):
        found["Muon and AdamW"] = matrices_and_rest
    if find_spec("bitsandbytes") is not None:
        import bitsandbytes

        found |= {
            "AdamW, 8 bits": of(bitsandbytes.optim.AdamW8bit, lr=1e-2),
            "Lion, 8 bits": of(bitsandbytes.optim.Lion8bit, lr=1e-3),
            "Lion": of(bitsandbytes.optim.Lion32bit, lr=1e-3),
        }
    return found


class Cell(NamedTuple):
    optimizer: str
    dtype: str
    policy: str
    update: str
    micro_batches: int
    clip: bool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.float() ** 2).mean()


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batches(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(ROWS, WIDTH, generator=draw).to(dtype)


def difference(cell: Cell, make: Callable[[nn.Module], Any]) -> str:
    """Returns what differs; "" if nothing does. Raises PstarError for a refusal."""
    dtype = getattr(torch, cell.dtype)
    reference, model = net(dtype), net(dtype)
    plain, mine = make(reference), make(model)
    size = sum(p.numel() * p.element_size() for p in reference.parameters())
    memory = {"all_on_gpu": 40 * size, "zero_offload": 4 * size}.get(cell.policy, 3 * size // 2)
    losses = train(reference, plain, batches(dtype), STEPS, cell.micro_batches, clip=CLIP if cell.clip else None)
    _, optimizer = executor.offload(
        model, mine, (torch.zeros(ROWS, WIDTH, dtype=dtype),), gpu_memory=f"{memory}B", masters="none",
        micro_batches=cell.micro_batches, max_grad_norm=CLIP if cell.clip else None, update=cell.update,
        policy=cell.policy,
    )  # fmt: skip
    try:
        if train(model, optimizer, batches(dtype), STEPS, cell.micro_batches) != losses:
            return "losses"
        moved = optimizer.session.status().links["h2d"].moved_bytes
        if not moved and cell.policy != "all_on_gpu":
            return "nothing left the accelerator"
    finally:
        optimizer.session.close()
    names = [name for name, p in model.named_parameters() if not torch.equal(p, reference.get_parameter(name))]
    return f"parameters {names}" if names else ""


def cells(names: list[str], seed: int, least: int) -> list[Cell]:
    """Returns cells in which each pair of values occurs that goes together, and `least` at least."""
    rng = random.Random(seed)
    axes = (names, ("float32", "bfloat16"), POLICIES, ("step", "eager"), (1, 4), (False, True))
    every = [Cell(*values) for values in product(*axes)]
    every = [cell for cell in every if not (cell.clip and cell.update == "eager")]
    rng.shuffle(every)
    chosen: list[Cell] = []
    seen: set[tuple[object, ...]] = set()
    for cell in every:
        pairs = {(i, j, cell[i], cell[j]) for i, j in combinations(range(len(cell)), 2)}
        if pairs - seen:
            chosen.append(cell)
            seen |= pairs
    left = [cell for cell in every if cell not in chosen]
    return chosen + left[: max(0, least - len(chosen))]


RANKS = 2
CELLS_OF_RANKS = [
    Cell("", dtype, policy, "step", micro_batches, clip=False)
    for dtype, policy, micro_batches in (
        ("float32", "tide", 1),
        ("float32", "zero_offload", 1),
        ("float32", "zero3_offload", 4),
        ("float32", "all_on_gpu", 4),
        ("bfloat16", "tide", 1),
        ("bfloat16", "all_on_gpu", 1),
    )
]
"""With each optimizer. In bf16 one micro-batch: on several ranks gradients of several are added up in fp32."""


def difference_on_ranks(cell: Cell, make: Callable[[nn.Module], Any], rank: int) -> str:
    """As `difference`, on this rank of a process group."""
    dtype = getattr(torch, cell.dtype)
    reference, model = net(dtype), net(dtype)
    plain, mine = make(reference), make(model)
    size = sum(p.numel() * p.element_size() for p in reference.parameters())
    memory = {"all_on_gpu": 40 * size, "zero_offload": 8 * size, "zero3_offload": 3 * size}
    _, optimizer = executor.offload(
        model, mine, (torch.zeros(ROWS, WIDTH, dtype=dtype),), gpu_memory=memory.get(cell.policy, 3 * size // 2),
        masters="none", micro_batches=cell.micro_batches, policy=cell.policy,
    )  # fmt: skip
    rows = batches(dtype)
    try:
        for _ in range(STEPS):
            sums: list[list[torch.Tensor]] = []  # of each rank, or of all ranks where each micro-batch is exchanged
            for _ in range(cell.micro_batches):
                of_ranks = [next(rows) for _ in range(RANKS)]
                loss = model(of_ranks[rank]) / cell.micro_batches
                loss.backward()
                losses = [reference(batch) / cell.micro_batches for batch in of_ranks]
                if loss.item() != losses[rank].item():
                    return "losses"
                gradients = [torch.autograd.grad(each / RANKS, list(reference.parameters())) for each in losses]
                parts = gradients if cell.policy == "all_on_gpu" else [map(sum, zip(*gradients))]
                sums = [[*map(sum, zip(*pair))] for pair in zip(sums, parts)] if sums else [[*part] for part in parts]
            for p, *parts_of_p in zip(reference.parameters(), *sums):
                p.grad = sum(parts_of_p)
            for each in plain if isinstance(plain, list) else [plain]:
                each.step()
                each.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        values = model.state_dict()
        names = [name for name, p in reference.named_parameters() if not torch.equal(values[name], p)]
    finally:
        optimizer.session.close(restore=False)
    return f"parameters {names}" if names else ""


def of_rank(rank: int, folder: str) -> None:
    """Run the cells of ranks; the first rank writes optimizer, cell and what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    lines = []
    for (name, make), cell in product(known().items(), CELLS_OF_RANKS):
        named = cell._replace(optimizer=name)
        try:
            said = difference_on_ranks(named, make, rank)
        except PstarError as error:
            said = f"refused: {error}"
        lines.append(f"{name}\t{cell.dtype}, {cell.policy}, {cell.micro_batches}\t{said}\n")
    if rank == 0:
        Path(folder, "lines").write_text("".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks() -> list[list[str]]:
    """Returns (optimizer, cell, what differs or why it is refused) on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (folder,), nprocs=RANKS)
        return [line.split("\t") for line in Path(folder, "lines").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--least", type=int, default=80)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    makers = known()
    ran: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: list[str] = []
    begin = time.perf_counter()
    for cell in cells(list(makers), asked.seed, asked.least):
        try:
            said = difference(cell, makers[cell.optimizer])
        except PstarError as error:
            refused[f"{cell.optimizer}, {cell.policy}, {cell.update}: {error}"] += 1
            continue
        ran[cell.optimizer] += 1
        if said:
            wrong.append(f"{cell}: {said}")
    missing = [name for name in makers if not ran[name]]
    print(f"{sum(ran.values())} cells ran, {len(wrong)} differ: {dict(ran)}; none of {missing or 'no optimizer'}")
    ran_on_ranks: Counter[str] = Counter()
    for name, cell, said in on_ranks():
        if said.startswith("refused"):
            refused[f"{name} on {RANKS} ranks: {said.removeprefix('refused: ')}"] += 1
            continue
        ran_on_ranks[name] += 1
        if said:
            wrong.append(f"{name} on {RANKS} ranks, {cell}: {said}")
    print(f"{sum(ran_on_ranks.values())} cells ran on {RANKS} ranks: {dict(ran_on_ranks)}")
    print("\n".join([*wrong, *(f"refused {count} times: {words}" for words, count in refused.items())]))
    missing += [name for name in makers if not ran_on_ranks[name]]
    print(f"{time.perf_counter() - begin:.0f} s")
    result = {"ran": dict(ran), "ran_on_ranks": dict(ran_on_ranks), "wrong": wrong, "refused": dict(refused)}
    print(write_result("optimizers", {**result, "steps": STEPS}))
    if wrong or missing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
