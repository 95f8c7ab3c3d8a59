"""Wrong inputs in Python: one clear error that names the argument and the value, never one from the inside."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.errors import CatalogError, PstarError
from pstar_sim.workload.axes import AxesGiven
from pstar_sim.workload.trace import save_trace

NAN = math.nan


@pytest.fixture(scope="module")
def node() -> Machine:
    return ps.machine("a100-80x8")


def _link(m: Machine, **changes: Any) -> Machine:
    return replace(m, ranks=tuple(replace(r, link=replace(r.link, **changes)) for r in m.ranks))


def _gpu(m: Machine, **changes: Any) -> Machine:
    return replace(m, ranks=tuple(replace(r, gpu=replace(r.gpu, **changes)) for r in m.ranks))


def _host(m: Machine, **changes: Any) -> Machine:
    return replace(m, host=replace(m.host, **changes))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((lambda m, x=x: _link(m, h2d_bytes_per_s=x), f"h2d_bytes_per_s = {x}: it must") for x in (0, NAN, -1.0)),
        *((lambda m, x=x: _host(m, adam_params_per_s=x), f"adam_params_per_s = {x}: it") for x in (0, NAN, -1e9)),
        (lambda m: _link(m, latency_s=-1), "latency_s = -1: it must be a finite number of at least 0"),
        (lambda m: _link(m, latency_s=1e308), "latency_s = 1e.308: it must be .* of at least 0, from 1e-18 to 1e.18"),
        (lambda m: _link(m, h2d_bytes_per_s=1e-300), "h2d_bytes_per_s = 1e-300: it must be .* above 0, from 1e-18 to"),
        (lambda m: _host(m, memory_bytes=10**400), r"memory_bytes = 10*\.\.\.: it must be .* from 1e-18 to 1e.18"),
        (lambda m: _gpu(m, usable_bytes=m.gpu.memory_bytes + 1), r"the card has \d+ bytes; give no more"),
        (lambda m: _link(m, duplex="yes"), "duplex = 'yes': it must be True or False"),
        (lambda m: _gpu(m, flops_per_s={"fp16": math.inf}), r"flops_per_s\['fp16'\] = inf"),
        (lambda m: _gpu(m, flops_per_s={}), "flops_per_s = {}"),
        (lambda m: _gpu(m, context_bytes=m.gpu.usable_bytes), "the driver context takes .* nothing would be left"),
        (lambda m: _host(m, reserved_bytes=m.host.memory_bytes), "are reserved for the system; nothing would be left"),
        (lambda m: _host(m, cores=0), "cores = 0: it must be a whole number of at least 1"),
        (lambda m: replace(m, ranks=m.ranks * 8, nodes=7), "64 ranks on 7 nodes; each node must have the same number"),
        (lambda m: replace(m, ranks=()), r"ranks = \(\)"),
        (lambda m: replace(m, ranks=m.ranks[:7]), "7 ranks add up to 0.875; they must add up to 1"),
        (lambda m: replace(m, nodes=0), "nodes = 0: it must be a whole number of at least 1"),
        (lambda m: replace(m, host=None), "host = None: it must be a Host"),
        (lambda m: replace(m, ranks=(replace(m.ranks[0], batch_share=NAN),)), "batch_share = nan"),
        (lambda m: replace(m, price_usd_per_hour=-1), "price_usd_per_hour = -1"),
    ],
)
def test_a_machine_that_makes_no_sense_cannot_be_made(
    change: Callable[[Machine], Machine], said: str, node: Machine
) -> None:
    with pytest.raises(CatalogError, match=said):
        change(node)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host.memory": "1GB", "host.reserved": "2GB"}, "2.00 GB of 1.00 GB are reserved for the system"),
        ({"host.reserved": "500TB"}, "host.reserved = '500TB' is absurd|are reserved for the system"),
        ({"gpu.context": "90GB"}, "the driver context takes 90.00 GB of"),
    ],
)
def test_overrides_say_what_the_machine_says(given: dict[str, str], said: str) -> None:
    with pytest.raises(CatalogError, match=said):
        ps.machine("a100-80", overrides=given)


def test_memory_and_what_is_taken_of_it_are_set_in_either_order() -> None:
    small = ps.machine("a100-80", overrides={"host.memory": "2GB", "host.reserved": "1GB"})
    assert small.host.budget_bytes == 10**9
    large = ps.machine("a100-80", overrides={"host.reserved": "2000GB", "host.memory": "3000GB"})
    assert large.host.budget_bytes == 10**12


def test_what_people_write_works() -> None:
    """Names where a machine is expected, one policy alone, sizes and adapters as on the command line."""
    w = ps.preset("gpt2", batch=1, seq=64, lora="r=4")
    assert {t.shape[0] for t in w.tensors if t.name.endswith("lora_A.weight")} == {4}
    answer = ps.compare(w, "V100-32", policies="tide", chunk_bytes="2MiB")
    assert answer.settings.chunk_bytes == 2 * 2**20
    drawn = ps.plot_tide(answer)
    assert len(drawn) == 1 and drawn[0].get_title(loc="left")
    assert ps.plot_tide(answer.best()).get_title(loc="left")


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """What a loop over an array gives; a plan of them can be written, and read again."""
    import numpy as np

    eight, kib, half = np.array([8, 1024, 64])
    w = ps.preset("gpt2", batch=eight, seq=half, micro_batches=np.int32(1))
    answer = ps.compare(w, "v100-32", policies="tide", chunk_bytes=2 * kib * kib)
    answer.best().save(tmp_path / "plan.json")
    assert ps.load_plan(tmp_path / "plan.json").workload.batch == 8
    assert len(ps.machine("virtual", gpus=np.int64(2)).ranks) == 2
    four = ps.preset("gpt2", batch=1, seq=64, lora=4)
    assert ps.preset("gpt2", batch=1, seq=64, lora=np.int64(4)).fingerprint == four.fingerprint


def test_a_model_has_one_name_however_it_is_written() -> None:
    """Else a plan would not be for the workload that it was made for."""
    plain = ps.preset("1B", batch=1, seq=64)
    assert ps.preset("1b", batch=1, seq=64).model == plain.model
    assert (
        ps.compare(plain, "v100-32", policies="tide").best().plan.check(ps.preset("1b", batch=1, seq=64, dtype="fp16"))
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda w: ps.compare("12B", "v100-32"), r"workload = '12B': it must be a Workload, such as ps.preset\('12B'"),
        (lambda w: ps.preset("12B", batch="8"), "model 12B: batch = '8': it must be a whole number"),
        (lambda w: ps.preset("12B", batch=8, lora="rank"), "lora rank: 'rank' is not r=RANK"),
        (lambda w: ps.compare(w, "v100-32", chunk_bytes="big"), "chunk_bytes = 'big': 'big' is not a size"),
        (lambda w: ps.compare(w, "v100-32", policies=[]), r"policies = \[\]: give at least one policy"),
        (lambda w: ps.compare(w, "v100-32", policies="tied"), "unknown policy 'tied'; did you mean tide"),
        (lambda w: ps.machine(None), "machine = None: it must be the name of a machine, or the path of a file of one"),
        (lambda w: ps.machine("v100-32", overrides={"host.cores": 10**400}), "host.cores = 10* is no count; write 8"),
        (lambda w: ps.compare(w, 32), "machine = 32: it must be a Machine or the name of one"),
        (lambda w: ps.compare(w, "h100-81"), "unknown machine 'h100-81'; did you mean h100-80"),
        (lambda w: ps.machine("v100-32", gpu_memory="48"), "'48' has no unit; write 48GB"),
        (lambda w: ps.machine("v100-32", gpu_memory=48), "gpu memory of 48 B leaves nothing: the driver context"),
        (lambda w: ps.machine("v100-32", overrides={"gpu.memory": 48}), "gpu.memory = 48 has no unit; write 48GB"),
        (lambda w: ps.machine("v100-32", overrides={"link.bandwidth": "12"}), "'12' has no unit; write 12GB/s"),
        (lambda w: ps.machine("v100-32", overrides={"gpu.flops.fp16": "150"}), "'150' has no unit; write 150T"),
        (lambda w: ps.Settings(clip="yes"), "clip = 'yes': it must be True or False"),  # type: ignore[arg-type]
        (lambda w: ps.Settings(loop="mine"), "loop = 'mine': it must be one of own, step"),
    ],
)
def test_what_does_not_work_is_one_clear_error(call: Callable[[Any], object], said: str) -> None:
    with pytest.raises(PstarError, match=said):
        call(ps.preset("gpt2", batch=1, seq=64))


WRONG: tuple[object, ...] = (None, "nonsense", "", 0, -1, 1.5, NAN, True, [], [1], {"a": 1}, object(), b"x", print)
SLOW = {"validate"}  # takes seconds with any valid argument; its arguments are words, tried below
CLASSES = (ps.Adapter, ps.Settings)


def _valid(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Arguments with which each public function would answer, as quickly as it can."""
    w = ps.preset("tiny-gpt2", batch=1, seq=8)
    m = ps.machine("v100-32")
    few = {"policies": ["all_on_gpu"]}
    planned = ps.compare(w, m, barrier_cost=False, **few).best()
    planned.save(tmp_path / "plan.json")
    planned.timeline.save(tmp_path / "timeline.json")
    save_trace(w, tmp_path / "t.parquet")
    ablation = ps.ablate(w, m, policy="static_partition")
    small = ps.machine("v100-32", gpu_memory="1.003GB", overrides={"host.memory": "20MB", "host.reserved": "1MB"})
    job = {"batch": 1, "seq": 8}
    priced = replace(m, price_usd_per_hour=1.0)
    grid = {"machine": "v100-32", "model": "tiny-gpt2", "policy": "all_on_gpu", **job}
    return {
        "ablate": {"workload": w, "machine": m, "policy": "static_partition"},
        "cheapest": {
            "model": "tiny-gpt2",
            "tokens": 1e3,
            "machines": [priced],
            **job,
            **few,
        },
        "compare": {"workload": w, "machine": m, "barrier_cost": False, **few},
        "explain": {"plan": planned.plan, "timeline": planned.timeline},
        "fits": {"workload": w, "machine": m, "near": False, **few},
        "load_plan": {"path": tmp_path / "plan.json"},
        "load_timeline": {"path": tmp_path / "timeline.json"},
        "load_trace": {"path": tmp_path / "t.parquet"},
        "machine": {"name": "v100-32"},
        "machines": {},
        "max_batch": {"machine": m, "write": lambda n: ps.preset("tiny-gpt2", batch=n, seq=8), **few},
        "max_model": {"machine": small, "like": "tiny-gpt2", "catalog": False, **job, **few},
        "models": {},
        "play": {"plan": planned.plan},
        "plot_schedule": {"timeline": planned.timeline},
        "plot_tide": {"timelines": planned.timeline},
        "plot_waterfall": {"ablation": ablation},
        "policies": {},
        "preset": {"name": "tiny-gpt2", **job},
        "relay": {"workload": w},
        "repeat_micro_batch": {"w": w, "micro_batches": 2},
        "sensitivity": {"workload": w, "machine": m, "parts": ["link"], "largest": False, **few},
        "sweep": {"grid": grid, "jobs": 1},
    }


