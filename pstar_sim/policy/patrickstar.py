from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.workload.workload import Workload


def patrickstar(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    raise NotImplementedError("patrickstar is being written")
