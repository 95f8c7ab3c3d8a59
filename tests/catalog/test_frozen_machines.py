"""The machines of benchmarks/machines: the constants of the planning prototype, whatever the catalog says today."""

from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.units import GB

FOLDER = Path(__file__).parents[2] / "benchmarks" / "machines"


@pytest.mark.parametrize(
    ("name", "usable_gb", "link_gb_per_s", "tflops", "adam_gparams_per_s", "hbm_gb_per_s", "gpus"),
    [
        ("v100-32", 31, 12, 60, 1.2, 900, 1),
        ("a100-80", 79, 25, 150, 1.5, 1900, 1),
        ("rtx4090", 23.2, 25, 120, 1.5, 1000, 1),
        ("h100-80", 79, 55, 450, 2.0, 3300, 1),
        ("a100-80x8", 79, 25, 150, 3.0, 1900, 8),
        ("h100-80x8", 79, 55, 450, 4.0, 3300, 8),
    ],
)
def test_a_frozen_machine_has_the_constants_of_the_day_it_was_frozen(
    name: str,
    usable_gb: float,
    link_gb_per_s: float,
    tflops: float,
    adam_gparams_per_s: float,
    hbm_gb_per_s: float,
    gpus: int,
) -> None:
    machine = load_machine(FOLDER / f"{name}.toml")
    assert (machine.name, len(machine.ranks)) == (f"{name}-frozen", gpus)
    assert machine.gpu.usable_bytes == usable_gb * GB
    assert machine.gpu.hbm_bytes_per_s == hbm_gb_per_s * GB
    assert machine.gpu.flops_per_s["fp16"] == tflops * 1e12
    assert machine.link.h2d_bytes_per_s == machine.link.d2h_bytes_per_s == link_gb_per_s * GB
    assert machine.host.adam_params_per_s == adam_gparams_per_s * 1e9
