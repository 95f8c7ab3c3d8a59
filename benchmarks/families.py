"""The factor by which tokens per second grow with twice the GPUs of one family, at the same batch per GPU.

The pairs are machines of the catalog with the same card and a peer link within one node, one with twice as many GPUs as
the other; a node of the catalog also counts with fewer of its GPUs. Policy all_on_gpu, bf16 (forced on V100), sequence
1024, checkpointing, no clipping. Hosts do not matter to this policy, so a factor between 1.6 and 2.02 comes from the
hardware. A factor outside means that the two entries are timed by inconsistent figures; its reason is beside it: hosts
or networks that the policy waits for.

    python benchmarks/families.py        # writes benchmarks/results/families.json
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from _help import only_help
from _results import write_result

import pstar_sim as ps
from pstar_sim.catalog.catalog import Catalog, load_catalog
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.overrides import override

MODELS = {"1B": 4, "4B": 4}
"""Model -> sequences per GPU."""
LEAST, MOST = 1.6, 2.02


def card(catalog: Catalog, name: str) -> str | None:
    """Returns the name of the machine's GPU; None for a GPU without products by shape."""
    gpu = catalog.machines[name].values.gpu
    return None if gpu is None or catalog.gpus[gpu].values.generation is None else gpu


def with_gpus(machine: Machine, gpus: int) -> Machine:
    return machine if gpus == len(machine.ranks) else override(machine, {"gpus": gpus})


def nodes(catalog: Catalog) -> Iterator[tuple[str, int]]:
    """Yields (machine, GPUs) of every entry of one node with a family, whole and with fewer GPUs."""
    for name in catalog.machines:
        machine = catalog.machine(name)
        if card(catalog, name) and machine.nodes == 1:
            count = len(machine.ranks)
            while count:
                if count == 1 or machine.peer is not None:
                    yield name, count
                count = count // 2 if count % 2 == 0 else 0


def tokens_per_s(catalog: Catalog, name: str, gpus: int, model: str) -> float | None:
    """Returns the tokens per second; None where the model does not fit."""
    machine = with_gpus(catalog.machine(name), gpus)
    workload = ps.preset(model, batch=MODELS[model] * gpus, seq=1024, dtype="bf16")
    result = ps.compare(workload, machine, policies=("all_on_gpu",), clip=False, barrier_cost=False, near=False)
    return result.rows[0].tokens_per_s


def reason(catalog: Catalog, large: str) -> str:
    """Returns why the larger machine has less than twice the tokens."""
    peer = catalog.machine(large).peer
    return "host-bound" if peer is None else f"its collectives pass {peer.name}, {peer.bytes_per_s / 1e9:.0f} GB/s"


def pairs(catalog: Catalog) -> list[dict[str, object]]:
    """Returns each pair with its factor, without pairs in which the model does not fit."""
    rate = cache(lambda name, gpus, model: tokens_per_s(catalog, name, gpus, model))
    found: list[dict[str, object]] = []
    for (small, few), (large, many) in product(nodes(catalog), repeat=2):
        if many != 2 * few or card(catalog, small) != card(catalog, large):
            continue
        for model in MODELS:
            a, b = rate(small, few, model), rate(large, many, model)
            if a and b:
                names = {"small": small, "gpus": few, "large": large, "of": many, "model": model}
                factor = round(b / a, 3)
                found.append({**names, "factor": factor, "reason": "" if factor >= LEAST else reason(catalog, large)})
    return found


def outside(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [row for row in rows if not LEAST <= float(str(row["factor"])) <= MOST]


def main() -> int:
    only_help(__doc__)
    rows = pairs(load_catalog())
    wrong = outside(rows)
    print(f"{len(rows)} pairs, {len(wrong)} outside {LEAST} to {MOST}")
    for row in rows:
        print("  {gpus:>2} of {small:18s} -> {of:>2} of {large:18s} {model:3s} {factor:6}  {reason}".format(**row))
    write_result("families", {"least": LEAST, "most": MOST, "outside": len(wrong), "pairs": rows})
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
