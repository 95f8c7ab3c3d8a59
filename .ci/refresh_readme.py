"""Put what the commands print now, and what the benchmarks have left under benchmarks/results, into the README and the
pages of docs/; draw the pictures of docs/images whose plans have changed.

python .ci/refresh_readme.py [--table]   (--table first runs benchmarks/table_policies.py and validation.py, minutes)

Terminal sessions are run. A figure that was measured stands between two markers, <!-- NAME: --> and <!-- :NAME -->, or,
a table or a block, under <!-- NAME -->, on one page each; it is written from the result's file and names the commit
that it was taken at.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pstar_sim.cli import main as pstar
from pstar_sim.planner.trust import borrowed_bar, enough

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / ".ci")]

from _results import measured_at  # noqa: E402


def printed(argv: list[str]) -> str:
    os.environ["COLUMNS"] = "120"  # whatever the terminal has
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = pstar(argv)
    if status not in (0, 3):  # 3: the answer is no
        raise SystemExit(f"pstar {shlex.join(argv)}: exit status {status}")
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def session(block: re.Match[str]) -> str:
    """Every command of the block with its output; "..." as the last line keeps the length it has."""
    parts = []
    for command, old in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block[1], re.MULTILINE):
        lines = printed(shlex.split(command)[1:]).splitlines()
        shown = old.rstrip("\n").splitlines()
        if shown and shown[-1] == "...":
            lines = [*lines[: len(shown) - 1], "..."]
        parts.append("\n".join([f"$ {command}", *lines]))
    return "```console\n" + "\n\n".join(parts) + "\n```"


def result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def link(name: str, stamp: Mapping[str, Any] | None = None) -> str:
    """The file of a result as a link that says when its figures were measured. stamp: of a part of it."""
    return f"[{measured_at(stamp or result(name)['taken_at'])}](benchmarks/results/{name}.json)"


def policies_table() -> str:
    rows = result("table_policies")["rows"]
    policies = list(rows[0]["seconds"])
    lines = [
        "| machine | model | " + " | ".join(policies) + " | lower bound | optimal over bound |",
        "|---|---|" + "---:|" * (len(policies) + 2),
    ]
    for row in rows:
        seconds = " | ".join("-" if row["seconds"][p] is None else f"{row['seconds'][p]:.3f}" for p in policies)
        gap = "-" if row["gap"] is None else f"{100 * row['gap']:.2f} %"
        lines.append(f"| {row['machine']} | {row['model']} | {seconds} | {row['lower_bound_s']:.3f} | {gap} |")
    return "\n".join(lines)


def frameworks_table() -> str:
    """What benchmarks/frameworks.py has trained with exported files."""
    lines = [
        "| exported from | trained by | predicted, B per parameter | measured | host with pinned rounding |",
        "|---|---|---:|---:|---:|",
    ]
    for row in result("frameworks")["rows"]:
        if "measured_bytes_per_param" in row:
            figures = ("predicted", "measured", "host_with_pinning")
            cells = " | ".join(f"{row[f'{figure}_bytes_per_param']:.2f}" for figure in figures)
            lines.append(f"| `{row['plan']}` | {row['target']} | {cells} |")
    return "\n".join(lines)


def frameworks() -> str:
    found = result("frameworks")
    loaded = {row["target"]: row["loaded"] for row in found["rows"] if "loaded" in row}
    whole = ", ".join(name for name, said in loaded.items() if "failed" not in said)
    missing = ", ".join(name for name, said in loaded.items() if "failed" in said)
    lacking = f"; not loaded: {missing}" if missing else ""
    return f"Loaded by their packages: files for {whole}{lacking} ({link('frameworks')})."


GOALS = {
    "mixed": 0.05, "experts": 0.12, "sums16": 0.12, "layer_major": 0.12, "accumulation": 0.12, "small": 0.10,
    "shapes": 0.05, "barrier": 0.04,
}  # fmt: skip
"""Word in the name of a table of `optimal` -> the largest gap that is wanted there; others: USUAL_GOAL."""
USUAL_GOAL = 0.03


def gaps_table() -> str:
    """The summaries that benchmarks/optimal.py and benchmarks/kinds.py have written, and how many gaps are above the
    goal of their table."""
    lines = [
        "| configurations, bound | fit | median gap | largest | at, and what binds there | goal | taken |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("optimal*.json")):
        found = result(path.stem)
        what, _, bound = found["what"].partition(", gap to the ")
        s = found["summary"]
        goal = next((goal for word, goal in GOALS.items() if word in path.stem), USUAL_GOAL)
        median, largest = (f"{100 * s[key]:.2f} %" for key in ("median_gap", "max_gap"))
        above = sum((row["gap"] or 0.0) > goal for row in found["rows"])
        fit = f"{s['fit']}/{s['configurations']}"
        if s.get("of", s["configurations"]) > s["configurations"]:
            fit += f", a sample of {s['of']}"
        at = f"{s['max_gap_at']}, {max(found['rows'], key=lambda row: row['gap'] or 0.0)['binding']}"
        jobs = f"{what}, {bound.removesuffix(' bound').removesuffix(' LP')}"
        wanted = f"{100 * goal:.0f} %" + (f", {above} above" if above else "")
        lines.append(f"| {jobs} | {fit} | {median} | {largest} | {at} | {wanted} | {link(path.stem)} |")
    return "\n".join(lines)


KINDS = {
    "gpt models": "GPT models", "gpt models, eight GPUs": "on eight GPUs", "shapes models": "large vocabularies",
    "small batches of models": "batch 1 and 2", "accumulating models": "several micro-batches",
    "sums of gradients in 16 bits": "16-bit sums", "micro-batches in any order": "any order (`session.step`)",
    "routed experts": "routed experts", "mixed GPUs, bound over all shares": "mixed GPUs",
}  # fmt: skip
"""What a table of `optimal` is of -> in words."""


def largest_gaps() -> str:
    """A row per kind of configurations, over its tables: the largest of their medians, and the largest gap."""
    summaries: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in KINDS}
    for path in sorted(RESULTS.glob("optimal*.json")):
        what, summary = (result(path.stem)[key] for key in ("what", "summary"))
        summaries[re.sub(r", (eager|barrier)\b.*", "", what)].append(summary)
    lines = ["| jobs | median gap | largest |", "|---|---:|---:|"]
    for kind, tables in ((kind, tables) for kind, tables in summaries.items() if tables):
        median, largest = (f"{100 * max(s[key] for s in tables):.1f} %" for key in ("median_gap", "max_gap"))
        lines.append(f"| {KINDS[kind]} | {median} | {largest} |")
    return "\n".join(lines)


def sums() -> str:
    """What benchmarks/sums.py has written; nothing until it was measured."""
    if not (RESULTS / "sums.json").exists():
        return ""
    rows = result("sums")["rows"]
    first = rows[0]["policy"]
    lines = [
        f"| policy | simulated | measured | over the bound, simulated | as fast as `{first}`: simulated | measured |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        bound_s, simulated_s = row["bound_s"], row["simulated_s"]
        over = "" if bound_s is None else f"{100 * (simulated_s / bound_s - 1):.1f} %"
        gains = f"{row['simulated_gain']:.2f} x | {row['gain']:.2f} x"
        lines.append(f"| `{row['policy']}` | {simulated_s:.2f} s | {row['measured_s']:.2f} s | {over} | {gains} |")
    return "\n".join(lines)


def sums_taken() -> str:
    """Where the figures of `sums` are from, and what else they show."""
    if not (RESULTS / "sums.json").exists():
        return "not measured yet"
    found = result("sums")
    losses = "equal losses" if found["losses_equal"] else "losses that differ"
    others = max(row["taken_by_others"] for row in found["rows"])
    return f"{losses}; at most {others:.0%} of the processor was others'; {link('sums')}"


def peers_resident() -> str:
    """What benchmarks/peers.py has written: on this CPU with everything resident and, where it has run there, on a
    GPU."""
    found = [*result("peers")["tables"]["everything resident"]["rows"]]
    if (RESULTS / "peers_cuda.json").exists():
        cuda = result("peers_cuda")
        rows = [row for compared in cuda["tables"].values() for row in compared["rows"]]
        found += [{**row, "contender": f"{row['contender']}, on {cuda['device']}"} for row in rows]
    return peers_table(found)


def peers_away() -> str:
    """Nothing until it was measured."""
    compared = result("peers")["tables"].get("model data leave")
    return "" if compared is None else peers_table(compared["rows"])


def peers_table(rows: list[dict[str, Any]]) -> str:
    """A row per contender and clipping. A column that has no figure in any row is left out."""
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "contender": lambda row: row["contender"],
        "leaves the accelerator": lambda row: row["leaves"],
        "clipped": lambda row: "yes" if row["clip"] else "no",
        "micro-batch": lambda row: str(row["micro_batch"]),
        "step": lambda row: "-" if row["times"] is None else f"{row['times']['step']:.2f} x {row['times']['of']}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "GPU": lambda row: figure(row["gpu_reserved_bytes"], 1e9, ".2f", " GB"),
        "host peak": lambda row: figure(row["host_peak_bytes"], 1e9, ".2f", " GB"),
        "per parameter": lambda row: figure(row["host_bytes_per_param"], 1, ".1f", " B"),
        "largest": lambda row: figure(row["largest_params"], 1e6, ",.0f", " M"),
        "losses": lambda row: figure(row["loss_apart"], 1, ".1e", ""),
    }
    columns = {name: [cell(row) for row in rows] for name, cell in cells.items()}
    shown = {name: column for name, column in columns.items() if set(column) != {"-"}}
    words = ("contender", "leaves the accelerator", "clipped")
    lines = [
        f"| {' | '.join(shown)} |",
        "|" + "|".join("---" if name in words else "---:" for name in shown) + "|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in zip(*shown.values()))])


def figure(value: float | None, scale: float, form: str, unit: str) -> str:
    return "-" if value is None else f"{value / scale:{form}}{unit}"


def validation_summary() -> str:
    return "```text\n" + "\n".join(result("validation")["summary"]) + "\n```"


def fit_numbers() -> str:
    """A row per number: its fit, and what a tenth more does to fitted and tested rows."""
    found = result("fit_efficiency")
    lines = [
        "| number | meaning | shipped | fit | tested rows moved | a tenth less | a tenth more |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in found["numbers"].items():
        tested = row["tested"]
        less, more = (_two_errors(tested[key]) for key in ("a_tenth_less", "a_tenth_more"))
        fit = "held" if row["held"] else f"{row['fit']:.4g}"
        moved = f"{tested['rows_moved']}, by {tested['moved_by_a_tenth_more']:+.1%}"
        meaning = row["meaning"].removesuffix(" (held)")
        lines.append(f"| `{name}` | {meaning} | {row['shipped']:.4g} | {fit} | {moved} | {less} | {more} |")
    return "\n".join(lines)


def fit_without() -> str:
    """A row per machine that is left out of the fit: errors of its rows without it and with it."""
    lines = ["| machine left out | rows | fitted without it | fitted with it |", "|---|---:|---:|---:|"]
    for machine, row in result("fit_efficiency")["left_out"].items():
        errors = " | ".join(_two_errors(row[key]) for key in ("out", "in"))
        lines.append(f"| {machine} | {row['out']['rows']} | {errors} |")
    return "\n".join(lines)


def _two_errors(errors: Mapping[str, float]) -> str:
    return f"{100 * errors['median']:.1f} / {100 * errors['p90']:.1f} %"


def demo() -> str:
    """The tables of the demo's end, without the explanations below them."""
    lines = result("demo")["lines"]
    last = max(number for number, line in enumerate(lines) if line.startswith("host peak"))
    return "```text\n" + "\n".join(lines[: last + 1]) + "\n```"