def _names_it(error: TypeError, argument: str) -> bool:
    return argument in str(error)


def _arguments(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arguments with their defaults; the axes of a job one by one."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((axis, None) for axis in AxesGiven.__annotations__)
        else:
            yield name, parameter.default


def test_every_argument_of_every_public_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong kinds of values for one argument at a time: an answer, a PstarError or a TypeError that names the
    argument."""
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)  # a name is a good file
    valid = _valid(tmp_path)
    functions = {name for name in ps.__all__ if inspect.isfunction(getattr(ps, name))}
    assert functions == valid.keys() | SLOW
    bad: list[str] = []
    tried = 0
    for name, given in sorted(valid.items()):
        function = getattr(ps, name)
        for argument, default in _arguments(function):
            for value in WRONG:
                if value is default or type(value) is type(given.get(argument, default)) is bool:
                    continue  # not wrong
                tried += 1
                try:
                    function(**{**given, argument: value})
                except PstarError:
                    pass
                except TypeError as error:
                    if not _names_it(error, argument):
                        bad.append(f"{name}({argument}={value!r}): TypeError: {error}")
                except Exception as error:
                    bad.append(f"{name}({argument}={value!r}): {type(error).__name__}: {error}")
                pyplot.close("all")
    for made in CLASSES:
        for argument in inspect.signature(made).parameters:
            for value in WRONG:
                tried += 1
                with contextlib.suppress(PstarError):
                    made(**{argument: value})
    assert not bad, f"{len(bad)} of {tried}:\n" + "\n".join(bad)
    assert tried > 1000


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: ps.machine("h100-80x8", nodes=10**9), "nodes = 1000000000: it must be a whole number of at most 4096"),
        (
            lambda: ps.cheapest("gpt2", tokens=1e9, batch=8, seq=128, most_nodes=10**9),
            "most_nodes = 1000000000: .* 4096",
        ),
        (lambda: ps.cheapest("gpt2", tokens=1e9, batch=10**40, seq=128), "batch = 10*: .* at most 1000000000"),
        (lambda: ps.max_model("v100-32", batch=1, seq=128, hidden=10**40), "hidden = 10*: .* at most 1000000"),
        (
            lambda: ps.max_model("v100-32", batch=1, seq=128, micro_batches=10**8),
            "micro_batches is 10*; .* give at most",
        ),
    ],
)
def test_a_count_beyond_all_use_is_refused_before_anything_of_that_length_is_made(
    ask: Callable[[], object], said: str
) -> None:
    with pytest.raises(PstarError, match=said):
        ask()
