"""The simulator against times worked out by hand: every duration is a whole number of seconds.

The unit: a layer of 1,000,000 bf16 parameters is one chunk of 2 MB; FWD takes 1 s and BWD 2 s; a copy takes 2 s each
way and CPU Adam 3 s, unless a test says otherwise.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from msgspec import structs

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Chunk, Layout, Slot
from pstar_sim.core.plan import Plan, Resident, Settings
from pstar_sim.core.step import Kind, Place, Queue, Ref, Step
from pstar_sim.errors import PlanError
from pstar_sim.sim import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.workload import Workload

MB = 10**6
EAGER, STEP = Settings(update="eager", clip=False), Settings(update="step", clip=False)
LISTS = ("param", "param32", "momentum", "variance")


machine = partial(
    round_machine,
    gpu_memory_bytes=10**9,
    host_memory_bytes=10**9,
    h2d_bytes_per_s=MB,
    d2h_bytes_per_s=MB,
    hbm_bytes_per_s=28 * MB,
    flops_per_s=1e9,
    adam_params_per_s=MB / 3,
)


def layout_of(w: Workload) -> Layout:
    """A chunk a tensor, no padding."""
    chunks = tuple(
        Chunk(index=i, dtype=t.dtype, numel=t.numel, slots=(Slot(tensor=i, offset=0, numel=t.numel),))
        for i, t in enumerate(w.tensors)
    )
    return Layout(chunk_bytes=2 * MB, chunks=chunks, optimizer=w.optimizer)


class Hand:
    """A plan written by hand. Each method appends a step and returns its id; `after` takes ids and `Ref(id, 1)`."""

    def __init__(self, layers: int, **options: object) -> None:
        self.w = chain_workload(layers, MB, forward_s=1.0, **options)  # type: ignore[arg-type]
        self.layout = layout_of(self.w)
        self.steps: list[Step] = []
        self.initial: set[Resident] = set()

    def add(self, queue: Queue, kind: Kind, after: tuple[int | Ref, ...] = (), **fields: object) -> int:
        refs = tuple(a if isinstance(a, Ref) else Ref(a) for a in after)
        self.steps.append(Step(id=len(self.steps), queue=queue, kind=kind, after=refs, **fields))  # type: ignore[arg-type]
        return len(self.steps) - 1

    def later(self, step: int, *refs: int | Ref) -> None:
        """More `after` edges for a step that exists already."""
        old = self.steps[step]
        more = tuple(a if isinstance(a, Ref) else Ref(a) for a in refs)
        self.steps[step] = structs.replace(old, after=(*old.after, *more))

    def compute(self, moment: int, *after: int | Ref) -> int:
        return self.add(Queue.COMPUTE, Kind.COMPUTE, after, moment=moment)

    def fetch(self, chunk: int, *after: int | Ref, moment: int = 0, size: int = 2 * MB) -> int:
        return self.add(Queue.H2D, Kind.FETCH, after, chunk=chunk, list="param", bytes=size, moment=moment)

    def writeback(self, chunk: int, *after: int | Ref, size: int = 2 * MB) -> int:
        return self.add(Queue.D2H, Kind.WRITEBACK, after, chunk=chunk, list="param", bytes=size)

    def drop(self, chunk: int, *after: int | Ref, queue: Queue = Queue.COMPUTE) -> int:
        return self.add(queue, Kind.DROP, after, chunk=chunk, list="param", bytes=2 * MB)

    def cpu_adam(self, chunk: int, *after: int | Ref) -> int:
        size = 28 * self.layout.chunks[chunk].numel
        return self.add(Queue.ADAM, Kind.CPU_UPDATE, after, chunk=chunk, bytes=size)

    def on_host(self, *chunks: int) -> None:
        self.initial |= {Resident(c, name, Place.HOST) for c in chunks for name in LISTS}

    def on_gpu(self, *chunks: int) -> None:
        self.initial |= {Resident(c, name, Place.GPU) for c in chunks for name in LISTS}

    def plan(self, m: Machine | None = None, *, gpu: int | None = None, settings: Settings | None = None) -> Plan:
        m = m or machine()
        return Plan(
            policy="by hand",
            workload=self.w,
            machine=m,
            settings=settings or Settings(update="eager", clip=False),
            layout=self.layout,
            modes=tuple(
                "pin" if Resident(c, "momentum", Place.GPU) in self.initial else "cpu"
                for c in range(len(self.layout.chunks))
            ),
            initial=frozenset(self.initial),
            steps=tuple(self.steps),
            gpu_budget_bytes=gpu or m.gpu_budget_bytes,
            host_budget_bytes=m.host_budget_bytes,
        )


def update_chain(layers: int, *, per_layer: int = 1, barrier: bool = False, order: list[int] | None = None) -> Hand:
    """Chunks come up before FWD in order, stay until their gradient, go down, and are updated in `order` (by default as
    the gradients come). Moments: FWD 0..L-1, BWD of layer i at 2L-1-i, the step at 2L."""
    h = Hand(layers, tensors_per_layer=per_layer)
    count = layers * per_layer
    size = 2 * MB // per_layer
    h.on_host(*range(count))
    fetches = [h.fetch(i, moment=i // per_layer, size=size) for i in range(count)]
    computed = [h.compute(i, *fetches[i * per_layer : (i + 1) * per_layer]) for i in range(layers)]
    computed += [h.compute(layers + k) for k in range(layers + 1)]
    down, gone = {}, {}
    for layer in reversed(range(layers)):
        for i in range(layer * per_layer, (layer + 1) * per_layer):
            down[i] = h.writeback(i, computed[2 * layers - 1 - layer], size=size)
            gone[i] = h.drop(i, queue=Queue.D2H)
    for i in order if order is not None else list(down):
        adam = h.cpu_adam(i, *((down[i], computed[-1]) if barrier else (down[i],)))
        h.later(fetches[i], Ref(adam, 1), Ref(gone[i], 1))
    return h


def test_compute_alone_lasts_the_sum_of_its_moments() -> None:
    """All resident, 3 layers: 3 FWD of 1 s, 3 BWD of 2 s: 9 s; nothing moves, nothing waits. GPU Adam adds 1 s each."""
    h = Hand(3)
    h.on_gpu(0, 1, 2)
    for m in range(7):
        h.compute(m)
    t = play(h.plan())
    assert (t.iteration_s, t.iterations) == (9.0, 2)
    assert t.moved_bytes == {"h2d": 0, "d2h": 0}
    assert t.stall_s == {}
    assert t.busy_s == {"compute": 9.0}
    for c in range(3):
        h.add(Queue.COMPUTE, Kind.GPU_UPDATE, chunk=c)
    assert play(h.plan()).iteration_s == 12.0


def test_link_alone() -> None:
    """Frozen chunk fetched for FWD and again for BWD, room for one only: 2 layers, 4 fetches of 20 s against 6 s of
    compute; each copy waits for the drop before it, so nothing overlaps but the very first: 4*20 + 6 = 86 s."""
    h = Hand(2)
    h.initial |= {Resident(c, "param", Place.HOST) for c in (0, 1)}
    previous: int | Ref = Ref(11, 1)
    for moment, chunk in ((0, 0), (1, 1), (2, 1), (3, 0)):
        f = h.fetch(chunk, previous, moment=moment)
        h.compute(moment, f)
        previous = h.drop(chunk)
    assert previous == 11
    h.compute(4)
    t = play(h.plan(machine(h2d_bytes_per_s=MB / 10), gpu=2 * MB))
    assert t.iteration_s == pytest.approx(86, rel=1e-12)
    assert t.moved_bytes == {"h2d": 8 * MB, "d2h": 0}
    assert t.peak_bytes == {"gpu": 2 * MB, "host": 4 * MB}
    assert t.stall_s == pytest.approx({"h2d": 80.0})
    assert t.busy_s == pytest.approx({"h2d": 80.0, "compute": 6.0})


@pytest.mark.parametrize(("copy_s", "period"), [(1, 9.0), (2, 10.0), (5, 16.0)])
def test_two_stage_pipeline(copy_s: int, period: float) -> None:
    """Fetch -> compute with room for two of three chunks that never change: a two-stage pipeline with two buffers.

    At the cut 0 and 1 are there. F0 1 s, drop 0, fetch 2 beside F1 (1 s), F2 and B2 (1 + 2 s), drop 2, fetch 0 beside
    B1 (2 s), B0 2 s. Period: 1 + max(1, c) + 3 + max(2, c) + 2: 9, 10 and 16 s.
    """
    h = Hand(3)
    h.initial |= {Resident(c, "param", Place.HOST) for c in (0, 1, 2)}
    h.initial |= {Resident(c, "param", Place.GPU) for c in (0, 1)}
    f0 = h.compute(0)
    d0 = h.drop(0, f0, queue=Queue.H2D)
    fetch2 = h.fetch(2, d0, moment=2)
    h.compute(1)
    h.compute(2, fetch2)
    b2 = h.compute(3)
    d2 = h.drop(2, b2, queue=Queue.H2D)
    fetch0 = h.fetch(0, d2, moment=5)
    h.compute(4)
    h.compute(5, fetch0)
    h.compute(6)
    t = play(h.plan(machine(h2d_bytes_per_s=2 * MB / copy_s), gpu=4 * MB))
    assert t.iteration_s == pytest.approx(period)
    assert t.stall_s.get("h2d", 0.0) == pytest.approx(max(0, copy_s - 1) + max(0, copy_s - 2))
    assert t.peak_bytes["gpu"] == 4 * MB


def two_layers_of_two(*, barrier: bool) -> Hand:
    """Chunks 0, 1 are layer 0 and 2, 3 are layer 1, 1 MB each. Adam: 2 (its gradient comes first), then by next use."""
    return update_chain(2, per_layer=2, barrier=barrier, order=[2, 0, 1, 3])


SLOW_ADAM = machine(
    h2d_bytes_per_s=2 * MB, d2h_bytes_per_s=2 * MB, adam_params_per_s=MB / 6
)  # a chunk of 1 MB: copies 0.5 s, Adam 3 s


def test_nested_update_windows_are_attained_eagerly() -> None:
    """Lemma 3. FWD 0..1, 1..2, BWD of layer 1 2..4, of layer 0 4..6.

    Window of layer 0: 6 + 2*3 + 2*0.5 = 13; of layer 1, which encloses it: 3 (its FWD and BWD) + 4*3 + 2*0.5 = 16.
    Down 2 at 4.5; Adam 2 to 7.5, 0 to 10.5, 1 to 13.5, 3 to 16.5; up 3 at 17: FWD of layer 1 again at 17 = 1 + 16.
    """
    h = two_layers_of_two(barrier=False)
    t = play(h.plan(SLOW_ADAM))
    assert t.iteration_s == 16.0
    bound = lower_bound(h.w, SLOW_ADAM, EAGER, h.layout, max_pinned=0, stream=False)
    assert (bound.seconds, bound.binding) == (16.0, "adam")
    assert t.moved_bytes == {"h2d": 4 * MB, "d2h": 4 * MB}
    assert t.busy_s == {"h2d": 2.0, "compute": 6.0, "d2h": 2.0, "adam": 12.0}
    assert t.stall_s == {"adam": 9.0, "h2d": 1.0}


def test_nested_update_windows_are_attained_behind_the_barrier() -> None:
    """The barrier variant. Layer 0: 6 + 2*3 + 0.5 = 12.5; layer 1: 5 (its FWD to the step) + 4*3 + 0.5 = 17.5.

    Chunk 2 is updated first, at once at 6: the gradients of layer 0 are still coming down then.
    """
    h = two_layers_of_two(barrier=True)
    t = play(h.plan(SLOW_ADAM, settings=STEP))
    assert t.iteration_s == 17.5
    bound = lower_bound(h.w, SLOW_ADAM, STEP, h.layout, max_pinned=0, stream=False)
    assert (bound.seconds, bound.binding) == (17.5, "barrier")
    assert t.stall_s == {"barrier": 10.5, "h2d": 1.0}


def test_border_bubble_of_the_first_layer() -> None:
    """With a fast Adam (0.5 s) the smallest window binds: Cmp + a + 2x = 9 + 0.5 + 2*0.5 = 10.5, attained."""
    m = machine(h2d_bytes_per_s=4 * MB, d2h_bytes_per_s=4 * MB, adam_params_per_s=2 * MB)
    h = update_chain(3)
    assert play(h.plan(m)).iteration_s == 10.5
    assert lower_bound(h.w, m, EAGER, h.layout, max_pinned=0, stream=False).seconds == 10.5


def test_bound_with_room_pins_the_first_layer() -> None:
    """The same with room for states: pinning chunk 0 costs 1 s of GPU Adam at 28 MB/s and leaves the window of chunk 1:
    span 6 + ... far below. The relaxed bound may pin any fraction: every x > 0 costs x/MB s of compute, x < MB leaves
    the window of chunk 0 at 9 + (1 - x/MB)*0.5 + 1. They meet where 9 + x = 10.5 - x/2: x = 1 (all of it): 10 s."""
    m = machine(h2d_bytes_per_s=4 * MB, d2h_bytes_per_s=4 * MB, adam_params_per_s=2 * MB)
    h = update_chain(3)
    assert lower_bound(h.w, m, EAGER, h.layout).seconds == pytest.approx(10.0)  # streaming it would be no faster
    bound = lower_bound(h.w, m, EAGER, h.layout, stream=False)
    assert bound.seconds == pytest.approx(10.0)
    assert bound.max_pinned_params == 3 * MB
    assert bound.pinned_params == MB


def test_dram_shared_by_a_copy_and_adam() -> None:
    """DRAM gives 8 MB/s. Chunk 0 comes up, is read, goes down and is updated; chunk 1 is frozen, resident, and copied
    up once more, just to be in the way: Adam (28 MB in 2 s) wants 14 MB/s and that copy (2 MB in 1 s) 2 MB/s.

    Up 0: 0..1 (2 MB/s: enough). FWD 1..3, BWD 3..7, down 7..8. Adam and the copy start at 8, want 16 of 8 MB/s: half
    speed. The copy ends at 10; Adam has 1 s of work left and gets 8 of the 14 MB/s it wants: 1.75 s, to 11.75. Up 0
    to 12.75, then 6 s of compute to 18.75: the period is 18.75 - 7 = 11.75. Of the wait of 5.75 s, 1 s is the copy
    down, 2 s Adam's own, 1.75 s lost to DRAM, 1 s the copy up.
    """
    h = Hand(2)
    h.on_host(0)
    h.initial |= {Resident(1, "param", Place.HOST), Resident(1, "param", Place.GPU)}
    up = h.fetch(0)
    f = h.compute(0, up)
    for moment in range(1, 5):
        h.compute(moment)
    down = h.writeback(0, f + 3)
    gone = h.drop(0, queue=Queue.D2H)
    adam = h.cpu_adam(0, down)
    again = h.fetch(1, gone)
    h.later(up, Ref(adam, 1))
    t = play(
        h.plan(
            machine(h2d_bytes_per_s=2 * MB, d2h_bytes_per_s=2 * MB, adam_params_per_s=MB / 2, dram_bytes_per_s=8 * MB)
        )
    )
    ends = {s.step: s.end_s for s in t.spans if s.iteration == 0}
    assert ends[down] == 8.0
    assert ends[again] == pytest.approx(10.0)
    assert ends[adam] == pytest.approx(11.75)
    assert t.iteration_s == pytest.approx(11.75)
    assert t.stall_s == pytest.approx({"d2h": 1.0, "adam": 2.0, "dram": 1.75, "h2d": 1.0})


def test_dram_that_is_enough_changes_nothing() -> None:
    """Exactly enough for all at once (2 + 2 + 9.33 MB/s for copies and Adam): the same times to the last bit."""
    a = play(two_layers_of_two(barrier=False).plan(SLOW_ADAM))
    tight = replace(SLOW_ADAM, host=replace(SLOW_ADAM.host, dram_bytes_per_s=(4 + 28 / 6) * MB))
    scarce = replace(SLOW_ADAM, host=replace(SLOW_ADAM.host, dram_bytes_per_s=(4 + 28 / 6) * MB * 0.999))
    assert play(two_layers_of_two(barrier=False).plan(tight)).spans == a.spans
    assert play(two_layers_of_two(barrier=False).plan(scarce)).iteration_s >= a.iteration_s


def test_half_duplex_link_is_shared() -> None:
    """Copies up (2 MB) and down (2 MB) start together at 1 MB/s each: 2 s full duplex, 4 s when the link is shared."""
    for duplex, up_ends, down_ends in ((True, 2.0, 2.0), (False, 4.0, 4.0)):
        h = Hand(1)
        h.initial |= {Resident(0, "param", p) for p in (Place.GPU, Place.HOST)}
        up, down = h.fetch(0), h.writeback(0)
        for moment in range(3):
            h.compute(moment)
        t = play(h.plan(machine(duplex=duplex)))
        ends = {s.step: s.end_s for s in t.spans if s.iteration == 0}
        assert (ends[up], ends[down]) == (up_ends, down_ends)


def test_half_duplex_speeds_up_when_the_other_ends() -> None:
    """Up 2 MB at 1 MB/s, down 2 MB at 2 MB/s, together at half speed: down ends at 2, up has 1 MB left: 3."""
    h = Hand(1)
    h.initial |= {Resident(0, "param", p) for p in (Place.GPU, Place.HOST)}
    up, down = h.fetch(0), h.writeback(0, Ref(0, 1))  # the next copy down waits for this copy up
    for moment in range(3):
        h.compute(moment)
    t = play(h.plan(machine(duplex=False, d2h_bytes_per_s=2 * MB)))
    ends = {s.step: s.end_s for s in t.spans if s.iteration == 0}
    assert (ends[up], ends[down]) == pytest.approx((3.0, 2.0))


def test_two_runs_are_equal() -> None:
    a, b = (play(two_layers_of_two(barrier=True).plan(SLOW_ADAM)) for _ in range(2))
    assert (a.spans, a.samples, a.stall_s, a.iteration_s) == (b.spans, b.samples, b.stall_s, b.iteration_s)


def test_bytes_are_conserved_over_an_iteration() -> None:
    """What is held at the end of the steady window is what was held at its beginning, category by category; and the
    last compute of the chunk turns its bytes from parameters to gradients until Adam makes parameters of them."""
    t = play(update_chain(3).plan())
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    for s in t.samples:
        first.setdefault((s.place, s.category), s.bytes)
        last[s.place, s.category] = s.bytes
    assert first == last
    host = [s for s in t.samples if s.place == "host"]
    assert {s.bytes for s in host if s.category == "states"} == {36 * MB}
    at: dict[str, int] = {}
    for s in host:
        at[s.category] = s.bytes
        if at.keys() >= {"param", "grad"} and s.category == "grad":
            assert at["param"] + at["grad"] <= 6 * MB
    assert max(s.bytes for s in host if s.category == "grad") > 0


def test_an_adam_that_falls_behind_sets_the_pace() -> None:
    """Adam (10 s) has no one waiting for it here: compute runs on at 3 s per iteration, Adam at 10: never steady, and
    the pace it will have is Adam's."""
    h = Hand(1)
    h.on_host(0)
    h.initial.add(Resident(0, "param", Place.GPU))
    for moment in range(3):
        h.compute(moment)
    h.cpu_adam(0)
    t = play(h.plan(machine(adam_params_per_s=MB / 10)))
    assert t.iterations == 8
    assert t.iteration_s == 10.0


