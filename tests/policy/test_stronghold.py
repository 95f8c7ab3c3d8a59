"""stronghold: what the window keeps, what it takes of the GPU, when Adam runs, and which window it chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy import find_policy
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

LAYERS = 8
EAGER = Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
CLIPPED = Settings(update="step", clip=True, chunk_bytes=2 * MIB)


def machine(**changes: int) -> Machine:
    """A layer of 2 MiB crosses the link in 1 s and is updated in 8 s, on the GPU in 0.25."""
    rates = {"h2d_bytes_per_s": 2.0 * MIB, "adam_params_per_s": MIB / 8, "hbm_bytes_per_s": 28 * 4.0 * MIB}
    return round_machine(**rates, **changes)  # type: ignore[arg-type]


def chain(layers: int = LAYERS, *, forward_s: float = 2.0, micro_batches: int = 1) -> Workload:
    """2 s forward and 4 s backward of each layer, and a tide of 1 MiB at its highest."""
    tide = [
        *(MIB * (n + 1) // layers for n in range(layers)),
        *(MIB * (layers - n) // layers for n in range(layers)),
        0,
    ]
    return chain_workload(layers, MIB, forward_s=forward_s, tide_bytes=tide, micro_batches=micro_batches)


def planned(
    window: int | str, w: Workload | None = None, *, settings: Settings = EAGER, on: Machine | None = None
) -> Plan:
    plan = find_policy(f"stronghold:window={window}")(w or chain(), on or machine(), settings)
    plan.check()
    return plan


def spans(timeline: Timeline, queue: Queue) -> list[tuple[float, float, int | None]]:
    return sorted((s.start_s, s.end_s, s.chunk) for s in timeline.spans if s.queue is queue and s.end_s > s.start_s)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_first_layers_stay_for_ever_and_the_last_from_forward_to_backward(window: int, micro_batches: int) -> None:
    plan = planned(window, chain(micro_batches=micro_batches))
    fetched = Counter(s.chunk for s in plan.steps if s.kind is Kind.FETCH)
    once = dict.fromkeys(range(LAYERS - window, LAYERS), micro_batches)
    assert fetched == {**dict.fromkeys(range(window, LAYERS - window), 2 * micro_batches), **once}
    assert plan.modes == ("pin",) * window + ("cpu",) * (LAYERS - window)


@pytest.mark.parametrize("window", [1, 2, 3, 6, 8])
def test_the_gpu_holds_the_window_its_buffers_and_the_tide(window: int) -> None:
    """14 bytes per parameter of the first layers, 2 of those in the buffers. All of it is taken where the window is
    smaller than the rest: a layer that computes, those ahead of it, and gradients on their way down."""
    peak = ps.play(planned(window)).peak_bytes["gpu"]
    most = 14 * MIB * window + 2 * MIB * min(2 * window, LAYERS - window) + MIB
    assert 14 * MIB * window < peak <= most


def test_adam_runs_beside_the_backward_pass_and_into_the_next_forward() -> None:
    """The last layer's gradient is down at 21 s, the six others' updates follow one another."""
    timeline = ps.play(planned(1))
    adam = spans(timeline, Queue.ADAM)[: LAYERS - 1]
    assert [(begin, end, chunk) for begin, end, chunk in adam] == [
        (pytest.approx(21 + 8 * n), pytest.approx(29 + 8 * n), LAYERS - 1 - n) for n in range(LAYERS - 1)
    ]
    backward_ends = spans(timeline, Queue.COMPUTE)[2 * LAYERS - 1][1]
    assert adam[0][0] < backward_ends < adam[-1][0]


def test_time_falls_with_the_window_and_then_is_flat() -> None:
    """Updates of all layers but the first w, a copy up, forward passes of these layers, the last layer's backward pass
    and its copy down follow one another, until that is shorter than computing: 8 x (2 + 4) s and Adam of the window."""
    seconds = [ps.play(planned(w)).iteration_s for w in range(1, LAYERS + 1)]
    assert seconds == [
        pytest.approx(max((8 + 2) * (LAYERS - w) + 1 + 4 + 1, 6 * LAYERS + 0.25 * w)) for w in range(1, LAYERS + 1)
    ]


def test_time_is_linear_in_depth() -> None:
    assert [ps.play(planned(2, chain(layers))).iteration_s for layers in (8, 12, 16)] == pytest.approx([66, 106, 146])


def test_behind_a_barrier_no_adam_begins_in_the_backward_pass_and_the_answer_says_so() -> None:
    """Updates begin at 48 s, and the second layer waits for the last of them: 48 + 7 x 8 + 1 s, less the 2 s of the
    first layer's forward pass."""
    plan, free = planned(1, settings=CLIPPED), planned(1)
    timeline = ps.play(plan)
    assert spans(timeline, Queue.ADAM)[0][0] == pytest.approx(48)
    assert (timeline.iteration_s, ps.play(free).iteration_s) == (pytest.approx(103), pytest.approx(76))
    assert plan.choices["barrier"] == "clip: no Adam beside the backward pass"
    assert "barrier" not in free.choices


