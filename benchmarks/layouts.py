"""Iterations of Megatron on A100s by tensor, data and pipeline parallelism, predicted and published.

Rows: VIA-Research/vTrain, data/ground_truth_single.csv (720, one node of 2 to 8 GPUs, models of 12 to 24 layers of
1,024) and ground_truth_multi.csv (47, a model of 39.1 billion parameters on 512 GPUs). All recompute every layer
(reentrant), run 1F1B in fp16 with Adam, and keep everything on the GPUs: `all_on_gpu` plans them. What the files do not
say is assumed: a vocabulary of 51,200, a tied head, attention by matrix products, clipping, and what Megatron does
without a flag: sums of gradients in fp16, and dropout, as in layouts_memory.py. And of layouts.csv, by `system`, the
iterations that recompute everything: BigScience's trials for a model of 176 billion parameters on 8 to 384 GPUs (tr11,
chronicles-prequel), and those of Korthikanti et al., 2022, table 5. BigScience shards the states (ZeRO-1); here each
rank has all, on GPUs with room for them, which costs a tenth of a second.

[Note: many micro-batches] With more than FOLD per stage, the seconds are those of two runs with fewer, and from there a
straight line: in the middle of 1F1B every micro-batch takes as long.

The error is predicted / published - 1; its mean is that of its size (MAPE), as vTrain gives its own (8.4 % on one node,
14.7 % on several). tau is Kendall's rank correlation over the rows of one model and global batch, in the mean.

[Note: scatter] If seconds of a micro-batch are linear in its size, an iteration of m micro-batches of b sequences in p
stages takes (m + p - 1) (x + y b). With x and y of each layout fitted to its own rows, what is left is what the
measurements scatter.

[Note: fitted rows] `operator_us` of megatron (catalog/frameworks.toml) had the smallest mean error of the first, third,
fifth ... row of one node, to a whole microsecond, when sums of gradients were in fp32 and borders of stages were sent
whole. All others are predicted alone.

    python benchmarks/layouts.py [--every N]        # writes benchmarks/results/layouts.json
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from _results import write_result
from msgspec import structs
from scipy.optimize import nnls
from scipy.stats import kendalltau

from pstar_sim.catalog.catalog import load_catalog
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.plan import Settings
from pstar_sim.errors import PstarError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages import plan_stages
from pstar_sim.workload.parallelism import Parallelism

DATA = Path(__file__).parent / "data"
FILES = {"one node": "vtrain_single.csv", "several nodes": "vtrain_multi.csv"}
SYSTEMS = {"tr11": "Megatron-DeepSpeed (BigScience)", "Korthikanti": "Megatron-LM (Korthikanti 2022, table 5)"}
FOLD = 2
CATALOG = load_catalog()
VOCABULARY = 51_200
DROPOUT = "0.1"
SETTINGS = Settings(sums="16-bit")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published iteration; the names are those of the file's columns."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float
    memory: str | None = None

    @property
    def shape(self) -> ModelEntry:
        return structs.replace(
            model_entry("gpt2-xl"), name="vtrain", layers=self.layers, hidden=self.hidden, heads=self.heads,
            kv_heads=self.heads, ffn=4 * self.hidden, vocab=VOCABULARY, max_seq=self.sequence,
        )  # fmt: skip

    @property
    def job(self) -> Job:
        return Job(
            model="vtrain", batch=self.micro_batch * self.data, seq=self.sequence,
            micro_batches=self.global_batch // self.data // self.micro_batch, dtype="fp16", attention="math",
            kernels="megatron", early_stop=False, dropout=DROPOUT,
        )  # fmt: skip

    @property
    def machine(self) -> Machine:
        nodes = max(1, self.gpus // 8)
        machine = load_machine("a100-80x8", gpus=min(self.gpus, 8), nodes=nodes, gpu_memory=self.memory)
        return replace(machine, framework=CATALOG.framework("megatron"))


def rows_of(file: str) -> list[Row]:
    with (DATA / file).open(newline="", encoding="utf-8") as lines:
        table = list(csv.reader(lines))[1:]
    found = []
    for line in table:
        *figures, milliseconds = line[-11:]
        sizes = [int(figure) for figure in figures]
        names = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence", "tensor", "data")
        found.append(
            Row(**dict(zip((*names, "pipeline"), sizes)), seconds=float(milliseconds) / 1e3)  # type: ignore[arg-type]
        )
    return found


def rows_of_system(system: str) -> list[Row]:
    with (DATA / "layouts.csv").open(newline="", encoding="utf-8") as lines:
        table = [line for line in csv.DictReader(lines) if line["system"] == system]
    found = []
    for line in table:
        if line["metric"] != "iter_s" or line["recompute"] != "full":
            continue
        layers, hidden, heads = map(int, line["layers_hidden_heads"].split("/"))
        gpus, tensor, pipeline = int(line["gpus"]), int(line["tp"]), int(line["pp"])
        found.append(
            Row(
                gpus=gpus,
                global_batch=int(line["gbs"]),
                micro_batch=int(line["mbs"]),
                hidden=hidden,
                heads=heads,
                layers=layers,
                sequence=int(line["seq_len"]),
                tensor=tensor,
                data=gpus // tensor // pipeline,
                pipeline=pipeline,
                seconds=float(line["value"]),
                memory="400GB",
            )
        )
    return found


def predict(row: Row) -> float:
    spread = Parallelism(tensor=row.tensor, data=row.data, pipeline=row.pipeline)

    def seconds(micro_batches: int) -> float:
        job = replace(row.job, micro_batches=micro_batches)
        return plan_stages(job, row.machine, "all_on_gpu", spread, SETTINGS, shape=row.shape).iteration_s

    count, few = row.job.micro_batches or 1, FOLD * row.pipeline
    if count <= few:
        return seconds(count)
    one, other = seconds(few // 2), seconds(few)  # [Note: many micro-batches]
    return other + (count - few) * (other - one) / (few - few // 2)


def figures_of(rows: Sequence[Row], predicted: Sequence[float]) -> dict[str, object]:
    errors = [seconds / row.seconds - 1 for row, seconds in zip(rows, predicted)]
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(rows),
        "mean_error": statistics.mean(sizes),
        "median_error": statistics.median(sizes),
        "p90_error": sizes[int(0.9 * (len(sizes) - 1))],
        "bias": statistics.mean(errors),
        "tau": _tau(rows, predicted),
    }


def _tau(rows: Iterable[Row], predicted: Sequence[float]) -> float:
    groups: defaultdict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, seconds in zip(rows, predicted):
        groups[row.layers, row.hidden, row.global_batch, row.gpus].append((row.seconds, seconds))
    each = [kendalltau(*zip(*pairs)).statistic for pairs in groups.values() if len(pairs) > 2]
    return float(statistics.mean(each)) if each else float("nan")


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """[Note: scatter]

    error: root of the mean square, per degree of freedom.
    tau: of the fitted seconds.
    tau_at: that of the published seconds with random errors of that size, in the mean.
    """

    layouts: int
    error: float
    tau: float
    tau_at: float


def scatter(rows: Sequence[Row]) -> Scatter:
    layouts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for n, row in enumerate(rows):
        layouts[row.tensor, row.data, row.pipeline].append(n)
    published = np.array([row.seconds for row in rows])
    fitted, freedom = published.copy(), 0
    for places in layouts.values():
        jobs = [(rows[n].job.micro_batches or 1) + rows[n].pipeline - 1 for n in places]
        sizes = np.array([[count, count * rows[n].micro_batch] for n, count in zip(places, jobs)])
        found, _ = nnls(sizes / published[places, None], np.ones(len(places)))
        fitted[places] = sizes @ found
        freedom += max(0, len(places) - 2)
    error = float(np.sqrt(np.sum((fitted / published - 1) ** 2) / freedom))
    random = np.random.default_rng(0).normal(0, error, (1000, len(rows)))
    taus = [kendalltau(published, published * np.exp(each)).statistic for each in random]
    tau = float(kendalltau(published, fitted).statistic)
    return Scatter(layouts=len(layouts), error=error, tau=tau, tau_at=float(np.mean(taus)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th row alone")
    every = parser.parse_args().every
    figures: dict[str, object] = {}
    out_of_scope: list[str] = []
    sources = {name: rows_of(file) for name, file in FILES.items()}
    sources |= {name: rows_of_system(system) for name, system in SYSTEMS.items()}
    for name, rows in sources.items():
        begin = time.process_time()
        kept: list[Row] = []
        places: list[int] = []
        predicted: list[float] = []
        for place, row in enumerate(rows[::every]):
            try:
                predicted.append(predict(row))
                kept.append(row)
                places.append(place)
            except PstarError as error:
                out_of_scope.append(f"{row}: {error}")
        figures[name] = said = figures_of(kept, predicted)
        print(f"{name}: {said}, {time.process_time() - begin:.0f} s of CPU")
        if name == "several nodes":
            print(f"  {scatter(rows)}")
        busy = [n for n, row in enumerate(kept) if row.micro_batch >= 4 and row.tensor <= 2]
        if name == "one node":
            large = figures_of([kept[n] for n in busy], [predicted[n] for n in busy])
            figures["one node, micro-batches of 4 and more, tp of 1 and 2"] = large
            print(f"  of these micro-batches of 4 and more, tp of 1 and 2: {large}")
        if name == "one node" and every == 1:  # [Note: fitted rows]
            for odd, words in enumerate(("fitted", "not fitted")):
                half = [n for n, place in enumerate(places) if place % 2 == odd]
                said = figures_of([kept[n] for n in half], [predicted[n] for n in half])
                figures[f"{name}, {words}"] = said
                print(f"  of these {words}: {said}")
        figures[f"{name}, predicted"] = [round(seconds, 6) for seconds in predicted]
    for words in out_of_scope:
        print(f"out of scope: {words}")
    if every == 1:
        print(write_result("layouts", {**figures, "out_of_scope": out_of_scope}))


if __name__ == "__main__":
    main()