def test_a_circle_is_refused_with_the_steps_that_wait() -> None:
    h = Hand(1)
    h.on_host(0)
    up = h.fetch(0)
    for moment in range(3):
        h.compute(moment, *((up,) if not moment else ()))
    h.later(up, 3)  # the fetch for FWD waits for the optimizer step of the same iteration
    with pytest.raises(
        PlanError, match=r"deadlocks in iteration 0: compute at step 1 \(compute\) waits for 0; h2d at step 0"
    ):
        play(h.plan())


def test_over_budget_is_refused_with_step_and_bytes() -> None:
    h = update_chain(3)
    with pytest.raises(
        PlanError,
        match=r"step 2 \(fetch of chunk 2 at moment 2\) takes 2000000 bytes: .* 6000000 bytes on the gpu, 1 more",
    ):
        play(h.plan(gpu=6 * MB - 1))


def test_a_rising_tide_over_budget_is_refused() -> None:
    h = Hand(1, tide_bytes=[0, 5 * MB, 0])
    h.on_gpu(0)
    for moment in range(3):
        h.compute(moment)
    assert play(h.plan(gpu=19 * MB)).peak_bytes["gpu"] == 19 * MB  # 2 + 12 + 5
    with pytest.raises(PlanError, match=r"step 1 \(compute at moment 1\) raises the tide by 5000000 bytes"):
        play(h.plan(gpu=19 * MB - 1))


