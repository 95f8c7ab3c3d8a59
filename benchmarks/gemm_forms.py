"""Other formulas for matrix products by shape: how near they come to the products of a B200, and why no nearer.

benchmarks/gemm.py measures the formula that the cost model has, by leaving out each (k, n) in turn. This script does
the same with 16 forms of it, each alone and corrected by the errors of like products (as there):

    loss     errors are fitted robustly (as in gemm.py), or by their squares
    short    products that take little time may run at a higher rate: 1 + gain * exp(-seconds / time), because a loop of
             short products ends before the GPU's power limit lowers its clock
    rates    the memory has one rate, or one for factors and one for results
    tiles    128 x 256, or the fastest of seven tiles, each with its waste at the edges

`nested` is the error that a choice among these predictors has, if it is made without the rows that it is judged by: for
each (k, n), the predictor with the smallest 90th percentile on the other shapes (eight parts of them, each left out).
`by_a100` is the error on the B200 of the predictor with the smallest 90th percentile on the A100.

`in_view` leaves no rows out: a global search, within a factor of 4.5 of the fit, for the figures of each form (without
corrections) that make the 90th percentile of the B200's rows, plus a tenth of their median, smallest.

`order` looks for something that shapes do not know: the state of the GPU. SimuMax times 75 calls in a row by the wall
clock, after 25 calls (simu_tools/efficency_test/test_gemm_efficiency.py), so that clock and heat of the GPU depend on
what ran before. Its files list products as they were measured, but for the last 107 of the B200, which are sorted. The
error of each product below 0.5 ms is correlated with the mean error of the short products of other shapes that stand up
to three rows away; 95 of 100 random orders have a smaller correlation than `random`. Products of one model stand
together and have like extents, so it is taken of the corrected errors, too.

    python benchmarks/gemm_forms.py      # ten minutes; writes benchmarks/results/gemm_forms.json
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt
from _help import only_help
from _results import write_result
from gemm import DATASHEET, NOISE, REACH, TILE, WEAK, rows_of, summary
from scipy.optimize import differential_evolution, least_squares

Array = npt.NDArray[np.float64]

TILES = (TILE, (256, 128), (128, 128), (128, 64), (64, 128), (128, 192), (192, 128))
START = {
    "plateau": 0.6, "fp32": 1.0, "loss": 0.5, "depth": 64.0, "memory": 0.4, "kernel_s": 1e-6, "gain": 0.2,
    "time_s": 1e-3, "results": 1.0, "edge": 16.0,
}  # fmt: skip
"""Figures of a form before the fit. results: rate of results over that of factors. edge: work of a tile per row and
column, in terms of a dot product."""
PARTS, NEAR, SHORT_S, ORDERS = 8, 3, 5e-4, 200
REACH_IN_VIEW = 1.5  # how far the logarithm of a figure may be from its fit


@dataclass(frozen=True)
class Form:
    squares: bool
    short: bool
    rates: bool
    tiles: bool

    @property
    def name(self) -> str:
        return (
            " + ".join(name for name in ("squares", "short", "rates", "tiles") if getattr(self, name)) or "as shipped"
        )

    @property
    def free(self) -> list[str]:
        """Names of the figures that are fitted."""
        extra = {"gain": self.short, "time_s": self.short, "results": self.rates, "edge": self.tiles}
        return [name for name in START if extra.get(name, True)]


FORMS = [Form(*chosen) for chosen in product((False, True), repeat=4)]


@dataclass(frozen=True)
class Products:
    """Measured products of one GPU, a value per row in each array. shape: number of the row's (k, n)."""

    extents: Array
    in_fp32: npt.NDArray[np.bool_]
    moved: Array
    efficiency: Array
    shape: npt.NDArray[np.int64]
    peak: float
    sms: int
    bytes_per_s: float

    def of(self, chosen: npt.NDArray[np.bool_]) -> Products:
        return replace(
            self,
            extents=self.extents[chosen],
            in_fp32=self.in_fp32[chosen],
            moved=self.moved[chosen],
            efficiency=self.efficiency[chosen],
            shape=self.shape[chosen],
        )

    @property
    def flops(self) -> Array:
        return np.asarray(2 * self.extents.prod(axis=1))


