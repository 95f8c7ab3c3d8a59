"""Predicted against published values, row by row, with errors, orders and misses.

An error is predicted / published - 1; a published run that does not fit is a miss of 100 %, not left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

from pstar_sim.catalog.efficiency import Efficiency
from pstar_sim.dtypes import WORKING
from pstar_sim.errors import PstarError
from pstar_sim.planner.collection import Collection
from pstar_sim.validation.experiments import experiment_of, runs_of
from pstar_sim.validation.replay import replay, row_value
from pstar_sim.validation.rows import FILES, PublishedRow, published_rows
from pstar_sim.validation.scope import USES, ScopeRule, published_scope, rule_of
from pstar_sim.validation.setups import Experiment

if TYPE_CHECKING:
    import pandas

NEAR, FAR = 0.09, 0.28
"""Limits for the median and the 90th percentile of the absolute error of the tested rows. A row beyond FAR is a
miss."""
DIFFERENT = 0.10
"""Published values that differ by a smaller share have no order that a prediction must keep."""
_IN_SCOPE = ("fitted", "to fit", "tested")
DISTANCES = ("same machine", "same generation", "new generation")
"""[Note: distance] A tested row is "same machine" where rows of that machine, with as many nodes, were fitted. It is
"same generation" where rows of another machine with GPUs of that generation were fitted. Otherwise it is "new
generation".
"""
WHOLE = ("iter_ms", "iter_s", "total_TFLOPS_8N", "tokens_per_s_per_gpu", "tok_s_gpu", "samples_s")
"""Metrics of a whole iteration."""
_SPEED = {
    "iter_ms": -1, "iter_s": -1, "total_TFLOPS_8N": 1, "tokens_per_s_per_gpu": 1, "tok_s_gpu": 1, "samples_s": 1,
    "fwd_bwd_ms": -1,
}  # fmt: skip
"""Metrics of a whole iteration, and of an iteration without its optimizer step -> 1 if more is faster, -1 if less
is."""
_SECONDS = ("time", "phase")
"""Kinds of rows whose values are seconds or speeds."""
FIRST_FILE = next(iter(FILES))
"""The file of rows whose scope was fixed after replays. Rows of the other files had never been replayed by then."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """predicted: None if it does not fit.
    kind: "time" (a whole iteration), "phase", "memory" or "size".
    machine: the replay's, as `policy`.
    inferred: a choice without source but the errors of the row's rule.
    as_found: as in `ScopeRule`.
    """

    file: str
    line: int
    system: str
    hardware: str
    gpus: int
    params: str
    shape: str
    batch: str
    metric: str
    kind: str
    use: str
    rule: str
    machine: str
    gpu: str
    nodes: int
    policy: str
    published: float
    predicted: float | None
    reason: str = ""
    kernels: str = "eager"
    dtype: str = "bf16"
    autocast: bool = False
    lora: bool = False
    publisher: str = ""
    inferred: bool = False
    as_found: bool = False

    @property
    def error(self) -> float:
        """-1 where nothing was predicted."""
        return -1.0 if self.predicted is None else self.predicted / self.published - 1

    @property
    def where(self) -> str:
        """A row of the first file has its line alone."""
        return str(self.line) if self.file == FIRST_FILE else f"{self.file.removesuffix('.csv')} {self.line}"

    @property
    def slower(self) -> float | None:
        """Predicted over published seconds - 1, None without a prediction, and for bytes and sizes."""
        if self.predicted is None or self.kind not in _SECONDS:
            return None
        more = self.predicted / self.published
        return 1 / more - 1 if _SPEED.get(self.metric) == 1 else more - 1

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Over `rows` rows.

    median, p90, worst: absolute.
    bias: median of `Result.slower`, None if none fits.
    lost: that do not fit, each an error of 100 %.
    """

    rows: int
    median: float
    p90: float
    worst: float
    bias: float | None
    lost: int


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Published values differ by over 10 %.

    kept: predicted ones have the same order.
    """

    kind: str
    first: Result
    second: Result
    kept: bool


def errors_of(results: Iterable[Result]) -> Errors | None:
    results = list(results)
    if not results:
        return None
    errors = sorted((r.error for r in results), key=abs)
    sizes = [abs(e) for e in errors]
    slower = sorted(r.slower for r in results if r.slower is not None)
    return Errors(
        rows=len(sizes),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        worst=errors[-1],
        bias=quantile(slower, 0.5) if slower else None,
        lost=sum(r.predicted is None for r in results),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolates linearly, as numpy's."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, kw_only=True, eq=False)
class Validation(Collection):
    """Predictions beside published measurements.

    counts: by use, of all rows (or those asked for).
    left_out: rule of rows that are not compared -> reason.
    """

    counts: dict[str, int]
    results: tuple[Result, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    _name = "system"

    def _rows(self) -> tuple[Result, ...]:
        return self.results

    def errors(self, **wanted: str) -> Errors | None:
        """Of the results whose fields have these values, as in errors(use="tested", kind="time")."""
        return errors_of(r for r in self.results if all(getattr(r, k) == v for k, v in wanted.items()))

    def pairs(self) -> list[Pair]:
        """Pairs of iteration times whose published values differ by more than 10 %, at least one tested. The kind is
        "systems" (on one machine, model and batch) or "models" (of one system on one machine)."""
        speeds = [r for r in self.results if r.metric in _SPEED]
        found: list[Pair] = []
        for a, b in combinations(speeds, 2):
            if not _comparable(a, b):
                continue
            same_model = (a.params, a.shape) == (b.params, b.shape)
            if (a.system == b.system) == same_model:
                continue
            if max(a.published, b.published) / min(a.published, b.published) - 1 <= DIFFERENT:
                continue
            kept = a.predicted is not None and b.predicted is not None
            if a.predicted is not None and b.predicted is not None:
                kept = (a.predicted - b.predicted) * (a.published - b.published) > 0
            found.append(Pair(kind="systems" if same_model else "models", first=a, second=b, kept=kept))
        return found

    def order(self, kind: str) -> tuple[int, int]:
        """(pairs whose order is kept, pairs) of "systems" or "models"."""
        pairs = [p for p in self.pairs() if p.kind == kind]
        return sum(p.kept for p in pairs), len(pairs)

    def first_replayed(self) -> Validation:
        """Of all files but the first, which had never been replayed when their scope was fixed."""
        return replace(self, results=tuple(r for r in self.results if r.file != FIRST_FILE))

    def by_distance(self) -> dict[str, Errors]:
        """Errors of tested times by [Note: distance], the nearest first. Empty where no row is fitted."""
        distance = self.distances()
        groups: dict[str, list[Result]] = {name: [] for name in DISTANCES}
        for r in self.results if distance is not None else ():
            if r.use == "tested" and r.kind in _SECONDS:
                assert distance is not None
                groups[distance(r)].append(r)
        return {name: e for name, rows in groups.items() if (e := errors_of(rows)) is not None}

    def distances(self) -> Callable[[Result], str] | None:
        """None where no row is fitted."""
        fitted = [r for r in self.results if r.use == "fitted"]
        machines, generations = {_machine_of(r) for r in fitted}, {_generation(r) for r in fitted}

        def distance(r: Result) -> str:
            return DISTANCES[0 if _machine_of(r) in machines else 1 if _generation(r) in generations else 2]

        return distance if fitted else None

    def misses(self) -> list[Result]:
        """Tested rows beyond FAR, the worst first."""
        missed = [r for r in self.results if r.use == "tested" and abs(r.error) > FAR]
        return sorted(missed, key=lambda r: -abs(r.error))

    def to_frame(self) -> pandas.DataFrame:
        """One row per published row in scope: the fields of `Result` and `error`."""
        import pandas

        return pandas.DataFrame([r.to_json() for r in self.results])

    def to_json(self) -> dict[str, object]:
        """Counts, errors of the tested rows, orders, misses and every row in scope."""

        def plain(e: Errors | None) -> dict[str, object] | None:
            return None if e is None else asdict(e)

        pairs = self.pairs()
        return {
            "counts": self.counts,
            "left_out": dict(self.left_out),
            "tested": plain(self.errors(use="tested")),
            "fitted": plain(self.errors(use="fitted")),
            "first_replayed": plain(self.first_replayed().errors(use="tested")),
            "by_distance": {name: plain(e) for name, e in self.by_distance().items()},
            "by_kind": {k: plain(self.errors(use="tested", kind=k)) for k in ("time", "phase", "memory", "size")},
            "order": {
                kind: dict(zip(("kept", "pairs"), self.order(kind), strict=True)) for kind in ("systems", "models")
            },
            "order_misses": [
                {"kind": p.kind, "rows": [p.first.where, p.second.where], "systems": [p.first.system, p.second.system]}
                for p in pairs
                if not p.kept
            ],
            "misses": [r.where for r in self.misses()],
            "rows": [r.to_json() for r in self.results],
        }

    def _repr_html_(self) -> str:
        html: str = self.to_frame().to_html()
        return html


def _machine_of(r: Result) -> tuple[str, int]:
    return r.machine.partition(" (")[0], r.nodes


def _generation(r: Result) -> str:
    return r.gpu.partition("-")[0]


def _comparable(a: Result, b: Result) -> bool:
    if "tested" not in (a.use, b.use) or a.metric != b.metric or (a.hardware, a.gpus) != (b.hardware, b.gpus):
        return False
    batches = [x.batch.split(" ")[0] for x in (a, b)]  # "best" and "best of 8/16/32" are the same rule
    return batches[0] == batches[1] and ("mbs" not in a.batch or a.batch == b.batch)


def validate(
    *,
    system: str | None = None,
    machine: str | None = None,
    efficiency: Efficiency | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Replays the published runs in scope. Returns the predictions beside the published figures.

    system, machine: only rows whose system or hardware (or catalog machine) contains the text, case aside.
    efficiency: instead of the shipped parameters.
    progress: called with (runs done, runs in all).

    Raises PstarError where no row is left.
    """
    rules = published_scope()
    rows = [r for r in published_rows() if _holds(system, r.system)]
    of_row = {row: rule_of(row, rules) for row in rows}
    runs = runs_of(r for r in rows if of_row[r].use in _IN_SCOPE)
    jobs = [(run, experiment_of(run, efficiency)) for run in runs]
    if machine is not None:
        jobs, rows = _on_machine(machine, jobs, rows)
    if not rows:
        raise _no_row(system, machine)
    counts = {use: sum(of_row[r].use == use for r in rows) for use in USES}
    results: list[Result] = []
    for done, (run, experiment) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs))
        results += _replayed(run, experiment, of_row)
    if progress is not None:
        progress(len(jobs), len(jobs))
    kept = [of_row[r] for r in rows]
    left_out = {rule.name: rule.why for rule in kept if rule.use not in _IN_SCOPE}
    return Validation(
        counts=counts,
        results=tuple(sorted(results, key=lambda r: (list(FILES).index(r.file), r.line))),
        left_out=left_out,
    )