def accuracy() -> str:
    errors = sorted(100 * run["error"] for run in result("accuracy")["runs"])
    return f"{errors[0]:.1f} to {errors[-1]:.1f} % above the prediction ({link('accuracy')})"


def disks() -> str:
    runs = result("disks")["runs"]
    errors, hidden = (sorted(100 * run[key] for run in runs) for key in ("error", "hidden_share"))
    return (
        f"a step's seconds differed by {errors[0]:+.0f} to {errors[-1]:+.0f} % from the prediction, and compute hid "
        f"{hidden[0]:.0f} to {hidden[-1]:.0f} % of the disk's time ({link('disks')})"
    )


def disks_memory() -> str:
    rows = result("disks_memory")["rows"]
    most = [max(row["loading_bytes"], row["training_bytes"]) / row["planned_host_peak_bytes"] for row in rows]
    return f"{min(most):.0%} to {max(most):.0%} of the plan's host peak ({link('disks_memory')})"


def disks_checkpoint() -> str:
    row = result("disks_checkpoint")["row"]
    peak = max(row[f"{phase}_bytes"] for phase in ("loading", "training", "saving", "resuming"))
    assert all(row["equal"].values())
    return (
        f"With {row['slots_bytes'] / 1e9:.2f} GB of {row['model_data_bytes'] / 1e9:.2f} GB of model data in its slots, "
        f"a process took at most {peak / 1e6:.0f} MB on the host, where the plan's peak is "
        f"{row['planned_host_peak_bytes'] / 1e6:.0f} MB; all {row['tensors']} tensors of its checkpoint are the same, "
        f"resumed on disks, without disks, and by two processes ({link('disks_checkpoint')})"
    )


