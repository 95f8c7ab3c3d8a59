"""Memory and seconds of frameworks' runs by tensor, context, expert and pipeline parallelism, predicted and published.

Rows, each as the flags or the file of its framework, which `--like` reads (frameworks/), as a user would replay it:

- megatron_golden.csv: the largest allocated bytes of the last rank, which has the last stage, in Megatron-LM's
  functional tests on 8 A100s. The vocabulary is GPT-2's, or BERT's cased one, padded to 128 times tp, where the file
  names none. Megatron's BERT has the layers of its GPT, as which it is predicted, without its head's transform (1,024 x
  1,024) and the binary one.
- layouts.csv: SimuMax's runs of Megatron-LM on 8 B200s (largest allocated bytes of a rank; milliseconds), BigScience's
  (memory as nvidia-smi shows it, whether it ran out), Megatron-Bridge's containers in BF16, torchtitan's table
  (tokens/s; peak), and the iterations of Korthikanti et al., 2022, that recompute attention alone or all.

Predicted are the largest bytes of the plan, of the last stage or of any, without the CUDA context and the allocator's
own. Of many micro-batches one more is planned than there are stages (interleaved, two per stage), where every stage has
its peak, and for seconds those of layouts.py. What a row has beyond that puts it out of scope, with the reason.

"trillion" is Whale's claim (Jia et al., 2022): a model of a trillion parameters with experts on 480 V100s of 32 GB, of
24 layers of 960 experts, 1,024 wide, with three matrices of 14,128 each (assumed).

    python benchmarks/layouts_memory.py        # writes benchmarks/results/layouts_memory.json
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from _results import write_result
from layouts import DATA, FOLD
from msgspec import structs

from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ExpertsShape, ModelEntry, model_entry
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.frameworks import megatron, torchtitan
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.follows import Follows, as_run, stands_for
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages import PlannedStages, plan_stages
from pstar_sim.units import GIB
from pstar_sim.workload.parallelism import Parallelism

GOLDEN = "megatron_golden.csv"
FLAGS = {key.path for key in megatron.KEYS}
NOT_PREDICTED = {
    "decoder-last-pipeline-num-layers": "stages of other depths than equal ones",
    "use-megatron-fsdp": "Megatron's own FSDP",
    "swiglu": "a gpt with gated layers",
    "num-query-groups": "a gpt with grouped keys",
}
"""Column of the golden rows -> why a row that has it is out of scope."""


VOCABULARIES = {"gpt": 50_257, "bert": 28_996}


class OutOfScope(PstarError):
    pass


@dataclass(frozen=True, kw_only=True)
class Row:
    """value: published; kind: "peak of the last stage", "peak" (bytes) or "seconds"."""

    source: str
    name: str
    kind: str
    value: float
    machine: Machine
    shape: ModelEntry
    configuration: Configuration
    changes: Mapping[str, object]

    def predict(self) -> float:
        c, machine = self.configuration, as_run(self.machine, self.configuration)
        spread, data = c.parallelism or Parallelism(), c.data_on(self.machine)
        assert c.batch_per_gpu is not None
        count = c.micro_batches or max(1, (c.train_batch or 0) // (c.batch_per_gpu * data))
        policy = Follows(replace(c, policy=stands_for(c, data * spread.context)), self.name)

        def plan(micro_batches: int) -> PlannedStages:
            job = Job(
                model=self.shape.name, batch=c.batch_per_gpu * data, seq=c.detail["sequence"],
                micro_batches=micro_batches, dtype=c.dtype, checkpointing=c.checkpointing, recompute=c.recompute,
                kernels=c.kernels, dropout=c.dropout, **self.changes,
            )  # fmt: skip
            settings = Settings(sums=c.sums or Settings.sums)
            return plan_stages(job, machine, policy, spread, settings, shape=self.shape)

        few = FOLD * spread.pipeline
        if self.kind == "seconds":
            if count <= few:
                return plan(count).iteration_s
            one, other = plan(few // 2).iteration_s, plan(few).iteration_s
            return other + (count - few) * (other - one) / (few - few // 2)
        enough = spread.pipeline + 1 if spread.virtual == 1 else few
        timelines = plan(min(count, enough)).timelines
        peaks = [timeline.peak_bytes["gpu"] for timeline in timelines]
        return float(peaks[-1] if self.kind == "peak of the last stage" else max(peaks))


def _table(file: str) -> list[dict[str, str]]:
    with (DATA / file).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def golden() -> Iterator[Callable[[], Row]]:
    for line in _table(GOLDEN):
        yield lambda line=line: _golden(line)  # type: ignore[misc]


def _golden(line: Mapping[str, str]) -> Row:
    name, tensor = line["case"], int(line["tensor-model-parallel-size"] or 1)
    why = next((words for column, words in NOT_PREDICTED.items() if line[column]), None)
    if line["suite"] == "t5":
        why = "no preset"
    elif "_mla" in name or "_defer_embedding_wgrad" in name:
        why = "a gpt with latent attention" if "_mla" in name else "gradients of the table that are put off"
    if why is not None:
        raise OutOfScope(f"{name}: {why}")
    given = {column: value for column, value in line.items() if value and f"--{column}" in FLAGS}
    flags = " ".join(f"--{column}" + ("" if value == "True" else f" {value}") for column, value in given.items())
    hidden, heads = int(line["hidden-size"]), int(line["num-attention-heads"])
    vocabulary = int(line["vocab-size"] or VOCABULARIES[line["suite"]])
    shape = structs.replace(
        model_entry("gpt2"), layers=int(line["num-layers"]), hidden=hidden, heads=heads, kv_heads=heads,
        ffn=4 * hidden, vocab=-(-vocabulary // (128 * tensor)) * 128 * tensor, max_seq=int(line["seq-length"]),
        tied=not line["untie-embeddings-and-output-weights"],
    )  # fmt: skip
    unfused = line["attention-backend"] in ("unfused", "local") or line["transformer-impl"] == "local"
    return Row(
        source="golden", name=name, kind="peak of the last stage", value=float(line["max_allocated_bytes"]),
        machine=load_machine("a100-80x8"), shape=shape, configuration=megatron.read(flags, name),
        changes={"attention": "math" if unfused else "flash"},
    )  # fmt: skip


def published() -> Iterator[Callable[[], Row]]:
    for line in _table("layouts.csv"):
        yield lambda line=line: _published(line)  # type: ignore[misc]


_MODELS = {
    "llama3-70b, cut": "llama-3.1-70b", "llama3-405b, cut": "llama-3.1-405b", "deepseek-v3, cut": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b", "llama-3.1-8b": "llama-3.1-8b", "llama-3.1-70b": "llama-3.1-70b",
    "llama-3.1-405b": "llama-3.1-405b",
}  # fmt: skip
_NODES = {
    "8xB200": "b200x8", "DGX-B200": "b200x8", "DGX-H100": "h100-80x8", "DGX-GB200": "gb200x4",
    "H100-96GB HBM2e, 500 W, 8 a node": "h100-80x8",
}  # fmt: skip


def _published(line: Mapping[str, str]) -> Row:
    system = line["system"].partition(" ")[0]
    source = {"Megatron-DeepSpeed": "tr11", "Megatron-LM": "SimuMax"}.get(system, system)
    source = "Korthikanti" if "Korthikanti" in line["system"] else source
    gpt = source in ("tr11", "Korthikanti")
    degrees = {name: int(line[name] or 1) for name in ("tp", "pp", "cp", "ep", "vp")}
    gpus, sequence, batch = int(line["gpus"]), int(line["seq_len"]), int(line["mbs"])
    name = " ".join((line["model"], line["hardware"], *(f"{k}={v}" for k, v in degrees.items()), line["metric"]))
    layers, hidden, heads = map(int, line["layers_hidden_heads"].split("/"))
    node = "a100-80x8" if gpt else _NODES.get(line["hardware"])
    if line["model"].startswith("deepseek"):
        raise OutOfScope(f"{name}: the file does not say which of its layers have experts")
    if node is None:
        raise OutOfScope(f"{name}: no such machine in the catalog")
    if not gpt and line["model"] not in _MODELS:
        raise OutOfScope(f"{name}: no such model in the catalog")
    local = load_machine(node).local_ranks
    machine = load_machine(node, gpus=min(gpus, local), nodes=max(1, gpus // local), gpu_memory="400GB")
    whole = model_entry("gpt2-xl" if gpt else _MODELS[line["model"]])
    shape = structs.replace(whole, layers=layers)
    if gpt:
        sizes = {"hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": 4 * hidden, "vocab": 51_200}
        shape = structs.replace(shape, **sizes, max_seq=sequence)
    changes: dict[str, object] = {"attention": "math"} if gpt else {}
    if source == "torchtitan":
        changes["products"] = "fp8"
        content = {
            "training": {"local_batch_size": batch, "seq_len": sequence},
            "activation_checkpoint": {"mode": "full"},
            "parallelism": {
                "tensor_parallel_degree": degrees["tp"], "context_parallel_degree": degrees["cp"],
                "pipeline_parallel_degree": degrees["pp"],
                "pipeline_parallel_schedule": "Interleaved1F1B" if "interleaved" in line["note"] else "1F1B",
            },
        }  # fmt: skip
        configuration = torchtitan.read(content, name)
    else:
        flags = (
            f"--micro-batch-size {batch} --global-batch-size {line['gbs']} --seq-length {sequence} "
            f"--tensor-model-parallel-size {degrees['tp']} --pipeline-model-parallel-size {degrees['pp']} "
            f"--context-parallel-size {degrees['cp']} --expert-model-parallel-size {degrees['ep']} "
            f"{'--fp16' if gpt else '--bf16'} "
        )
        flags += "" if line["shard"] == "none" else "--use-distributed-optimizer "
        recompute = line["recompute"].partition(" ")[0]
        flags += f"--recompute-granularity {recompute} " if recompute in ("full", "selective") else ""
        flags += f"--num-virtual-stages-per-pipeline-rank {degrees['vp']} " if degrees["vp"] > 1 else ""
        sequence_parallel = source in ("SimuMax", "Megatron-Bridge") or "sequence" in line["recompute"]
        flags += "" if gpt else "--hidden-dropout 0 --attention-dropout 0 "  # as Llama and gpt-oss are trained
        flags += "--sequence-parallel" if sequence_parallel and degrees["tp"] > 1 else ""
        configuration = megatron.read(flags, name)
    value, metric = float(line["value"]), line["metric"]
    tokens = int(line["gbs"] or batch * (gpus // degrees["tp"] // degrees["pp"] // degrees["cp"])) * sequence
    kinds: dict[str, tuple[str, float]] = {
        "iter_ms": ("seconds", value / 1e3),
        **({"iter_s": ("seconds", value)} if source == "Korthikanti" else {}),
        "tokens_per_s_per_gpu": ("seconds", tokens / gpus / value),
        "gpu_max_alloc_GiB": ("peak", value * GIB),
        "gpu_peak_GiB": ("peak", value * GIB),
        "gpu_mem_GB": ("peak", value * GIB),
        "out_of_memory": ("peak of what ran out of 80 GiB", 80 * GIB),
    }
    if metric not in kinds:
        raise OutOfScope(f"{name}: layouts.py, or another row, has the run's seconds")
    kind, value = kinds[metric]
    return Row(
        source=source, name=name, kind=kind, value=value, machine=machine, shape=shape, configuration=configuration,
        changes=changes,
    )  # fmt: skip


def trillion() -> list[dict[str, object]]:
    machine, whole = load_machine("v100-32x8", nodes=60), model_entry("qwen3-30b-a3b")
    shape = structs.replace(
        whole, layers=24, hidden=1024, heads=16, kv_heads=16, own_head_dim=64, ffn=4096, qk_norm=False, vocab=21_128,
        experts=ExpertsShape(count=960, per_token=2, ffn=14_128),
    )  # fmt: skip
    rows: list[dict[str, object]] = []
    for text, batch, micro_batches, policy in (
        ("ep=480", 960, 1, "all_on_gpu"),
        ("ep=240,pp=2", 240, 4, "all_on_gpu"),
        ("ep=240,pp=2", 240, 4, "tide"),
    ):
        job = Job(model=whole.name, batch=batch, seq=512, micro_batches=micro_batches, dtype="fp16")
        row: dict[str, object] = {"parallel": text, "policy": policy, "sequences": batch * micro_batches}
        try:
            planned = plan_stages(job, machine, policy, Parallelism.parse(text), shape=shape)
            peak = max(timeline.peak_bytes["gpu"] for timeline in planned.timelines)
            row |= {"tokens_per_s": planned.tokens_per_s, "iteration_s": planned.iteration_s, "peak_bytes": peak}
        except DoesNotFit as error:
            row |= {"needed_bytes": error.needed_bytes}
        print(row)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="SOURCE", help="print the rows of one source and write nothing")
    only = parser.parse_args().only
    errors: dict[tuple[str, str], list[float]] = {}
    rows: list[dict[str, object]] = []
    out_of_scope: Counter[str] = Counter()
    known: dict[str, float] = {}
    for make in (*golden(), *published()):
        begin = time.process_time()
        try:
            row = make()
            if only not in (None, row.source):
                continue
            key = repr(replace(row, name="", value=0.0, configuration=replace(row.configuration, notes=())))
            if key not in known:
                known[key] = row.predict()
            predicted = known[key]
        except PstarError as error:
            out_of_scope[str(error)] += 1
            continue
        apart = predicted / row.value - 1
        errors.setdefault((row.source, row.kind), []).append(apart)
        said = {"source": row.source, "name": row.name, "kind": row.kind, "published": row.value}
        rows.append({**said, "predicted": predicted})
        print(
            f"{apart:+8.1%} {predicted:.4g} {row.value:.4g} {row.source} {row.name} {time.process_time() - begin:.1f} s"
        )
    figures: dict[str, object] = {}
    for (source, kind), found in errors.items():
        sizes = sorted(map(abs, found))
        figures[f"{source}, {kind}"] = said = {
            "rows": len(found),
            "mean_error": statistics.mean(sizes),
            "median_error": statistics.median(sizes),
            "p90_error": sizes[int(0.9 * (len(sizes) - 1))],
            "bias": statistics.mean(found),
        }
        print(f"{source}, {kind}: {said}")
    for words, count in out_of_scope.items():
        print(f"out of scope: {words} ({count})")
    if only is None:
        figures |= {"trillion": trillion(), "predicted": rows, "out_of_scope": dict(out_of_scope)}
        print(write_result("layouts_memory", figures))


if __name__ == "__main__":
    main()
