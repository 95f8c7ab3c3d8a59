"""The factor by which tokens per second grow with twice the GPUs of one family, at the same batch per GPU.

The machines are those of the catalog with a card whose products are known by shape; a node also counts with fewer of
its GPUs. bf16 (forced on V100), sequence 1024, checkpointing, no clipping, 4 sequences per GPU. Three kinds of pairs:

    hardware      two machines of one card, within a node with links between its GPUs, policy all_on_gpu. Hosts do not
                  matter to this policy, so the factor has to be between 1.6 and 2.02: another one means that the two
                  entries are timed by inconsistent figures.
    host-bound    the same two machines with the policy zero_offload, whose CPU Adam updates all parameters.
    slow network  a machine and two nodes of it, or a card and two of them without links between them, policy
                  all_on_gpu: the collectives pass the network, or the links of the host.

The last two kinds may have any factor. Each of their pairs is printed with what binds on both sides. Outside 1.6 to
2.02 the reason is also tried: the rates of a part (CPU Adam and DRAM, links to the host, links between the GPUs,
network) are made a thousand times as large on both sides, and the factor has to come back inside. The fewest parts with
which it does are the reason. A pair of the first kind outside, or another one without a reason, ends the script with 1.

    python benchmarks/families.py        # writes benchmarks/results/families.json
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, product

from _help import only_help
from _results import write_result

import pstar_sim as ps
from pstar_sim.catalog.catalog import Catalog, load_catalog
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.overrides import override
from pstar_sim.core.figures import BINDS_NAMES

MODELS = {"1B": 4, "4B": 4}
"""Model -> sequences per GPU."""
LEAST, MOST = 1.6, 2.02
HARDWARE, HOST, NETWORK = "hardware", "host-bound", "slow network"
POLICIES = {HARDWARE: "all_on_gpu", HOST: "zero_offload", NETWORK: "all_on_gpu"}
TIMES = 1000
PARTS = ("CPU Adam and DRAM", "links to the host", "links between the GPUs", "network")


def enlarge(machine: Machine, part: str) -> Machine:
    """Returns the machine with the rates of this part TIMES as large, beyond what a catalog file may say."""
    if part == "CPU Adam and DRAM":
        host = machine.host
        adam, dram = host.adam_params_per_s * TIMES, host.dram_bytes_per_s * TIMES
        return replace(machine, host=replace(host, adam_params_per_s=adam, dram_bytes_per_s=dram))
    if part == "links to the host":
        links = [
            replace(
                r.link, h2d_bytes_per_s=r.link.h2d_bytes_per_s * TIMES, d2h_bytes_per_s=r.link.d2h_bytes_per_s * TIMES
            )
            for r in machine.ranks
        ]
        root = machine.root_bytes_per_s
        return replace(
            machine,
            ranks=tuple(replace(rank, link=link) for rank, link in zip(machine.ranks, links, strict=True)),
            root_bytes_per_s=None if root is None else root * TIMES,
        )
    which = {"links between the GPUs": "peer", "network": "network"}[part]
    fabric = getattr(machine, which)
    return (
        machine
        if fabric is None
        else replace(machine, **{which: replace(fabric, bytes_per_s=fabric.bytes_per_s * TIMES)})
    )


@dataclass(frozen=True)
class Side:
    """A machine with some of its GPUs: `gpus` of them in each of `nodes` nodes. `enlarged`: parts whose rates are
    TIMES as large as in the catalog."""

    name: str
    gpus: int
    nodes: int = 1
    enlarged: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return self.gpus * self.nodes

    def machine(self, catalog: Catalog) -> Machine:
        machine = override(catalog.machine(self.name), {"gpus": self.gpus, "nodes": self.nodes})
        for part in self.enlarged:
            machine = enlarge(machine, part)
        return machine


@dataclass(frozen=True)
class Pair:
    """Two machines, the larger with twice as many GPUs. `why`: what binds, and what was enlarged to bring the factor
    inside; "" for a pair of HARDWARE. `relieved`: the factor with the parts that `why` names enlarged."""

    kind: str
    small: str
    gpus: int
    large: str
    of: int
    nodes: int
    model: str
    factor: float
    why: str = ""
    relieved: float | None = None

    @property
    def wrong(self) -> bool:
        """Whether the factor is outside, and no reason was found where one would do."""
        return not inside(self.factor) and (self.kind == HARDWARE or not inside(self.relieved))


def inside(factor: float | None) -> bool:
    return factor is not None and LEAST <= factor <= MOST


def card(catalog: Catalog, name: str) -> str | None:
    """Returns the name of the machine's GPU; None for a GPU without products by shape."""
    gpu = catalog.machines[name].values.gpu
    return None if gpu is None or catalog.gpus[gpu].values.generation is None else gpu