_Job = tuple[tuple[PublishedRow, ...], Experiment]
"""The rows of one published run, and the experiment that replays it."""


def _on_machine(
    machine: str, jobs: Sequence[_Job], rows: Sequence[PublishedRow]
) -> tuple[list[_Job], list[PublishedRow]]:
    kept_jobs = [(run, x) for run, x in jobs if _holds(machine, run[0].hardware) or _holds(machine, x.machine.name)]
    kept = {row for run, _ in kept_jobs for row in run}
    return kept_jobs, [r for r in rows if r in kept or _holds(machine, r.hardware)]


def _no_row(system: str | None, machine: str | None) -> PstarError:
    rows = published_rows()
    asked = (
        ("system", system, {r.system for r in rows}),
        ("machine", machine, {r.hardware for r in rows}),
    )
    has = " and ".join(f"{what} {value!r}" for what, value, _ in asked if value is not None)
    known = (f"{what}s are {', '.join(sorted(names))}" for what, value, names in asked if value is not None)
    return PstarError(f"no published row has {has}; {'; '.join(known)}")


def _replayed(
    run: Sequence[PublishedRow], experiment: Experiment, rules: Mapping[PublishedRow, ScopeRule]
) -> list[Result]:
    outcome = replay(experiment)
    return [_result(row, rules[row], experiment, row_value(row, outcome), outcome.reason) for row in run]


def _holds(text: str | None, where: str) -> bool:
    return text is None or text.lower() in where.lower()


def _result(row: PublishedRow, rule: ScopeRule, experiment: Experiment, value: float | None, reason: str) -> Result:
    machine = experiment.machine
    return Result(
        file=row.file,
        line=row.line,
        system=row.system,
        hardware=row.hardware,
        gpus=row.gpus,
        params=row.params,
        shape=row.shape,
        batch=row.batch,
        metric=row.metric,
        kind=_kind(row.metric),
        use=rule.use,
        rule=rule.name,
        machine=machine.name,
        gpu=machine.gpu.name,
        nodes=machine.nodes,
        policy=experiment.policy,
        published=row.value,
        predicted=value,
        reason=reason,
        dtype=experiment.autocast or experiment.dtype or WORKING,
        autocast=experiment.autocast is not None,
        lora=experiment.lora is not None,
        kernels=experiment.kernels or "",
        publisher=row.publisher,
        inferred=rule.inferred,
        as_found=rule.as_found,
    )


def _kind(metric: str) -> str:
    if metric in _SPEED:
        return "time"
    if metric == "max_trainable_model":
        return "size"
    return "phase" if metric.endswith(("_ms", "_s")) else "memory"
