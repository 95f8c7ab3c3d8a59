"""Matrix products by shape: fits the figures of `ProductShape` to measured products, and measures the errors.

The rows are 463 measured bf16 products of transformer layers on an A100-PCIe and a B200 (SimuMax's system files), in
benchmarks/data/gemm_efficiency.csv, whose head explains its columns. Per GPU four figures are fitted (wave_loss, depth,
bytes_per_s, kernel_s), the plateau (share of the peak rate that large products reach) and one factor for results in
fp32, which the cost model does not use. SMs, peaks and the memory's rate come from the datasheets, the tile is assumed.

Each (k, n) is left out in turn: the figures are fitted to the other shapes and predict the products of that shape.
`transferred` predicts B200 with A100's figures: SMs, peak and memory rate of the B200's datasheet, and one fitted
figure, B200's plateau. `repeated` is the distance of two measurements of one product that differ only in the dtype of
the result; the A100's rows have no such pair. `same_extents` is the error of predictors that know more than a shape:
the other measurements of products with the same three extents, in any order, and with the same number of batches.

    python benchmarks/gemm.py            # prints the fit and the errors, writes benchmarks/results/gemm.json
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from _help import only_help
from _results import write_result
from scipy.optimize import least_squares

from pstar_sim.catalog.product_shape import ProductShape

DATA = Path(__file__).with_name("data") / "gemm_efficiency.csv"
TILE = (128, 256)
DATASHEET = {"A100-PCIe": (108, 1.935e12), "B200": (148, 7.7e12)}  # SMs, bytes/s of the memory
LARGE_FLOPS = 5e11
START = (0.6, 1.0, 0.5, 64.0, 0.4, 1e-6)  # plateau, fp32, wave_loss, depth, share of the memory's rate, kernel_s
WEAK = 0.02  # weight of the start, so that a figure that the rows do not determine stays there
REACH, NOISE = 0.5, 0.3  # of the correction by neighbours


@dataclass(frozen=True)
class Row:
    """A measured product.

    product: batches, m, k, n.
    layout: order of the factors in memory ("TN").
    adds: whether the result is added to existing values.
    peak: flops/s of the datasheet.
    moved: bytes of its factors and result.
    """

    product: tuple[int, int, int, int]
    layout: str
    adds: bool
    in_fp32: bool
    moved: int
    peak: float
    efficiency: float


@dataclass(frozen=True)
class Fit:
    """Fitted figures of one GPU.

    shape: the fitted figures.
    plateau: share of the peak.
    fp32: factor of the rate where the result is in fp32.
    """

    shape: ProductShape
    plateau: float
    fp32: float

    def efficiency(self, row: Row) -> float:
        _, m, k, n = row.product
        rate = row.peak * self.plateau * (self.fp32 if row.in_fp32 else 1.0)
        return 2 * m * k * n / row.peak / self.shape.seconds(row.product, rate, row.moved)


def rows_of(gpu: str) -> list[Row]:
    found = []
    with DATA.open(encoding="utf-8", newline="") as lines:
        for r in csv.DictReader(lines):
            m, k, n = (int(r[name]) for name in "mkn")
            in_fp32, adds = r["out_dtype"] == "fp32", r["accumulate"] == "True"
            moved = 2 * m * k + 2 * k * n + (4 if in_fp32 else 2) * m * n * (2 if adds else 1)
            if r["gpu"] == gpu:
                peak = float(r["tflops_peak"]) * 1e12
                product = (int(r["b"]), m, k, n)
                found.append(Row(product, r["layout"], adds, in_fp32, moved, peak, float(r["efficiency"])))
    return found


def fit_of(gpu: str, logs: Sequence[float]) -> Fit:
    """Returns the figures for these logarithms of multiples of START."""
    plateau, fp32, loss, depth, memory, kernel_s = (s * float(np.exp(x)) for s, x in zip(START, logs, strict=True))
    sms, bytes_per_s = DATASHEET[gpu]
    shape = ProductShape(
        sms=sms,
        tile=TILE,
        wave_loss=loss / (loss + 0.5),
        depth=depth,
        bytes_per_s=memory * bytes_per_s,
        kernel_s=kernel_s,
    )
    return Fit(shape, plateau, fp32)


def fitted(gpu: str, rows: Sequence[Row], start: Sequence[float] = (0.0,) * len(START)) -> tuple[Fit, list[float]]:
    """Returns the fit to these rows, and its logarithms, from which another fit may start."""

    def errors(logs: Sequence[float]) -> list[float]:
        fit = fit_of(gpu, logs)
        return [float(np.log(fit.efficiency(r) / r.efficiency)) for r in rows] + [WEAK * float(x) for x in logs]

    logs = least_squares(errors, list(start), loss="soft_l1", f_scale=0.03, xtol=1e-4, ftol=1e-5).x.tolist()
    return fit_of(gpu, logs), logs


def left_out(gpu: str, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Returns the relative errors of all rows, each predicted without the rows of its (k, n): by the fit alone, and
    corrected by the errors of products with similar extents, in any of m, k and n (a Gaussian process over their
    logarithms)."""
    _, start = fitted(gpu, rows)
    found: dict[int, tuple[float, float]] = {}
    for kn in {r.product[2:] for r in rows}:
        out = [i for i, r in enumerate(rows) if r.product[2:] == kn]
        known = [r for r in rows if r.product[2:] != kn]
        fit, _ = fitted(gpu, known, start)
        corrected = neighbours(fit, known)
        for i in out:
            share = fit.efficiency(rows[i]) / rows[i].efficiency
            found[i] = share - 1, share * corrected(rows[i]) - 1
    return [found[i][0] for i in range(len(rows))], [found[i][1] for i in range(len(rows))]


