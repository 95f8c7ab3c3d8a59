"""Twice the GPUs of one family, the same batch per GPU: how many times the tokens?

Every pair of machines of the catalog with the same card, joined by NVLink within one node, one with twice as many GPUs
as the other; a node of the catalog also counts with fewer of its GPUs. Policy all_on_gpu, bf16 (forced on V100),
sequence 1024, checkpointing, no clipping. Hosts do not matter to this policy, so a factor between 1.6 and 2.02 is what
hardware gives; one outside says that two models time the two entries.

Three ways to time: the catalog as it is, all machines by the efficiency model (`rates = "fitted"`), and all with
products by shape (`rates = "curves"`). The second table says what one model for all would change: seconds of one
iteration on each entry against those of the catalog as it is.

    python benchmarks/families.py        # writes benchmarks/results/families.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product

from _help import only_help
from _results import write_result
from msgspec import structs

import pstar_sim as ps
from pstar_sim.catalog.catalog import Catalog, load_catalog
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.overrides import override

MODELS = {"1B": 4, "4B": 4}
"""Model -> sequences per GPU."""
LEAST, MOST = 1.6, 2.02


def timed_by(rates: str) -> Catalog:
    """The catalog with this in place of each machine's own `rates`; "" leaves them."""
    catalog = load_catalog()
    machines = {
        name: replace(e, values=structs.replace(e.values, rates=rates)) if rates and card(catalog, name) else e
        for name, e in catalog.machines.items()
    }
    return replace(catalog, machines=machines)


def card(catalog: Catalog, name: str) -> str | None:
    """The machine's GPU, None where its generation is not in generations.toml."""
    gpu = catalog.machines[name].values.gpu
    return None if gpu is None or catalog.gpus[gpu].values.generation is None else gpu


def with_gpus(machine: Machine, gpus: int) -> Machine:
    return machine if gpus == len(machine.ranks) else override(machine, {"gpus": gpus})


def nodes(catalog: Catalog) -> Iterator[tuple[str, int]]:
    """(machine, GPUs) of every entry of one node with a family, whole and with fewer GPUs."""
    for name in catalog.machines:
        machine = catalog.machine(name)
        if card(catalog, name) and machine.nodes == 1:
            count = len(machine.ranks)
            while count:
                if count == 1 or machine.peer is not None:
                    yield name, count
                count = count // 2 if count % 2 == 0 else 0


def tokens_per_s(catalog: Catalog, name: str, gpus: int, model: str) -> float | None:
    machine = with_gpus(catalog.machine(name), gpus)
    workload = ps.preset(model, batch=MODELS[model] * gpus, seq=1024, dtype="bf16")
    result = ps.compare(workload, machine, policies=("all_on_gpu",), clip=False, barrier_cost=False, near=False)
    return result.rows[0].tokens_per_s


def pairs(catalog: Catalog) -> list[dict[str, object]]:
    """Each pair with its factor; pairs in which the model does not fit are left out."""
    rate = cache(lambda name, gpus, model: tokens_per_s(catalog, name, gpus, model))
    found: list[dict[str, object]] = []
    for (small, few), (large, many) in product(nodes(catalog), repeat=2):
        if many != 2 * few or card(catalog, small) != card(catalog, large):
            continue
        for model in MODELS:
            a, b = rate(small, few, model), rate(large, many, model)
            if a and b:
                names = {"small": small, "gpus": few, "large": large, "of": many, "model": model}
                found.append({**names, "factor": round(b / a, 3)})
    return found


def changes(catalogs: Mapping[str, Catalog]) -> list[dict[str, object]]:
    """Each entry of the catalog: seconds by the other models against those of its own, as a share more."""
    own = catalogs["catalog"]
    found: list[dict[str, object]] = []
    for name in own.machines:
        if card(own, name):
            gpus = len(own.machine(name).ranks)
            for model in MODELS:
                rates = {way: tokens_per_s(catalog, name, gpus, model) for way, catalog in catalogs.items()}
                base = rates["catalog"]
                if base:
                    more = {way: round(base / rate - 1, 3) for way, rate in rates.items() if rate and way != "catalog"}
                    by = own.machines[name].values.rates
                    found.append({"machine": name, "model": model, "rates": by, "tokens_per_s": round(base), **more})
    return found


def outside(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [row for row in rows if not LEAST <= float(str(row["factor"])) <= MOST]


def main() -> int:
    only_help(__doc__)
    catalogs = {way: timed_by("" if way == "catalog" else way) for way in ("catalog", "fitted", "curves")}
    found = {way: pairs(catalog) for way, catalog in catalogs.items()}
    for way, rows in found.items():
        print(f"{way}: {len(rows)} pairs, {len(outside(rows))} outside {LEAST} to {MOST}")
        for row in rows:
            mark = "  <<<" if row in outside(rows) else ""
            print("  {gpus:>2} of {small:18s} -> {of:>2} of {large:18s} {model:3s} {factor:6}".format(**row) + mark)
    changed = changes(catalogs)
    for row in changed:
        print(row)
    counts = {way: {"pairs": len(rows), "outside": len(outside(rows))} for way, rows in found.items()}
    write_result("families", {"counts": counts, "pairs": found, "seconds_change": changed})
    return 1 if outside(found["fitted"]) or outside(found["curves"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