def sides(catalog: Catalog) -> Iterator[Side]:
    """Yields every entry of one node, whole and with fewer GPUs."""
    for name in catalog.machines:
        machine = catalog.machine(name)
        if card(catalog, name) and machine.nodes == 1:
            count = len(machine.ranks)
            while count:
                if count == 1 or machine.peer is not None:
                    yield Side(name, count)
                count = count // 2 if count % 2 == 0 else 0


def asked(catalog: Catalog) -> Iterator[tuple[str, Side, Side]]:
    """Yields (kind, smaller, larger machine) of every pair."""
    for small, large in product(sides(catalog), repeat=2):
        if large.count == 2 * small.count and card(catalog, small.name) == card(catalog, large.name):
            yield HARDWARE, small, large
            yield HOST, small, large
    for side in sides(catalog):
        machine = catalog.machine(side.name)
        if side.gpus == len(machine.ranks) and machine.network is not None:
            yield NETWORK, side, Side(side.name, side.gpus, nodes=2)
        if side.gpus == len(machine.ranks) == 1 and not machine.unified:
            yield NETWORK, side, Side(side.name, 2)


class Families:
    """The factors of a catalog's pairs. Each machine is asked about once per model and policy."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.row = cache(self._row)
        self.workload = cache(self._workload)

    def _workload(self, model: str, count: int) -> ps.Workload:
        return ps.preset(model, batch=MODELS[model] * count, seq=1024, dtype="bf16")

    def _row(self, side: Side, model: str, policy: str) -> ps.Row:
        workload, machine = self.workload(model, side.count), side.machine(self.catalog)
        return ps.compare(workload, machine, policies=(policy,), clip=False, barrier_cost=False, near=False).rows[0]

    def factor(self, small: Side, large: Side, model: str, policy: str, parts: Iterable[str] = ()) -> float | None:
        """Returns how many times the tokens the larger machine trains, with these parts enlarged on both sides; None
        where the model does not fit."""
        one, two = (
            self.row(Side(s.name, s.gpus, s.nodes, tuple(parts)), model, policy).tokens_per_s for s in (small, large)
        )
        return round(two / one, 3) if one and two else None

    def pair(self, kind: str, small: Side, large: Side, model: str) -> Pair | None:
        """Returns the pair with its reason; None where the model does not fit."""
        policy = POLICIES[kind]
        factor = self.factor(small, large, model, policy)
        if factor is None:
            return None
        why, relieved = "", None
        if kind != HARDWARE:
            bound = [BINDS_NAMES.get(b := str(self.row(s, model, policy).bound_by), b) for s in (small, large)]
            why = (
                f"{bound[0]} binds" if bound[0] == bound[1] else f"{bound[0]} binds the smaller, {bound[1]} the larger"
            )
            if not inside(factor):
                parts, relieved = self.relief(small, large, model, policy)
                if relieved is not None:
                    why += f"; {relieved:.2f} with {TIMES} times the rate of {' and '.join(parts)}"
        names = (small.name, small.count, large.name, large.count, large.nodes, model)
        return Pair(kind, *names, factor, why, relieved)

    def relief(self, small: Side, large: Side, model: str, policy: str) -> tuple[tuple[str, ...], float | None]:
        """Returns the fewest parts with which the factor is inside, once they are enlarged, and the factor with them;
        no part and None where not even all of them suffice."""
        for count in range(1, len(PARTS) + 1):
            tried = [(self.factor(small, large, model, policy, parts), parts) for parts in combinations(PARTS, count)]
            fits = [(factor, parts) for factor, parts in tried if factor is not None and inside(factor)]
            if fits:
                factor, parts = min(fits, key=lambda found: abs(found[0] - 2))
                return parts, factor
        return (), None

    def pairs(self, models: Iterable[str] = MODELS) -> list[Pair]:
        """Returns all pairs, without those in which a model does not fit."""
        found = (self.pair(*pair, model) for pair in asked(self.catalog) for model in models)
        return [pair for pair in found if pair is not None]


def main() -> int:
    only_help(__doc__)
    pairs = Families(load_catalog()).pairs()
    wrong = [pair for pair in pairs if pair.wrong]
    figures: dict[str, object] = {"least": LEAST, "most": MOST, "times": TIMES, "wrong": len(wrong)}
    for kind in POLICIES:
        rows = [pair for pair in pairs if pair.kind == kind]
        out = [pair for pair in rows if not inside(pair.factor)]
        print(f"{kind}: {len(rows)} pairs, {len(out)} outside {LEAST} to {MOST}")
        for pair in rows:
            where = f"{pair.of:>2} of {pair.large}" + (f" on {pair.nodes} nodes" if pair.nodes > 1 else "")
            print(f"  {pair.gpus:>2} of {pair.small:18s} -> {where:30s} {pair.model:3s} {pair.factor:6}  {pair.why}")
        figures[kind] = {"pairs": len(rows), "outside": len(out)}
    for pair in wrong:
        print(f"without a reason: {pair}")
    write_result("families", {**figures, "rows": [asdict(pair) for pair in pairs]})
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
