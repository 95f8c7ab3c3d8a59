"""pstar-sim: plan, simulate and execute training with more model data than GPU memory.

    import pstar_sim as ps

    w = ps.preset("12B", batch=8, seq=1024)
    m = ps.machine("rtx4090", host_memory="128GB")
    c = ps.compare(w, m)
    p = c.best()

Importing this package imports nothing heavy (no torch, matplotlib, pandas or simpy): names are looked up when used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pstar_sim.renderers import register
from pstar_sim.version import __version__ as __version__

if TYPE_CHECKING:
    from pstar_sim.catalog.loader import load_machine as machine
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.core.plan import Plan, Settings
    from pstar_sim.core.timeline import Timeline, load_timeline
    from pstar_sim.errors import DoesNotFit, PstarError
    from pstar_sim.planner.ablate import Ablation, ablate
    from pstar_sim.planner.cheapest import cheapest
    from pstar_sim.planner.compare import Comparison, Planned, Row, compare
    from pstar_sim.planner.compare import play_plan as play
    from pstar_sim.planner.explain import explain
    from pstar_sim.planner.fits import fits
    from pstar_sim.planner.limits import max_batch, max_model
    from pstar_sim.planner.sensitivity import sensitivity
    from pstar_sim.planner.stated import load_plan
    from pstar_sim.planner.sweep import sweep
    from pstar_sim.report.listing import machines, models, policies
    from pstar_sim.report.schedule_picture import plot_schedule
    from pstar_sim.report.tide_picture import plot_tide
    from pstar_sim.report.waterfall import plot_waterfall
    from pstar_sim.validation.results import Validation, validate
    from pstar_sim.workload.adapter import Adapter
    from pstar_sim.workload.presets import preset
    from pstar_sim.workload.relay import relay
    from pstar_sim.workload.trace import load_trace
    from pstar_sim.workload.workload import Workload, repeat_micro_batch

__all__ = [
    "Ablation",
    "Adapter",
    "Comparison",
    "DoesNotFit",
    "Machine",
    "Plan",
    "Planned",
    "PstarError",
    "Row",
    "Settings",
    "Timeline",
    "Validation",
    "Workload",
    "ablate",
    "cheapest",
    "compare",
    "explain",
    "fits",
    "load_plan",
    "load_timeline",
    "load_trace",
    "machine",
    "machines",
    "max_batch",
    "max_model",
    "models",
    "play",
    "plot_schedule",
    "plot_tide",
    "plot_waterfall",
    "policies",
    "preset",
    "relay",
    "repeat_micro_batch",
    "sensitivity",
    "sweep",
    "validate",
]

_WHERE = {
    "Ablation": "planner.ablate:Ablation",
    "Adapter": "workload.adapter:Adapter",
    "Comparison": "planner.compare:Comparison",
    "DoesNotFit": "errors:DoesNotFit",
    "Machine": "catalog.machine:Machine",
    "Plan": "core.plan:Plan",
    "Planned": "planner.compare:Planned",
    "PstarError": "errors:PstarError",
    "Row": "planner.compare:Row",
    "Settings": "core.plan:Settings",
    "Timeline": "core.timeline:Timeline",
    "Validation": "validation.results:Validation",
    "Workload": "workload.workload:Workload",
    "ablate": "planner.ablate:ablate",
    "cheapest": "planner.cheapest:cheapest",
    "compare": "planner.compare:compare",
    "explain": "planner.explain:explain",
    "fits": "planner.fits:fits",
    "load_plan": "planner.stated:load_plan",
    "load_timeline": "core.timeline:load_timeline",
    "load_trace": "workload.trace:load_trace",
    "machine": "catalog.loader:load_machine",
    "machines": "report.listing:machines",
    "max_batch": "planner.limits:max_batch",
    "max_model": "planner.limits:max_model",
    "models": "report.listing:models",
    "play": "planner.compare:play_plan",
    "plot_schedule": "report.schedule_picture:plot_schedule",
    "plot_tide": "report.tide_picture:plot_tide",
    "plot_waterfall": "report.waterfall:plot_waterfall",
    "policies": "report.listing:policies",
    "preset": "workload.presets:preset",
    "relay": "workload.relay:relay",
    "repeat_micro_batch": "workload.workload:repeat_micro_batch",
    "sensitivity": "planner.sensitivity:sensitivity",
    "sweep": "planner.sweep:sweep",
    "validate": "validation.results:validate",
}

# Class of an answer -> form in which it is shown -> function that draws it.
_RENDERERS = {
    "Ablation": {"text": "report.ablation:ablation_text", "html": "report.ablation:ablation_html"},
    "Cheapest": {"text": "report.capacity_tables:cheapest_text"},
    "Comparison": {"text": "report.tables:comparison_text", "html": "report.html:comparison_html"},
    "Fits": {"text": "report.capacity_tables:fits_text"},
    "Limits": {"text": "report.capacity_tables:limits_text"},
    "Machine": {"html": "report.html:machine_html"},
    "Plan": {"html": "report.html:plan_html", "proof": "core.checker.check:check_plan"},
    "Planned": {"html": "report.html:planned_html"},
    "Sensitivity": {"text": "report.capacity_tables:sensitivity_text"},
    "Timeline": {"html": "report.html:timeline_html", "tide": "report.tide_picture:plot_tide"},
    "Workload": {"html": "report.html:workload_html"},
}


def _look_up(where: str) -> Any:
    module, _, attribute = where.partition(":")
    return getattr(import_module(f"pstar_sim.{module}"), attribute)


def _finder(where: str) -> Callable[[], Any]:
    return lambda: _look_up(where)


for _answer, _forms in _RENDERERS.items():
    for _form, _where in _forms.items():
        register(_answer, _form, _finder(_where))


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'pstar_sim' has no attribute {name!r}")
    value: object = _look_up(_WHERE[name])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