def test_a_read_of_an_absent_chunk_is_refused() -> None:
    h = Hand(1)
    h.on_host(0)
    for moment in range(3):
        h.compute(moment)
    with pytest.raises(PlanError, match=r"step 0 \(compute at moment 0\) needs the param list of chunk 0 on the gpu"):
        play(h.plan())


def test_a_step_that_waits_for_nobody_known_is_refused() -> None:
    h = Hand(1)
    h.on_gpu(0)
    h.compute(0, 77)
    with pytest.raises(PlanError, match="step 0 waits for step 77"):
        play(h.plan())


def test_a_plan_without_steps_is_refused() -> None:
    with pytest.raises(PlanError, match="has no compute steps"):
        play(Hand(1).plan())


@pytest.mark.parametrize("moment", [-1, -20, 3])
def test_a_compute_step_of_no_moment_is_refused(moment: int) -> None:
    h = Hand(1)
    h.on_gpu(0)
    h.compute(moment)
    with pytest.raises(PlanError, match="step 0: a compute step needs moment=, from 0 to 2"):
        play(h.plan())


def test_no_interleaving_goes_over_budget() -> None:
    """200 random timings (each step 0.2 to 5 times its time) of a plan with memory edges, in exactly its room: `play`
    itself refuses any that goes over. Without the edges some do."""

    def crowded(edges: bool) -> Plan:
        h = Hand(3)
        h.initial |= {Resident(c, "param", Place.HOST) for c in (0, 1, 2)}
        h.initial |= {Resident(c, "param", Place.GPU) for c in (0, 1)}
        f0 = h.compute(0)
        d0 = h.drop(0, f0, queue=Queue.D2H)
        fetch2 = h.fetch(2, *((d0,) if edges else ()), moment=2)
        h.compute(1)
        h.compute(2, fetch2)
        b2 = h.compute(3)
        d2 = h.drop(2, b2, queue=Queue.D2H)
        fetch0 = h.fetch(0, *((d2,) if edges else (d0,)), moment=5)
        h.compute(4)
        h.compute(5, fetch0)
        h.compute(6)
        return h.plan(gpu=4 * MB)

    def shaken(seed: int) -> Callable[[int, int], float]:
        rng = random.Random(seed)
        factors: dict[tuple[int, int], float] = {}
        return lambda step, k: factors.setdefault((step, k), 5.0 ** rng.uniform(-1, 1))

    refused = 0
    for seed in range(200):
        t = play(crowded(True), jitter=shaken(seed), max_iterations=4)
        assert t.peak_bytes["gpu"] <= 4 * MB
        try:
            play(crowded(False), jitter=shaken(seed), max_iterations=4)
        except PlanError:
            refused += 1
    assert refused > 100
