"""Calls of fused attention: rates by kernel, mask, length and heads, by hand and beside the authors' charts."""

import pytest

from pstar_sim.catalog.attention import ATTENTION, call_flops, needed_flops
from pstar_sim.catalog.attention_rates import attention_rate, attention_rates
from pstar_sim.catalog.generations import generations
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.layout import build_layout
from pstar_sim.cost import CostModel
from pstar_sim.planner.machine_notes import attention_notes
from pstar_sim.workload.presets import preset


def both_tflops(generation: str, kernel: str, length: int, *, width: int, causal: bool) -> float:
    """Returns the TFLOPS of both passes, counted as the authors do: the flops that the mask leaves."""
    rates = attention_rates()[generation].kernels[kernel]
    calls = [(16, length, length, width, width, int(causal), backward) for backward in (0, 1)]
    return sum(map(needed_flops, calls)) / sum(needed_flops(call) / rates.of(call) for call in calls)


def test_flops_by_hand() -> None:
    forward = (3, 10, 10, 3, 1, 0, 0)
    assert call_flops(forward) == needed_flops(forward) == 2 * 3 * 10 * 10 * 4
    assert call_flops((3, 10, 10, 3, 1, 0, 1)) == 2 * 3 * 10 * 10 * (3 * 3 + 2 * 1)
    assert needed_flops((3, 10, 10, 2, 2, 1, 0)) == 1200  # a causal mask leaves half of the scores
    assert needed_flops((3, 10, 2, 2, 2, 1, 0)) == 480 * 0.9  # a window of 2: two for each query, one for the first
    assert needed_flops((3, 2, 10, 2, 2, 1, 0)) == 480 * 0.1  # a mask whose first key is that of the first query


@pytest.mark.parametrize(
    ("generation", "kernel", "width", "causal", "published"),
    [
        ("a100", "fa2", 128, True, {512: 99, 1024: 133, 2048: 155, 4096: 173, 8192: 182, 16384: 189}),
        ("a100", "fa2", 64, True, {512: 88, 1024: 119, 2048: 140, 4096: 156, 8192: 165, 16384: 171}),
        ("a100", "fa2", 128, False, {2048: 187, 4096: 196, 8192: 201, 16384: 203}),
        ("a100", "efficient", 128, True, {512: 58, 1024: 72, 2048: 82, 4096: 87, 8192: 91, 16384: 92}),
        ("h100", "fa2", 128, True, {512: 163, 1024: 221, 2048: 265, 4096: 294, 8192: 308, 16384: 328}),
        ("h100", "fa2", 64, False, {512: 215, 1024: 254, 2048: 274, 4096: 288, 8192: 294, 16384: 296}),
    ],
)
def test_both_passes_beside_the_authors_charts(
    generation: str, kernel: str, width: int, causal: bool, published: dict[int, float]
) -> None:
    found = {n: both_tflops(generation, kernel, n, width=width, causal=causal) for n in published}
    assert found == {n: pytest.approx(tflops, rel=0.08) for n, tflops in published.items()}


def test_forward_of_the_third_beside_its_chart() -> None:
    rates = attention_rates()["h100"].kernels["fa3"]
    published = {1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616}
    found = {n: rates.of((16, n, n, 128, 128, 1, 0)) for n in published}
    assert found == {n: pytest.approx(tflops, rel=0.06) for n, tflops in published.items()}


def test_the_usual_kernel_is_what_flash_says() -> None:
    """The rates relate to a generation's `flash`: its usual kernel has 1 in the limit of long sequences."""
    for generation, rates in attention_rates().items():
        assert set(rates.kernels) <= set(ATTENTION) and rates.usual in rates.kernels
        calls = [(16, 10**7, 10**7, 128, 128, 0, backward) for backward in (0, 1)]
        taken = [needed_flops(call) / attention_rate(generation, "flash", call) for call in calls]
        assert sum(map(needed_flops, calls)) / sum(taken) == pytest.approx(1, rel=1e-4)
    assert {g.attention for g in generations().values()} == set(attention_rates())
    h100, peak = generations()["h100"], 989
    assert h100.flash * h100.plateau * peak == pytest.approx(attention_rates()["h100"].kernels["fa2"].both, rel=0.01)


def test_a_kernel_without_rates_runs_as_the_usual_one() -> None:
    call = (16, 4096, 4096, 128, 128, 1, 0)
    assert attention_rate("a100", "fa3", call) == attention_rate("a100", "flash", call)
    assert attention_rate("", "fa3", call) == 1


def test_a_moment_lasts_as_long_as_its_kernel_says() -> None:
    """A long sequence on an H100: the third FlashAttention's forward pass beside the second's, 650 and 370 TFLOPS."""
    machine = load_machine("h100-80")
    seconds = {}
    for kernel in ("fa2", "fa3"):
        w = preset("llama-3.1-8b", batch=1, seq=65536, attention=kernel, dtype="bf16")
        (i, m) = next((i, m) for i, m in enumerate(w.moments) if m.attentions)
        seconds[kernel] = CostModel(w, machine, build_layout(w)).moments_s[i]
        (call,) = m.attentions
    flops = needed_flops(call)
    saved = flops / 370e12 * (1 + 500 / 65536) - flops / 650e12 * (1 + 600 / 65536)
    assert seconds["fa2"] - seconds["fa3"] == pytest.approx(saved, rel=0.01)


def test_a_kernel_without_rates_is_said() -> None:
    cards = {name: load_machine(name) for name in ("h100-80", "a100-80", "v100-32")}
    assert attention_notes(cards["h100-80"], "fa3") == attention_notes(cards["a100-80"], "flash") == []
    (note,) = attention_notes(cards["a100-80"], "fa3")
    assert note == "fa3 attention has no rates on a100-80, and may not run there: it is timed as fa2, which torch takes"
    assert "timed as efficient" in attention_notes(cards["v100-32"], "fa2")[0]
    assert attention_notes(cards["v100-32"], "math") == attention_notes(cards["v100-32"], "none") == []