def products_of(gpu: str) -> Products:
    rows = rows_of(gpu)
    numbers = {kn: i for i, kn in enumerate(sorted({r.product[2:] for r in rows}))}
    (peak,) = {r.peak for r in rows}
    return Products(
        np.array([r.product for r in rows], dtype=float),
        np.array([r.in_fp32 for r in rows]),
        np.array([r.moved for r in rows], dtype=float),
        np.array([r.efficiency for r in rows]),
        np.array([numbers[r.product[2:]] for r in rows]),
        peak,
        *DATASHEET[gpu],
    )


def predicted(form: Form, figures: dict[str, float], p: Products) -> Array:
    """Returns the efficiencies by [Note: seconds of a product] in product_shape.py, with what the form adds."""
    batches, m, k, n = p.extents.T
    f = figures
    rate = p.peak * f["plateau"] * np.where(p.in_fp32, f["fp32"], 1.0)
    loss = f["loss"] / (f["loss"] + 0.5)
    times = []
    for rows, columns in TILES if form.tiles else (TILE,):
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        waves = batches * tiles / p.sms
        wasted = tiles * rows * columns / (m * n) if form.tiles else 1.0
        edges = (1 + f["edge"] * (1 / rows + 1 / columns)) / (1 + f["edge"] * (1 / TILE[0] + 1 / TILE[1]))
        whole = p.flops / rate * (wasted * edges if form.tiles else 1.0)
        times.append(whole * (1 + loss * (np.ceil(waves) / waves - 1)) * (1 + f["depth"] / k))
    arithmetic = np.min(times, axis=0)
    if form.short:
        arithmetic = arithmetic / (1 + f["gain"] * np.exp(-arithmetic / f["time_s"]))
    factors = 2 * (m * k + k * n)
    moved = factors + (p.moved - factors) / f["results"] if form.rates else p.moved
    memory = moved / (f["memory"] * p.bytes_per_s)
    return np.asarray(p.flops / p.peak / ((arithmetic**4 + memory**4) ** 0.25 + f["kernel_s"]))


def figures_of(form: Form, logs: Array) -> dict[str, float]:
    return {**START, **{name: START[name] * float(np.exp(x)) for name, x in zip(form.free, logs, strict=True)}}


def fitted(form: Form, p: Products, start: Array | None = None) -> Array:
    """Returns the logarithms of multiples of START."""

    def errors(logs: Array) -> Array:
        off = np.log(predicted(form, figures_of(form, logs), p) / p.efficiency)
        return np.concatenate([off, WEAK * logs])

    loss: Literal["linear", "soft_l1"] = "linear" if form.squares else "soft_l1"
    begin = np.zeros(len(form.free)) if start is None else start
    return np.asarray(least_squares(errors, begin, loss=loss, f_scale=0.03, xtol=1e-4, ftol=1e-5).x)


def corrected(known: Products, off: Array, asked: Products) -> Array:
    """Returns factors for `asked` from the logarithms of the errors of `known`: gemm.py's correction."""
    one, two = (np.sort(np.log(p.extents[:, 1:]), axis=1) for p in (known, asked))
    alike = np.exp(-np.linalg.norm(one[:, None] - one[None], axis=-1) / REACH)
    weights = np.linalg.solve(alike + NOISE * np.eye(len(one)), off)
    return np.asarray(np.exp(np.exp(-np.linalg.norm(two[:, None] - one[None], axis=-1) / REACH) @ weights))


def left_out(form: Form, p: Products, start: Array, parts: int | None = None) -> tuple[Array, Array]:
    """Returns the errors of all rows, each predicted without those of its part: alone, and corrected.

    parts: number of parts that the shapes are dealt to; by default each shape is a part.
    """
    shapes = np.unique(p.shape)
    alone, with_neighbours = np.zeros(len(p.shape)), np.zeros(len(p.shape))
    for part in [shapes[i::parts] for i in range(parts)] if parts else [[shape] for shape in shapes]:
        out = np.isin(p.shape, part)
        known, asked = p.of(~out), p.of(out)
        figures = figures_of(form, fitted(form, known, start))
        off = np.log(known.efficiency / predicted(form, figures, known))
        share = predicted(form, figures, asked) / asked.efficiency
        alone[out], with_neighbours[out] = share - 1, share * corrected(known, off, asked) - 1
    return alone, with_neighbours