@pytest.mark.parametrize("forward_s", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("settings", [EAGER, CLIPPED])
def test_the_window_chosen_is_as_fast_as_any_and_no_smaller_one_is(forward_s: float, settings: Settings) -> None:
    w, on = chain(forward_s=forward_s), machine(gpu_memory_bytes=100 * MIB)
    auto = planned("auto", w, settings=settings, on=on)
    each = [planned(n, w, settings=settings, on=on).predictions["policy_iteration_s"] for n in range(1, 7)]
    chosen = auto.modes.count("pin")
    assert auto.choices["window"] == f"{chosen} of 8 layers (6 would fit)"
    assert each[chosen - 1] <= min(each) * 1.002
    assert all(seconds > min(each) * 1.002 for seconds in each[: chosen - 1])


def test_a_window_that_was_given_up_is_slower_than_the_one_chosen_and_than_was_said() -> None:
    auto = planned("auto")
    tried = auto.choices["windows_tried"]
    assert isinstance(tried, dict)
    given_up = {w: float(words.split()[2]) for w, words in tried.items() if words.startswith("at least ")}
    assert given_up and len(given_up) < len(tried)
    for w, least_s in given_up.items():
        seconds = planned(str(w)).predictions["policy_iteration_s"]
        assert seconds >= least_s - 5e-4  # shown to a millisecond
        assert seconds > auto.predictions["policy_iteration_s"]


def test_a_window_whose_first_iterations_are_slow_is_not_given_up() -> None:
    """Windows of 24 and 25 begin slower than one of 28, and end faster."""
    w, m = ps.preset("gpt2-xl", batch=1, seq=1024), ps.machine("v100-32x8")
    auto, all_layers = (find_policy(f"stronghold{window}")(w, m, Settings()) for window in ("", ":window=28"))
    assert auto.choices["window"] == "24 of 28 groups of the 48 layers that share chunks (28 would fit)"
    assert auto.predictions["policy_iteration_s"] < 0.99 * all_layers.predictions["policy_iteration_s"]


def test_a_layer_is_a_numbered_module_and_what_is_outside_stays() -> None:
    w = ps.preset("1B", batch=1, seq=256)
    plan = find_policy("stronghold:window=2")(w, ps.machine("v100-32"), EAGER)
    pinned = {w.tensors[s.tensor].name for c in plan.layout.chunks if plan.modes[c.index] == "pin" for s in c.slots}
    assert "transformer.wte.weight" in pinned
    for number in range(20):
        assert (f"transformer.h.{number}.mlp.c_fc.weight" in pinned) == (number < 2), number
    unnamed = chain()
    unnamed = replace(unnamed, tensors=tuple(replace(t, name=f"weight{n}") for n, t in enumerate(unnamed.tensors)))
    assert planned(3, unnamed).modes == planned(3).modes
    assert planned(3, unnamed).choices["window"] == "3 of 8 chunks"
    in_pairs = planned(3, settings=replace(EAGER, chunk_bytes=4 * MIB), on=machine(gpu_memory_bytes=200 * MIB))
    assert in_pairs.choices["window"] == "3 of 4 groups of the 8 layers that share chunks"


def test_a_window_larger_than_the_model_is_all_of_it() -> None:
    assert set(planned(99).modes) == {"pin"}


def test_what_does_not_fit_is_said() -> None:
    small = machine(gpu_memory_bytes=16 * MIB)  # one layer with its states leaves 2 MiB, less the tide
    with pytest.raises(DoesNotFit, match=r"stronghold does not fit: gpu needs .* but has 16.78 MB"):
        planned("auto", on=small)
    host = machine(host_memory_bytes=30 * MIB)  # two layers and a half
    plan = planned("auto", on=host)
    assert plan.modes.count("cpu") <= 2
    with pytest.raises(DoesNotFit, match=r"gpu needs 19.92 MB \(a window of 1 of 8 layers: 14.68 MB always on the GPU"):
        planned(1, on=small)