def disks_exact() -> str:
    jobs = result("disks_exact")["jobs"]
    rows = [row for job in jobs for row in job["rows"]]
    exact = [row for row in rows if all(row["equal"].values()) and row["moved_bytes"] == row["planned_bytes"]]
    policies = ", ".join(f"`{policy}`" for policy in dict.fromkeys(row["policy"] for row in rows))
    return (
        f"{len(exact)} of {len(rows)} runs of {len(jobs)} jobs under {policies} had the losses of 20 steps, to the "
        f"bit, and moved the plan's bytes ({link('disks_exact')})"
    )


def overhead() -> str:
    row = next(row for row in result("overhead")["rows"] if row["sequence"] == 128)
    return (
        f"a step of 2 x {row['sequence']} tokens takes {row['ratio']:.2f} times the CPU seconds of plain PyTorch with "
        f"fused AdamW ({link('overhead')})"
    )


def event_cost() -> str:
    resident_us, tide_us = (result("event_cost")[f"{policy}_us_per_event"] for policy in ("all_on_gpu", "tide"))
    return (
        f"With operators that cost next to nothing, an event of the module tree costs {resident_us:.0f} microseconds "
        f"of the training thread under the plan of `all_on_gpu` and {tide_us:.0f} under that of `tide` "
        f"({link('event_cost')})."
    )


def capture() -> str:
    r = result("capture")
    return (
        f"takes {r['peak_rss_bytes'] / 1e9:.2f} GB of RAM and {r['cpu_s']:.1f} s of CPU time, torch's `MemTracker` "
        f"{r['times_as_fast_cpu']:.0f} times as much ({link('capture')})"
    )


