"""Mixed GPUs by name: "a100-80x2+v100-32x2" has two A100 and two V100 in one node.

A part is a catalog machine with one GPU, or its GPU, and a number. Each GPU keeps its machine's link; the host is the
first part's. GPUs reach each other over their links, with equal shares of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pstar_sim.arguments import spelled
from pstar_sim.catalog.catalog import Catalog
from pstar_sim.catalog.entries import MOST_GPUS_OF_A_KIND
from pstar_sim.catalog.machine import BY_COLLECTIVES, Machine
from pstar_sim.errors import CatalogError, UnknownName

JOIN = "+"


def names_parts(name: str, catalog: Catalog) -> bool:
    """Whether the name lists parts and is no catalog machine's."""
    return JOIN in name and spelled(name, catalog.machines) not in catalog.machines


def mixed_machine(name: str, catalog: Catalog) -> Machine:
    """Raises CatalogError for a part that is empty or without GPU, and for GPUs that are all the same; UnknownName for
    one that is no machine with one GPU."""
    known = _single(catalog)
    counts: dict[str, int] = {}
    for part in name.split(JOIN):
        one, written = _split(part.strip(), known)
        if not part.strip():
            raise CatalogError(
                f"machine {name!r}: a part is empty; write GPUxNUMBER+GPUxNUMBER, as a100-80x2+v100-32x2"
            )
        if one is None:
            raise UnknownName("GPU of a mixed machine", part.strip(), tuple(known))
        count = int(written) if len(written) <= len(str(MOST_GPUS_OF_A_KIND)) else MOST_GPUS_OF_A_KIND + 1
        if not 1 <= count <= MOST_GPUS_OF_A_KIND:
            raise CatalogError(
                f"machine {name!r}: {part.strip()}: the number of GPUs must be from 1 to {MOST_GPUS_OF_A_KIND}"
            )
        counts[one] = counts.get(one, 0) + count
    machines = {one: catalog.machine(known[one]) for one in counts}
    first, *others = machines.values()
    total = sum(counts.values())
    if all(other.ranks == first.ranks for other in others):
        raise CatalogError(
            f"machine {name!r}: all its GPUs are {first.gpu.name}; give machine {first.name} with gpus = {total} "
            f"(--machine {first.name} --gpus {total})"
        )
    ranks = [replace(machines[one].ranks[0], batch_share=1 / total) for one, n in counts.items() for _ in range(n)]
    return Machine(
        name=JOIN.join(f"{one}x{n}" for one, n in counts.items()),
        ranks=tuple(ranks),
        host=first.host,
        framework=first.framework,
        slowdowns={BY_COLLECTIVES: 1.0},  # no published run says what unlike GPUs lose to collectives
        notes=f"mixed GPUs of one node with the host of {first.name}; they reach each other over their links",
    )


def _single(catalog: Catalog) -> Mapping[str, str]:
    found = {name: name for name, e in catalog.machines.items() if e.values.gpus == 1 and e.values.nodes == 1}
    of_gpus = {str(catalog.machines[name].values.gpu): name for name in reversed(found)}
    return {**of_gpus, **found}


def _split(part: str, known: Mapping[str, str]) -> tuple[str | None, str]:
    """(part, None if unknown; number of GPUs as written)."""
    head, _, number = part.rpartition("x")
    for name, written in ((part, "1"), (head.strip(), number.strip())):
        if name and spelled(name, known) in known and written.isascii() and written.isdigit():
            return spelled(name, known), written
    return None, ""