def neighbours(fit: Fit, rows: Sequence[Row]) -> Callable[[Row], float]:
    """Returns row -> factor of its efficiency, from the errors of `fit` on similar rows."""
    places = np.array([sorted(np.log(r.product[1:])) for r in rows])
    off = np.array([np.log(r.efficiency / fit.efficiency(r)) for r in rows])
    alike = np.exp(-np.linalg.norm(places[:, None] - places[None], axis=-1) / REACH)
    weights = np.linalg.solve(alike + NOISE * np.eye(len(rows)), off)

    def factor(row: Row) -> float:
        far = np.linalg.norm(places - np.array(sorted(np.log(row.product[1:]))), axis=-1)
        return float(np.exp(np.exp(-far / REACH) @ weights))

    return factor


def transferred(fit: Fit, gpu: str, rows: Sequence[Row]) -> Fit:
    """Returns the fit of the A100 carried over to `gpu`, with SMs and memory rate of its datasheet. One figure comes
    from the rows: the median efficiency of large products, which gives the plateau."""
    sms, bytes_per_s = DATASHEET[gpu]
    share = fit.shape.bytes_per_s / DATASHEET["A100-PCIe"][1]
    fit = replace(fit, shape=replace(fit.shape, sms=sms, bytes_per_s=share * bytes_per_s))
    large = [r for r in rows if 2 * r.product[1] * r.product[2] * r.product[3] > LARGE_FLOPS]
    by_fit = float(np.median([fit.efficiency(r) for r in large]))
    return replace(fit, plateau=fit.plateau * float(np.median([r.efficiency for r in large])) / by_fit)


def summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = np.abs(errors)
    return {
        "median": round(float(np.median(sizes)), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
        "bias": round(float(np.median(errors)), 4),
    }


def repeated(rows: Sequence[Row]) -> dict[str, float] | None:
    """Returns the distances of two measurements of one product that differ only in the dtype of the result; None if the
    rows have no such pair. Raises ValueError for a measurement that is there twice."""
    pairs: dict[tuple[object, ...], dict[bool, float]] = {}
    for r in rows:
        both = pairs.setdefault((r.product, r.layout, r.adds), {})
        if r.in_fp32 in both:
            raise ValueError(f"{r.product}, layout {r.layout}: measured twice")
        both[r.in_fp32] = r.efficiency
    apart = [both[True] / both[False] - 1 for both in pairs.values() if len(both) == 2]
    return {"pairs": len(apart), **summary(apart)} if apart else None


def same_extents(rows: Sequence[Row], fp32: float) -> dict[str, float]:
    """Returns the errors of two predictors for the rows whose three extents occur more than once: the mean of the other
    measurements of these extents ("median", "p90"), and the one value for all of them that has the smallest largest
    error ("seen_p90"; this value is chosen with the answers in view). Both know the factor of results in fp32.

    fp32: factor of the rate where the result is in fp32.
    """
    groups: dict[tuple[int, ...], list[float]] = {}
    for r in rows:
        key = (r.product[0], *sorted(r.product[1:]))
        groups.setdefault(key, []).append(r.efficiency / (fp32 if r.in_fp32 else 1.0))
    others: list[float] = []
    seen: list[float] = []
    for values in (np.array(v) for v in groups.values() if len(v) > 1):
        logs = np.log(values)
        others += np.expm1((logs.sum() - logs) / (len(logs) - 1) - logs).tolist()
        seen += (2 / (1 / values.min() + 1 / values.max()) / values - 1).tolist()
    return {"rows": len(others), **summary(others), "seen_p90": summary(seen)["p90"]}


def main() -> None:
    only_help(__doc__)
    figures: dict[str, object] = {}
    a100, _ = fitted("A100-PCIe", rows_of("A100-PCIe"))
    for gpu in DATASHEET:
        rows = rows_of(gpu)
        fit, _ = fitted(gpu, rows)
        constant = float(np.median([r.efficiency for r in rows]))
        alone, corrected = left_out(gpu, rows)
        figures[gpu] = {
            "products": len(rows),
            "shapes": len({r.product[2:] for r in rows}),
            "plateau": round(fit.plateau, 3),
            "result_in_fp32": round(fit.fp32, 3),
            "sms": fit.shape.sms,
            "tile": list(fit.shape.tile),
            "wave_loss": round(fit.shape.wave_loss, 3),
            "depth": round(fit.shape.depth, 1),
            "gb_per_s": round(fit.shape.bytes_per_s / 1e9),
            "kernel_us": round(fit.shape.kernel_s * 1e6, 2),
            "one_constant": summary([constant / r.efficiency - 1 for r in rows]),
            "left_out": summary(alone),
            "left_out_with_neighbours": summary(corrected),
            "repeated": repeated(rows),
            "same_extents": same_extents(rows, fit.fp32),
        }
        if gpu != "A100-PCIe":
            carried = transferred(a100, gpu, rows)
            errors = summary([carried.efficiency(r) / r.efficiency - 1 for r in rows])
            figures[gpu] = {**figures[gpu], "from_a100": {"plateau": round(carried.plateau, 3), **errors}}  # type: ignore[dict-item]
        for name, value in figures[gpu].items():  # type: ignore[attr-defined]
            print(f"{gpu:10s} {name:26s} {value}")
    write_result("gemm", figures)


if __name__ == "__main__":
    main()