PEERS = {"zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}


def peers() -> str:
    compared = result("peers")["tables"]["everything resident"]
    said = []
    for word, clipped in (("Without", "unclipped"), ("With", "clipped")):
        of = {pair: both["medians"] for pair, both in compared["ratios"][clipped].items()}
        if "ours / plain" in of:
            others = {name: 1 / of[f"ours / {peer}"] for peer, name in PEERS.items() if f"ours / {peer}" in of}
            said.append(
                f"{word} clipping a step of pstar-sim takes {of['ours / plain']:.2f} times plain PyTorch's; "
                f"{', '.join(others)}: {', '.join(f'{ratio:.2f}' for ratio in others.values())} times ours"
            )
    return f"{'. '.join(said)} ({link('peers')})."


def peers_offloading() -> str:
    """Each peer beside the one of ours that keeps about as much on the accelerator; nothing until it was measured."""
    compared = result("peers")["tables"].get("model data leave")
    if compared is None:
        return ""
    clip = "unclipped" if compared["ratios"]["unclipped"] else "clipped"
    said = [
        f"{name}'s step takes {1 / compared['ratios'][clip][pair]['medians']:.2f} times that of ours with {room}"
        for mine, room, peers in (
            ("ours_half", "room for half", ("zero2",)), ("ours_away", "room for none", ("zero3", "fsdp2")),
        )
        for peer, name in PEERS.items()
        if peer in peers and (pair := f"{mine} / {peer}") in compared["ratios"][clip]
    ]  # fmt: skip
    return f"{', '.join(said)} ({'not ' * (clip == 'unclipped')}clipped; {link('peers')})."


def peers_memory() -> str:
    """The host's peak in bytes per parameter, least and most of each kind of contender."""
    rows = [row for compared in result("peers")["tables"].values() for row in compared["rows"]]
    said = []
    for kind in ("ours", "plain PyTorch", "DeepSpeed", "FSDP2"):
        peaks = sorted({round(row["host_bytes_per_param"]) for row in rows if row["contender"].startswith(kind)})
        said.append(f"{kind} {' to '.join(map(str, peaks[:: max(len(peaks) - 1, 1)]))}")
    return f"{', '.join(said)} bytes per parameter ({link('peers')})"


def semantics(name: str = "semantics") -> str:
    r = result(name)
    left_out = sum("exception" in cell for row in r["table"].values() for cell in row.values())
    return (
        f"parameters and moments of {r['equal_to_the_bit']} of {r['runs']} runs equal plain PyTorch's to the bit "
        f"(largest relative difference {r['largest_relative_difference']:.1e}); cells left out with a reason: "
        f"{left_out}; {link(name)}"
    )


def architectures() -> str:
    return semantics("architectures")


def interleavings() -> str:
    part = result("reliability")["interleavings"]
    misses = f"{part['misses']} differ from the serial run" if part["misses"] else "no difference to the serial run"
    counts = " + ".join(f"{count:,} of {policy}" for policy, count in part["runs"].items())
    return f"{counts}: {misses}; {link('reliability', part['taken_at'])}"


def leaks() -> str:
    part = result("reliability")["leaks"]
    grown = [f"{what}: {part[f'{what} bytes/step']:.0f} bytes per step" for what in ("accelerator", "host payloads")]
    return (
        f"{part['steps']:,} steps of {part['policy']}: {', '.join(grown)}; resident memory "
        f"{part['resident bytes/step']:.0f} (bound: {part['bound_bytes_per_step']:.0f}); "
        f"{link('reliability', part['taken_at'])}"
    )


def mutations() -> str:
    part = result("reliability")["mutations"]
    refused = sum(count for what, count in part.items() if what.endswith(": refused"))
    return (
        f"{refused:,} of {part['files']:,} refused in one line, the others right or refused by the run, "
        f"{part['misses']} misjudged; {link('reliability', part['taken_at'])}"
    )


def faults() -> str:
    part = result("reliability")["faults"]
    return (
        f"{part['faults'] - part['misses']} of {part['faults']} with their messages, nothing lost beyond the step in "
        f"flight; {link('reliability', part['taken_at'])}"
    )


def kills() -> str:
    part = result("reliability")["kills"]
    return (
        f"{part['kills']} kills, {part['while_saving']} of them while saving; {part['misses']} resumes differ from the "
        f"uninterrupted run; {link('reliability', part['taken_at'])}"
    )


def interrupts() -> str:
    part = result("interrupts")["three_hits_per_line"]
    found = part["outcomes"]
    equal, clear = found["equal, user's thread"], found["error, user's thread"]
    died = found["error, queues' threads"]
    return (
        f"{part['struck']:,} of {part['points']:,} points, drawn: {part['misses']} differ from plain PyTorch or hang; "
        f"{equal:,} equal to the bit, {clear + died:,} a clear error; {link('interrupts', part['taken_at'])}"
    )


def oracle() -> str:
    r = result("oracle")
    compared = r["nominal runs compared"] + r["jittered runs compared"]
    return (
        f"{compared:,} runs and {r['deadlocks compared']:,} deadlocks: {len(r['differences'])} differ in ends, bytes, "
        f"causes or peaks; {link('oracle')}"
    )


def load_weights() -> str:
    rows = [row for row in result("load_weights")["rows"] if row["way"] == "meta"]
    above = max(row["peak"] - row["steady"] for row in rows)
    return (
        f"peak host memory at most {above / 1e6:.0f} MB above the steady state, within the one shard that is allowed; "
        f"saving adds {max(row['save_adds'] for row in rows) / 1e6:.0f} MB; {link('load_weights')}"
    )


def reserved() -> str:
    r = result("gpu_memory")
    runs = r["runs"].values()
    ended = [row for row in runs if "died" not in row]
    shares = [100 * row["reserved_peak_bytes"] / row["budget_bytes"] for row in ended]
    exchanges = [row["exchanges_per_step"] + row["retries_per_step"] for row in ended]
    maps = [row["cuMemMap_per_step"] for row in ended]
    few = sum(count <= 1 for count in exchanges)
    return (
        f"{len(ended)} of {len(runs)} runs of ten models train, {few} of them with at most one exchange per "
        f"step, none with more than {max(exchanges):.1f} or with more than {max(maps):.0f} mapped pages; "
        f"they reserve {min(shares):.0f} to {max(shares):.0f} % of the budget, "
        f"{len(r['above_goal'])} of them more than 105 % and 64 MiB beyond it ({link('gpu_memory')})"
    )


def checksums() -> str:
    rows = [row for row in result("load_weights")["rows"] if row["way"] == "meta"]
    most = max(row["load_checked_s"] / row["load_unchecked_s"] for row in rows)
    xxh3, crc32 = (min(row[f"{name}_bytes_per_s"] for row in rows) / 1e9 for name in ("xxh3_64", "crc32"))
    least = min(row["checkpoint_bytes"] for row in rows) / 1e9
    return (
        f"a load of {least:.1f} GB or more takes at most {most:.1f} times as long; a save adds what a core checks, at "
        f"{xxh3:.0f} GB/s or more (CRC32: {crc32:.1f}); {link('load_weights')}"
    )


def disks_published() -> str:
    found = result("disks_published")
    lines = [
        "| model, GPUs, host | micro-batches | `zero_infinity` | `l2l` | ratio | `tide` | ratio | published ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        whole = row["zero_infinity"]
        cells = [_on_disks(whole)]
        for system in ("l2l", "tide"):
            cells += [
                _on_disks(row[system]),
                f"{whole['seconds'] / row[system]['seconds']:.2f}" if row[system] else "-",
            ]
        job = f"{row['model']}, {row['gpus']} x `a100-80`, {row['host'].removesuffix('B')[:-1]} {row['host'][-2:]}"
        lines.append(f"| {job} | {row['micro_batches']} | {' | '.join(cells)} | {row['published_ratio']} |")
    return "\n".join(lines)


def _on_disks(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else f"{found['seconds']:.0f} s, {found['disk_bytes'] / 1e12:.2f} TB"


def planning() -> str:
    planned, certified = result("planning_speed")["rows"], result("certify")["rows"]
    planned = [row for row in planned if "cpu_s" in row]  # other rows: the job does not fit
    one = max(row["cpu_s"] for row in planned if row["gpus"] == 1 and row.get("group", "one gpu") == "one gpu")
    most_gpus = max(row["gpus"] for row in planned)
    many = max(row["cpu_s"] for row in planned if row["gpus"] == most_gpus)
    fluid = sorted(row["fluid_cpu_s"] for row in certified)
    sweep = result("sweep")
    return (
        f"Planning with its certificate takes at most {one:.1f} s of CPU time for 18B on one GPU and "
        f"{many:.1f} s for 175B on {most_gpus} ({link('planning_speed')}), `--certify` {fluid[0]:.1f} to "
        f"{fluid[-1]:.1f} s more ({link('certify')}), a cold sweep of {sweep['points']:,} points "
        f"{sweep['cold_s']:.0f} s on {sweep['machine']['cores']} cores ({link('sweep')})."
    )


def activations() -> str:
    first = result("activations")["rows"][0]
    alike, recomputed, offloaded = (
        first["seconds"][way] for way in ("all alike", "kept or recomputed", "also offloaded")
    )
    return (
        f"`python benchmarks/activations.py` ({link('activations')}): {first['model']} at sequence "
        f"{first['sequence']} on an `{first['machine']}` takes {alike:.2f} s with all blocks alike, {recomputed:.2f} s "
        f"with some recomputed, {offloaded:.2f} s with some offloaded too."
    )


def tide_bytes() -> str:
    r = result("tide_bytes")
    of = {
        job: " and ".join(
            f"{row[policy] / 1e9:.1f} GB in {r['iteration_s'][job][policy]:.2f} s"
            for policy in ("tide", "static_partition")
        )
        for job, row in r["to_gpu_bytes_per_iteration"].items()
    }
    many = f"batch {r['batch']} x {r['micro_batches']} micro-batches"
    return (
        f"{r['model']} on `{r['simulated_machine']}`, sequence {r['sequence']}, bytes to the GPU and seconds per "
        f"iteration under `tide` and `static_partition` ({link('tide_bytes')}): {many} {of['four micro-batches']}, "
        f"with no optimizer state pinned {of['four micro-batches, nothing pinned']}; one micro-batch "
        f"{of['one micro-batch']}."
    )


def whale_predicted() -> str:
    found = result("whale")
    lines = [
        "| GPUs | dtype | recomputed | sequences per GPU | equal shares | whale | gain |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for row in found["predicted"]:
        shares = ", ".join(f"{gpu} {'+'.join(map(str, taken))}" for gpu, taken in row["shares"].items())
        seconds = f"{row['equal_s']:.3f} s | {row['whale_s']:.3f} s | {row['gain']:.2f}"
        recomputed = "yes" if row["checkpointing"] else "no"
        lines.append(f"| `{row['machine']}` | {row['dtype']} | {recomputed} | {shares} | {seconds} |")
    return "\n".join(lines)


def whale() -> str:
    found = result("whale")
    rows = [
        f"the second process {row['factor']:g} times as slow: {' and '.join(map(str, row['shares']['whale']))} of "
        f"{found['sequences']} sequences, gain {row['predicted_gain']:.2f} predicted and {row['measured_gain']:.2f} "
        "measured"
        for row in found["measured"]
    ]
    worst = max(row["worst"] for row in found["measured"])
    return (
        f"{'; '.join(rows)}; parameters and moments differ from plain PyTorch on the joint batch by at most "
        f"{worst:.1e} ({link('whale')})"
    )


def whale_gains() -> str:
    """What the two tables of predictions come to."""
    shares = {
        dtype: sorted(row["gain"] for row in result("whale")["predicted"] if row["dtype"] == dtype)
        for dtype in ("fp32", "fp16")
    }
    by_dtype = ", ".join(
        f"{gains[0]:.2f} to {gains[-1]:.2f} times as fast in {dtype}" for dtype, gains in shares.items()
    )
    rows = result("mixed_stages")["rows"]
    stages, splits = (sorted(row[of] for row in rows if row[of]) for of in ("gain", "split_gain"))
    return (
        f"shares of the batch by speed make BERT-Large {by_dtype}, stages by speed a pipeline {stages[0]:.2f} to "
        f"{stages[-1]:.2f} times, and shares of layers by speed tensor parallelism {splits[0]:.2f} to "
        f"{splits[-1]:.2f} times ({link('whale')})"
    )


def mixed_stages() -> str:
    heads = "shares of each layer | even tp | uneven tp | gain | batch shared by speed"
    lines = [
        f"| GPUs | model | layers, even and by speed | even | by speed | gain | {heads} |",
        "|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in result("mixed_stages")["rows"]:
        even, speed = ("+".join(map(str, row[cut])) for cut in ("even", "speed"))
        seconds = f"{row['even_s']:.2f} s | {row['speed_s']:.2f} s | {row['gain']:.2f}"
        split_s, gain = row["split_s"], row["split_gain"]
        even_tp = "none" if gain is None else f"{split_s * gain:.2f} s"
        seconds += f" | {row['split']} | {even_tp} | {split_s:.2f} s | {'' if gain is None else f'{gain:.2f}'}"
        seconds += f" | {row['shared_s']:.2f} s"
        model = f"{row['model']}, {row['dtype']}, {row['batch']} x {row['micro_batches']}"
        lines.append(f"| `{row['machine']}` | {model} | {even}, {speed} | {seconds} |")
    return "\n".join(lines)


def spreads() -> str:
    lines = ["| model, GPUs | offloaded | without offloading | FSDP alone |", "|---|---|---|---|"]
    for row in result("spreads")["rows"]:
        cells = [_way(row[kind]) for kind in ("offloaded", "resident", "fsdp")]
        gpus = f"`{row['machine']}`" + (f" x {row['nodes']}" if row["nodes"] > 1 else "")
        lines.append(f"| {row['model']}, {gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _way(way: Mapping[str, Any] | None) -> str:
    if way is None:
        return "does not fit"
    recomputed = {"all": "", None: ""}.get(way["recompute"], f", recomputing {way['recompute']}")
    return f"{way['tokens_per_s']:,.0f}: `{way['parallel']}` {way['batch']}, {way['policy']}{recomputed}"


LAYOUTS = {
    "one node": "vTrain, 2 to 8 GPUs",
    "one node, not fitted": "half of these, not fitted",
    "several nodes": "vTrain, 512 GPUs",
    "tr11": "BigScience, 8 to 384 GPUs",
    "Korthikanti": "Korthikanti et al., 8 to 512 GPUs",
}


def layouts() -> str:
    lines = [
        "| iterations of Megatron on A100 | rows | mean error | median | 90 % | bias |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, words in LAYOUTS.items():
        r = result("layouts")[name]
        errors = " | ".join(f"{100 * r[f'{kind}_error']:.1f} %" for kind in ("mean", "median", "p90"))
        lines.append(f"| {words} | {r['rows']} | {errors} | {100 * r['bias']:+.1f} % |")
    return "\n".join(lines)


def layouts_order() -> str:
    import layouts  # takes SciPy along

    r, s = result("layouts"), layouts.scatter(layouts.rows_of(layouts.FILES["several nodes"]))
    return (
        f"{r['one node']['tau']:.2f} on one node, {r['several nodes']['tau']:.2f} on 512 GPUs. These scatter: seconds "
        f"linear in the micro-batch, fitted to each of the {s.layouts} layouts, leave {100 * s.error:.1f} % and have a "
        f"tau of {s.tau:.2f}; random errors of that size leave {s.tau_at:.2f} of a perfect order"
    )


def layouts_memory() -> str:
    lines = ["| runs | of | rows | mean error | median | 90 % | bias |", "|---|---|---:|---:|---:|---:|---:|"]
    for name, r in result("layouts_memory").items():
        source, _, kind = name.partition(", ")
        if source in MEMORY_OF and r["rows"] > 2:
            errors = " | ".join(f"{100 * r[f'{each}_error']:.1f} %" for each in ("mean", "median", "p90"))
            lines.append(f"| {MEMORY_OF[source]} | {kind} | {r['rows']} | {errors} | {100 * r['bias']:+.1f} % |")
    return "\n".join(lines)


def trillion() -> str:
    whole, unfit, away = result("layouts_memory")["trillion"]
    return (
        f"with `{whole['parallel']}` everything is on the GPUs ({whole['peak_bytes'] / 1e9:.1f} GB of 33.1, "
        f"{whole['tokens_per_s']:,.0f} tokens/s); with `{unfit['parallel']}` it would take "
        f"{unfit['needed_bytes'] / 1e9:.1f} GB, and with what `tide` moves {away['peak_bytes'] / 1e9:.1f} GB "
        f"({away['tokens_per_s']:,.0f} tokens/s)"
    )


MEMORY_OF = {
    "golden": "Megatron-LM's tests of GPTs and BERTs, A100",
    "Megatron-Bridge": "Megatron-Bridge, gpt-oss-120b on 64 GPUs",
    "SimuMax": "SimuMax, Llamas cut to 8 B200s",
    "tr11": "BigScience, as nvidia-smi shows it",
    "Korthikanti": "Korthikanti et al., interleaved up to 530B, A100",
    "torchtitan": "torchtitan in fp8, H100",
}


def stages() -> str:
    r = result("stages")
    accepted = sum(r["accepted"].values())
    return (
        f"of {r['sets']} sets of random jobs, {r['of_unlike']} of them of unlike GPUs that split layers, replay and "
        f"simulation differ by at most {r['apart']:.1e}, {r['below']} "
        f"are below the bound, and of {sum(r['mutants'].values())} damaged sets the proof accepts {accepted}, of which "
        f"{len(r['broken'])} break under random timings ({link('stages')})"
    )


def optimizers() -> str:
    r = result("optimizers")
    return (
        f"{sum(r['ran'].values())} cells of {len(r['ran'])} optimizers, drawn pairwise over policies, dtypes, updates, "
        f"micro-batches and clipping, and {sum(r['ran_on_ranks'].values())} on two ranks without clipping: after "
        f"{r['steps']} steps {len(r['wrong'])} differ in a bit of losses or parameters ({link('optimizers')})"
    )


def calibrated() -> str:
    r = result("calibrated")
    return (
        f"the median of the {len(r['runs'])} differences between predicted and measured iteration time was "
        f"{100 * r['median_error']:.1f} %, the largest {100 * r['largest_error']:.1f} % "
        f"(`python benchmarks/calibrated.py`, ten minutes; {link('calibrated')})"
    )


def search_constants() -> str:
    """A row per constant and value in its place, over the jobs of all groups that it was measured on."""
    found = result("search_constants")
    lines = [
        "| constant | is | in its place | jobs | longer, mean | least | most | no longer fit | bytes | effort |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    changes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        name = f"{row['module'].removeprefix('pstar_sim.')}.{row['constant']}"
        changes.setdefault((name, row["is"], row["becomes"]), []).append(row)
    for change, rows in sorted(changes.items()):
        jobs = {row["group"]: len(found["groups"][row["group"]]["jobs"]) for row in rows}
        all_jobs = sum(jobs.values())
        lost = sum(row["no_longer_fit"] for row in rows)
        effort = {row["group"]: found["groups"][row["group"]]["rows"] for row in rows}
        cells = (
            _change(sum(row["mean_longer"] * jobs[row["group"]] for row in rows) / all_jobs),
            _change(-max(row["most_shorter"] for row in rows)),
            _change(max(row["most_longer"] for row in rows)),
            str(lost or ""),
            _change(sum(row["moved"] * jobs[row["group"]] for row in rows) / all_jobs - 1),
            _change(
                sum((row["rows"] - 1) * effort[row["group"]] for row in rows) / (sum(effort.values()) or 1), digits=0
            ),
        )
        lines.append(f"| {' | '.join((f'`{change[0]}`', *change[1:], str(all_jobs), *cells))} |")
    return "\n".join(lines)


def gemm() -> str:
    """A row per GPU of measured matrix products."""
    found = result("gemm")
    lines = [
        "| GPU | products | (k, n) left out: median, 90th | one constant | corrected | same product | same extents |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    columns = ("left_out", "one_constant", "left_out_with_neighbours", "repeated", "same_extents")
    for gpu in ("A100-PCIe", "B200"):
        r = found[gpu]
        cells = ["-" if r[c] is None else f"{100 * r[c]['median']:.1f} %, {100 * r[c]['p90']:.1f} %" for c in columns]
        lines.append(f"| {gpu} | {r['products']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gemm_carried() -> str:
    r = result("gemm")["B200"]["from_a100"]
    return f"median {100 * r['median']:.1f} %, 90th percentile {100 * r['p90']:.1f} % ({link('gemm')})"


def gemm_seen() -> str:
    """The error of one value per extents, chosen with all measurements in view."""
    return f"{100 * result('gemm')['B200']['same_extents']['seen_p90']:.1f} %"


def error_classes() -> str:
    """The table of errors by class of job, the most sources first."""
    kept = json.loads((ROOT / "pstar_sim" / "catalog" / "expected_errors.json").read_text(encoding="utf-8"))
    rows = ["| class | sources | rows | median | 90th percentile | ± |", "|---|---:|---:|---:|---:|---:|"]
    order = sorted(kept, key=lambda name: (name == "any class", -kept[name]["any policy"]["sources"], name))
    for name in order:
        e = kept[name]["any policy"]
        bar = f"{e['bar']:.1%}" if enough(e["rows"], e["sources"]) else f"({borrowed_bar(name):.1%})"
        label = "all rows" if name == "any class" else name
        rows.append(f"| {label} | {e['sources']} | {e['rows']} | {e['median']:.1%} | {e['p90']:.1%} | {bar} |")
    return "\n".join(rows).replace("%", " %")


def inside() -> str:
    """The lines of the validation about bars."""
    lines = result("validation")["summary"]
    first = next(i for i, line in enumerate(lines) if line.startswith("iterations inside the bar"))
    return "```text\n" + "\n".join(lines[first : first + 3]) + "\n```"


def farthest() -> str:
    """A row per machine, system and figure whose tested rows are far off."""
    lines = ["| machine | system | figure | rows | errors |", "|---|---|---|---:|---:|"]
    for r in result("validation")["farthest"]:
        ends = [f"{100 * r[end]:+.0f}" for end in ("least", "most")]
        errors = ends[0] if ends[0] == ends[1] else " to ".join(ends)
        lines.append(f"| {r['hardware']} | {r['system']} | `{r['figure']}` | {r['rows']} | {errors} % |")
    return "\n".join(lines)


def waiting() -> str:
    """Errors of the phases of ZeRO-3 with offloading on several GPUs, where they are published."""
    lines = [
        "| runs | forward | if forward waited, too | backward | iterations |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in result("validation")["collectives"]:
        errors = [r[name] for name in ("fwd", "forward_waits", "bwd", "iter")]
        cells = [
            f"{round(100 * e['median']):+d} % ({round(100 * e['least']):+d} to {round(100 * e['most']):+d})"
            for e in errors
        ]
        nodes = f", {r['nodes']} nodes" if r["nodes"] > 1 else ""
        lines.append(f"| {r['hardware']}{nodes} | {' | '.join(cells)} |")
    return "\n".join(lines)


def forms() -> str:
    """A row per formula for matrix products: errors on the B200, 90th percentiles."""
    lines = ["| form | alone: median, 90th | corrected: median, 90th |", "|---|---:|---:|"]
    for r in result("gemm_forms")["B200"]["forms"]:
        cells = [f"{100 * r[c]['median']:.1f} %, {100 * r[c]['p90']:.1f} %" for c in ("alone", "corrected")]
        lines.append(f"| {r['form']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def forms_choice() -> str:
    """The errors of predictors that were chosen without the rows that judge them."""
    found = result("gemm_forms")
    rows = [r[c] for r in found["B200"]["forms"] for c in ("alone", "corrected")]
    below = sum(r["p90"] <= 0.2 for r in rows)
    alone, every, a100 = found["nested"]["alone"], found["nested"]["any"], found["by_a100"]
    plain, best = found["in_view"][0], min(found["in_view"], key=lambda e: float(e["p90"]))
    p90s = [f"{100 * e['p90']:.1f} % (median {100 * e['median']:.1f} %)" for e in (alone, every, a100)]
    return (
        f"Of these {len(rows)} predictors {below} {'is' if below == 1 else 'are'} below 20 %. That is known from the "
        "left-out errors alone. Chosen for each (k, n) by the errors on the other shapes, the predictors reach "
        f"{p90s[0]} among the formulas alone and {p90s[1]} among all. The predictor that is best on the A100 reaches "
        f"{p90s[2]}. Figures that are chosen with all rows in view, to make the 90th percentile smallest, reach "
        f"{100 * plain['p90']:.1f} % (median {100 * plain['median']:.1f} %) with the formula as shipped and "
        f"{100 * best['p90']:.1f} % (median {100 * best['median']:.1f} %) with the best form ({best['form']})."
    )


def forms_order() -> str:
    """How the errors of short products hang together with those of their neighbours in time."""
    o = result("gemm_forms")["B200"]["order"]
    texts = [f"{o[kind]['correlation']:.2f} ({o[kind]['random']:.2f})" for kind in ("alone", "corrected")]
    return (
        "The error of a product below 0.5 ms and the mean error of the short products of other shapes that stand next "
        f"to it have a correlation of {texts[0]}, and of {texts[1]} where the errors of like extents are taken off; in "
        "brackets what 95 of 100 random orders stay below."
    )


def gemm_figures() -> str:
    """The fitted figures of each GPU."""
    a100, b200 = (result("gemm")[gpu] for gpu in ("A100-PCIe", "B200"))
    lines = ["| figure | A100 | B200 | how it is known |", "|---|---:|---:|---|"]
    for words, key, unit, known in (
        ("SMs", "sms", "", "datasheet"),
        ("tile, rows x columns", "tile", "", "assumed"),
        ("share of the peak that large products reach", "plateau", "", "fitted"),
        ("share of the last wave's idle time that is lost", "wave_loss", "", "fitted"),
        ("terms of a dot product that a tile's beginning and end take", "depth", "", "fitted"),
        ("rate of the memory, factors and result", "gb_per_s", " GB/s", "fitted"),
        ("kernel", "kernel_us", " us", "fitted"),
    ):
        cells = [" x ".join(map(str, r[key])) if key == "tile" else f"{r[key]}{unit}" for r in (a100, b200)]
        lines.append(f"| {words} | {' | '.join(cells)} | {known} |")
    return "\n".join(lines)


def captured_peaks() -> str:
    found = result("captured_peaks")
    return (
        f"{100 * found['largest']:.2f} % off at most in {len(found['rows'])} cases, presets "
        f"{100 * found['largest_of_presets']:.2f} % ({link('captured_peaks')})"
    )


def capture_ratio() -> str:
    return f"{100 * abs(result('capture')['peak_ratio'] - 1):.4f} % ({link('capture')})"


def families() -> str:
    """A row per pair of machines that hardware decides: how many times the tokens twice the GPUs give."""
    lines = ["| GPUs of | twice as many of | model | times the tokens |", "|---|---|---|---:|"]
    for r in result("families")["rows"]:
        if r["kind"] == "hardware":
            cells = (f"{r['gpus']} of {r['small']}", f"{r['of']} of {r['large']}", r["model"], f"{r['factor']:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def families_bound() -> str:
    """A row per pair of machines that hosts or networks may decide, with the reason."""
    lines = ["| kind | GPUs of | twice as many of | model | times the tokens | reason |", "|---|---|---|---|---:|---|"]
    for r in result("families")["rows"]:
        if r["kind"] != "hardware":
            large = f"{r['of']} of {r['large']}" + (f", {r['nodes']} nodes" if r["nodes"] > 1 else "")
            cells = (r["kind"], f"{r['gpus']} of {r['small']}", large, r["model"], f"{r['factor']:.2f}", r["why"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def qlora() -> str:
    """A row per model and base: from how many tokens on copies of layers hide, and seconds by sequence on each card."""
    rows = result("qlora")["rows"]
    cards, sequences = (sorted({r[key] for r in rows}) for key in ("card_gb", "sequence"))
    heads = ["model", "base", "hides from", *(f"{card} GB" for card in cards)]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---:|" + "---|" * len(cards)]
    for model, base in dict.fromkeys((r["model"], r["base"]) for r in rows):
        of = {(r["card_gb"], r["sequence"]): r for r in rows if (r["model"], r["base"]) == (model, base)}
        least = max(r["from_tokens"] for r in of.values())
        seconds = [[of[card, sequence]["iteration_s"] for sequence in sequences] for card in cards]
        cells = [", ".join("no" if one is None else f"{one:.3g}" for one in row) for row in seconds]
        lines.append(f"| {model} | {base} | {least:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overlap() -> str:
    """A row per job: the most that the traffic of copies and collectives in GPU memory costs."""
    lines = ["| machine | sequences | policy | copies, at most | collectives, at most |", "|---|---:|---|---:|---:|"]
    for r in result("overlap")["rows"]:
        cells = [f"{100 * r[name]:.1f} %" for name in ("most_of_copies", "most_of_collectives")]
        lines.append(f"| {r['machine']} | {r['batch']} | {r['policy']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(part: float, digits: int = 2) -> str:
    """A relative change with its sign; nothing where it rounds to 0."""
    text = f"{100 * part:+.{digits}f} %"
    return "" if float(text[1:-2]) == 0 else text


# What stands between two markers of its name.
PHRASES: Mapping[str, Callable[[], str]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        accuracy, disks, disks_checkpoint, disks_exact, disks_memory,
        overhead, event_cost, capture, peers, peers_memory, peers_offloading, semantics,
        architectures,
        interleavings, leaks, reserved, mutations, faults, kills, interrupts, oracle, load_weights, checksums, planning,
        activations, calibrated, tide_bytes, whale, gemm_carried, gemm_seen, frameworks, captured_peaks,
        capture_ratio, forms_choice, forms_order, stages, optimizers, trillion, whale_gains,
    )
} | {
    "demo-taken": lambda: link("demo"),
    "disks-published-taken": lambda: link("disks_published"),
    "forms-taken": lambda: link("gemm_forms"),
    "families-taken": lambda: link("families"),
    "qlora-taken": lambda: link("qlora"),
    "overlap-taken": lambda: link("overlap"),
    "layouts-taken": lambda: link("layouts"),
    "layouts-memory-taken": lambda: link("layouts_memory"),
    "spreads-taken": lambda: link("spreads"),
    "layouts-order": layouts_order,
    "mixed-stages-taken": lambda: link("mixed_stages"),
    "fit-taken": lambda: link("fit_efficiency"),
    "search-constants-taken": lambda: link("search_constants"),
    "sums-taken": sums_taken,
    "table-taken": lambda: link("table_policies"),
    "validation-taken": lambda: link("validation"),
    "patrickstar-node-taken": lambda: link("patrickstar_node"),
}  # fmt: skip

# What stands under a marker of its name: a table, or a block of text.
BLOCKS: Mapping[str, Callable[[], str]] = {
    "demo": demo,
    "disks-published": disks_published,
    "families": families,
    "families-bound": families_bound,
    "fit-numbers": fit_numbers,
    "fit-without": fit_without,
    "error-classes": error_classes,
    "farthest": farthest,
    "inside": inside,
    "waiting": waiting,
    "forms": forms,
    "frameworks": frameworks_table,
    "gaps": gaps_table,
    "gemm": gemm,
    "largest-gaps": largest_gaps,
    "layouts": layouts,
    "layouts-memory": layouts_memory,
    "mixed-stages": mixed_stages,
    "spreads": spreads,
    "gemm-figures": gemm_figures,
    "overlap": overlap,
    "peers": peers_resident,
    "peers-away": peers_away,
    "qlora": qlora,
    "search-constants": search_constants,
    "sums": sums,
    "table": policies_table,
    "validation": validation_summary,
    "whale-predicted": whale_predicted,
}


def put(text: str, mark: str, content: str) -> str:
    """Replace what stands under the marker, a table or a block of text, up to the next empty line."""
    old = r"(?:```text\n.*?\n```\n)?" if content.startswith("```") else r"(?:\|[^\n]*\n)*"
    new = f"\n{content}\n\n" if content else "\n"
    return re.sub(rf"(<!-- {mark} -->\n)\n*{old}\n*", lambda m: m[1] + new, text, count=1, flags=re.DOTALL)


def documents() -> dict[str, str]:
    """Path from the root -> text, of every page that this script may write into."""
    notes = sorted((ROOT / "benchmarks").glob("*.md"))
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *notes]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def filled(texts: Mapping[str, str]) -> dict[str, str]:
    """The pages with every table and figure that comes from a file. Runs nothing."""
    new = dict(texts)
    for name, content in BLOCKS.items():
        page = page_of(new, f"<!-- {name} -->\n")
        new[page] = put(new[page], name, seen_from(page, content())).rstrip("\n") + "\n"
    for name, phrase in PHRASES.items():
        begin, end = f"<!-- {name}: -->", f"<!-- :{name} -->"
        page = page_of(new, begin)
        if page_of(new, end) != page:
            raise SystemExit(f"{begin} and {end} must stand on one page")
        before, _, rest = new[page].partition(begin)
        new[page] = before + begin + seen_from(page, phrase()) + end + rest.partition(end)[2]
    return new


def page_of(texts: Mapping[str, str], marker: str) -> str:
    pages = [page for page, text in texts.items() if marker in text]
    if len(pages) != 1 or texts[pages[0]].count(marker) != 1:
        raise SystemExit(f"{marker.strip()} must stand once, on one page; it is on: {', '.join(pages) or 'none'}")
    return pages[0]


def seen_from(page: str, content: str) -> str:
    """Links to results begin at the root of the repository; the page may lie deeper."""
    return content.replace("](benchmarks/", f"]({'../' * page.count('/')}benchmarks/")


def main() -> None:
    if "--table" in sys.argv[1:]:
        for script in ("table_policies.py", "validation.py"):
            subprocess.run([sys.executable, ROOT / "benchmarks" / script], check=True)
    texts = documents()
    sessions = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for page, text in filled({page: sessions.sub(session, text) for page, text in texts.items()}).items():
        if text != texts[page]:
            (ROOT / page).write_text(text, encoding="utf-8")
    from draw_pictures import draw_changed  # here, so that a test that looks at figures needs no matplotlib

    draw_changed()


if __name__ == "__main__":
    main()