def p90(errors: Array) -> float:
    return float(np.quantile(np.abs(errors), 0.9))


def nested(p: Products, starts: list[Array], errors: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Returns the errors of the rows, each by the predictor that is best on the other shapes: chosen among the forms
    alone, and among all predictors.

    errors: of each form, with each shape left out.
    """
    found = np.zeros(len(p.shape)), np.zeros(len(p.shape))
    for shape in np.unique(p.shape):
        out = p.shape == shape
        scores = [[p90(e) for e in left_out(f, p.of(~out), s, PARTS)] for f, s in zip(FORMS, starts, strict=True)]
        for kinds in (1, 2):
            _, form, kind = min((scores[i][j], i, j) for i in range(len(FORMS)) for j in range(kinds))
            found[kinds - 1][out] = errors[form][kind][out]
    return found


def in_view(form: Form, p: Products, start: Array) -> Array:
    """Returns the errors of all rows with the figures that make their 90th percentile smallest (and, a tenth as
    important, their median)."""

    def errors(logs: Array) -> Array:
        return np.asarray(predicted(form, figures_of(form, logs), p) / p.efficiency - 1)

    def score(logs: Array) -> float:
        off = np.abs(errors(logs))
        return p90(off) + 0.1 * float(np.median(off))

    bounds = [(x - REACH_IN_VIEW, x + REACH_IN_VIEW) for x in start]
    return errors(differential_evolution(score, bounds, x0=start, seed=0, maxiter=150, popsize=12).x)


def order(p: Products, errors: Array) -> dict[str, float]:
    """Returns the correlation of errors of short products with those measured next to them (`order` above)."""
    off = -np.log1p(errors)
    short = np.flatnonzero(p.flops / p.peak / p.efficiency < SHORT_S)
    beside = {
        int(i): near
        for i in short
        if len(near := [j for j in short if 0 < abs(j - i) <= NEAR and p.shape[j] != p.shape[i]])
    }
    rows = list(beside)

    def correlation(values: Array) -> float:
        return float(np.corrcoef(values[rows], [values[near].mean() for near in beside.values()])[0, 1])

    random, shuffled = np.random.default_rng(0), []
    for _ in range(ORDERS):
        mixed = off.copy()
        mixed[short] = random.permutation(off[short])
        shuffled.append(correlation(mixed))
    return {
        "rows": len(rows),
        "correlation": round(correlation(off), 3),
        "random": round(float(np.quantile(shuffled, 0.95)), 3),
    }


def main() -> None:
    only_help(__doc__)
    figures: dict[str, object] = {}
    found: dict[str, list[tuple[Array, Array]]] = {}
    for gpu in ("A100-PCIe", "B200"):
        p = products_of(gpu)
        starts = [fitted(form, p) for form in FORMS]
        found[gpu] = [left_out(form, p, start) for form, start in zip(FORMS, starts, strict=True)]
        table = []
        for form, (alone, with_neighbours) in zip(FORMS, found[gpu], strict=True):
            row = {"form": form.name, "alone": summary(alone.tolist()), "corrected": summary(with_neighbours.tolist())}
            table.append(row)
            print(gpu, row, flush=True)
        orders = {"alone": order(p, found[gpu][0][0]), "corrected": order(p, found[gpu][0][1])}
        print(gpu, "order", orders, flush=True)
        figures[gpu] = {"forms": table, "order": orders}
    predictors = [(i, j) for i in range(len(FORMS)) for j in range(2)]
    form_, kind = min(predictors, key=lambda at: p90(found["A100-PCIe"][at[0]][at[1]]))
    chosen = summary(found["B200"][form_][kind].tolist())
    figures["by_a100"] = {"form": FORMS[form_].name, "corrected": bool(kind), **chosen}
    views = []
    for form, start in zip(FORMS, starts, strict=True):
        if not form.squares:  # the loss of the fit plays no part here
            views.append({"form": form.name, **summary(in_view(form, p, start).tolist())})
            print("in view", views[-1], flush=True)
    figures["in_view"] = views
    one, other = nested(p, starts, found["B200"])
    figures["nested"] = {"alone": summary(one.tolist()), "any": summary(other.tolist())}
    print(figures["by_a100"], figures["nested"])
    write_result("gemm_forms", figures)


if __name__ == "__main__":
    main()
