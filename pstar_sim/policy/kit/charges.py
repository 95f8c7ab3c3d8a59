"""Seconds and bytes of a draft's rows, from core/step.py's table and the cost model, each computed once."""

from __future__ import annotations

from msgspec import structs

from pstar_sim.core.draft import Charge
from pstar_sim.core.effects import frees, takes
from pstar_sim.core.plan import Resident
from pstar_sim.core.step import OTHERS, ROUTES, Kind, Place, Queue, Step
from pstar_sim.core.trips import TRIPS, trips_of
from pstar_sim.cost import CostModel

_CHARGES = ("charges",)  # key of `Workload.derived`


def step_bytes(cost: CostModel, kind: Kind, chunk: int | None, list_name: str | None, trip: int | None = None) -> int:
    """`Step.bytes`, by the table of core/step.py."""
    if kind is Kind.COMPUTE:
        return 0
    if kind in TRIPS:
        assert trip is not None
        return trips_of(cost.workload)[kind, trip].bytes
    assert chunk is not None
    work_bytes = cost.work_bytes(kind, chunk)
    if work_bytes is not None:
        return work_bytes
    assert list_name is not None
    layout = cost.layout
    if ROUTES.get(kind) == "net":
        return layout.payload_bytes(chunk, OTHERS.get(list_name, list_name)) * layout.slices_of(chunk)
    return layout.payload_bytes(chunk, list_name)


def charges_of(cost: CostModel) -> Charges:
    """A cost model always gets the same object."""
    known = cost.workload.derived.get(_CHARGES)
    if not (isinstance(known, Charges) and known.cost is cost):
        cost.workload.derived[_CHARGES] = known = Charges(cost)
    return known


class Charges:
    """Charges of a job whose moving chunks live on the host.

    A copy to where a chunk lives takes no bytes, which are held all the time, but for a gradient list ("grad"): a
    write-back takes it, and the add frees it.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known: dict[tuple[Kind, int, str], Charge] = {}

    def of(self, kind: Kind, chunk: int, list_name: str = "param") -> Charge:
        key = (kind, chunk, list_name)
        charge = self._known.get(key)
        if charge is None:
            charge = self._known[key] = self._make(kind, chunk, list_name)
        return charge

    def of_update(self, kind: Kind, chunk: int, *, folds: bool) -> Charge:
        """folds: adds a last gradient to the sum first."""
        charge = self.of(kind, chunk)
        if not folds:
            return charge
        add = self.cost.update_adds.of_update(kind, chunk)
        return structs.replace(
            charge, seconds=charge.seconds + add.seconds, dram_bytes=charge.dram_bytes + add.dram_bytes
        )

    def of_trip(self, kind: Kind, number: int) -> Charge:
        """A stash's room on the host is a buffer of the plan."""
        size = step_bytes(self.cost, kind, None, None, number)
        return self._charge(Step(id=0, queue=TRIPS[kind], kind=kind, bytes=size, stash=number), None, None)

    def _make(self, kind: Kind, chunk: int, list_name: str) -> Charge:
        step = Step(
            id=0,
            queue=Queue.COMPUTE,  # the charge does not depend on the queue
            kind=kind,
            bytes=step_bytes(self.cost, kind, chunk, list_name),
            chunk=chunk,
            list=list_name,
            place=Place.GPU if kind in (Kind.ALLOC, Kind.FREE) else None,
        )
        taken, freed = takes(step), frees(step)
        if taken is not None and taken.lenient and taken.resident.place is Place.HOST and taken.resident.list != "grad":
            taken = None  # the list is at home there
        return self._charge(step, taken and taken.resident, freed and freed.resident)

    def _charge(self, step: Step, taken: Resident | None, freed: Resident | None) -> Charge:
        def size(who: Resident | None, place: Place) -> int:
            return self.cost.layout.payload_bytes(who.chunk, who.list) if who and who.place is place else 0

        return Charge(
            seconds=self.cost.seconds(step),
            gpu_take=size(taken, Place.GPU),
            gpu_free=size(freed, Place.GPU),
            host_take=size(taken, Place.HOST),
            host_free=size(freed, Place.HOST),
            dram_bytes=self.cost.dram_bytes(step),
        )
