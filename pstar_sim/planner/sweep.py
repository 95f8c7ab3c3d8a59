"""Sweep: every point of a grid, planned and simulated, on all processes or machines of joblib.

Points that differ only in their policy are computed together, without barrier costs and changes that would make a
policy fit. Each result is a file in a cache beside the results, written atomically and named by its hash (grid.py), so
an interrupted sweep continues, and changed points or code compute anew.

[Note: any joblib backend] The work is independent calls of one function of plain values, so any joblib backend can do
it, also one that another package registers, such as dask (docs/how-to/capacity.md). Only the calling process writes
files; workers need this package and the files that the grid names. Backends that cannot return results one by one get a
few groups at a time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pstar_sim.arguments import file_path, function, refused, text
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Settings
from pstar_sim.errors import PstarError
from pstar_sim.files import check_writable, replaced_atomically, write_atomically
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.compare import compare
from pstar_sim.planner.grid import Grid, Group, job_of, load_grid, point_hash
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_compared import compare_stages
from pstar_sim.planner.stages_degrees import recomputing_all, ways_of
from pstar_sim.version import __version__

if TYPE_CHECKING:
    import pandas

Progress = Callable[[int, int, int], None]
"""Called with (points done, points done that were in the cache, number of points)."""

COLUMNS = (
    "fits",
    "reason",
    "iteration_s",
    "tokens_per_s",
    "tflops_per_gpu",
    "mfu",
    "lower_bound_s",
    "gap",
    "bound_by",
    "peak_gpu_bytes",
    "peak_host_bytes",
    "h2d_bytes",
    "d2h_bytes",
    "expected_error",
    "trust",
    "way",
)
"""Columns of each point's row besides its axes. fits is null if the point makes no sense (reason says why); way: the
fastest of a parallelism."""

_METADATA = b"pstar_sim.sweep"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep(Collection):
    """rows: in the order of the grid: axes and `COLUMNS`.
    cached: known already.
    """

    grid: Grid
    rows: tuple[Mapping[str, object], ...]
    cached: int = 0

    def to_json(self) -> list[dict[str, object]]:
        return [dict(row) for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.to_json(), columns=[*self.grid.axes, *COLUMNS])

    def __repr__(self) -> str:
        fitting = sum(row["fits"] is True for row in self.rows)
        return f"<Sweep of {len(self.rows)} points over {', '.join(self.grid.axes)}; {fitting} fit>"


def sweep(
    grid: str | Path | Mapping[str, object] | Grid,
    output: str | Path | None = None,
    *,
    jobs: int | None = -1,
    backend: str | None = None,
    cache: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Sweep:
    """Computes every point of the grid (a TOML file, or a mapping of the same form) and writes them to `output`
    (.parquet). Returns the points.

    jobs: processes, -1 for one per core, None for the setting of `joblib.parallel_config`.
    backend: of joblib; None for the setting of `joblib.parallel_config`, or loky without it.
    cache: folder of the points; None: OUTPUT.points. Without cache and output nothing is kept.
    on_progress: called after each point, as `Progress` says.

    Raises PstarError for a wrong grid, for an `output` that holds another grid's results or is not a results file, and
    for a backend that joblib does not know.
    """
    grid = grid if isinstance(grid, Grid) else load_grid(grid)
    _check_running(jobs, backend)
    if on_progress is not None:
        function("on_progress", on_progress)
    path = None if output is None else file_path("output", output)
    if path is not None:
        _check_output(path, grid)
    kept = _PointFiles(None if cache is None and path is None else _folder(cache, path))
    total = len(grid)
    rows, open_groups = kept.known(grid)
    cached = len(rows)
    if on_progress is not None:
        on_progress(cached, cached, total)
    open_groups.sort(key=lambda g: -g.cost)  # stable: groups of one workload stay together
    with contextlib.closing(_results(open_groups, jobs, backend)) as results:
        for done in results:
            for index, row in done:
                rows[index] = row
                kept.keep(index, row)
            if on_progress is not None:
                on_progress(len(rows), cached, total)
    points = list(grid.points())
    answer = Sweep(grid=grid, rows=tuple({**points[i], **rows[i]} for i in range(total)), cached=cached)
    if path is not None:
        _write(path, answer)
    return answer


def _check_running(jobs: object, backend: object) -> None:
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or not jobs):
        raise refused("jobs", jobs, "a number of processes, or -1 for one per core")
    if backend is not None:
        text("backend", backend, "the name of a backend of joblib")


def _folder(cache: str | Path | None, output: Path | None) -> Path:
    if cache is not None:
        folder = file_path("cache", cache)
    else:
        assert output is not None
        folder = output.with_name(output.name + ".points")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PstarError(f"{folder}: the points cannot be kept there: {error.strerror}; choose another") from None
    return folder


class _PointFiles:
    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.files: dict[int, Path] = {}

    def known(self, grid: Grid) -> tuple[dict[int, dict[str, object]], list[Group]]:
        if self.folder is None:
            return {}, grid.groups()
        rows: dict[int, dict[str, object]] = {}
        open_groups: list[Group] = []
        for group in grid.groups():
            left = []
            for index, policy in group.policies:
                self.files[index] = self.folder / f"{point_hash(group, policy)}.json"
                known = _read_point(self.files[index])
                if known is None:
                    left.append((index, policy))
                else:
                    rows[index] = known
            if left:
                open_groups.append(Group(values=group.values, policies=tuple(left)))
        return rows, open_groups

    def keep(self, index: int, row: Mapping[str, object]) -> None:
        if index in self.files:
            write_atomically(self.files[index], json.dumps(row))


# One group.

Done = list[tuple[int, dict[str, object]]]


def evaluate(group: Group) -> Done:
    """(index, result) of every point."""
    with without_garbage_collection():  # until plans and timelines are gone
        results = _computed(group)
    return [
        (index, {name: result.get(name) for name in COLUMNS}) for (index, _), result in zip(group.policies, results)
    ]


def _computed(group: Group) -> list[dict[str, object]]:
    policies = [policy for _, policy in group.policies]
    parallel = dict(group.values).get("parallel")
    try:
        job, machine, settings = job_of(group)
        if parallel is not None:
            return [_spread(job, machine, policy, settings, str(parallel)) for policy in policies]
        answer = compare(job.of(machine), machine, policies=policies, settings=settings, barrier_cost=False, near=False)
    except PstarError as error:
        if len(policies) == 1:
            return [{"fits": None, "reason": str(error)}]
        return [row for one in group.policies for row in _computed(replace(group, policies=(one,)))]
    return [row.to_json() for row in answer.rows]


def _spread(job: Job, machine: Machine, policy: str, settings: Settings, parallel: str) -> dict[str, object]:
    ways, left_out = ways_of(job, machine, parallel)
    ways = recomputing_all(ways)  # as the axes of a grid do by default
    answer = compare_stages(job, machine, [policy], ways, left_out=left_out, settings=settings)
    if not answer.rows:
        return {"fits": None, "reason": "; ".join(answer.left_out)}
    row = asdict(answer.rows[0]) | {"way": str(answer.rows[0].way)}
    return row | {name: max(row[name], default=None) for name in ("peak_gpu_bytes", "peak_host_bytes")}


def _results(groups: Sequence[Group], jobs: int | None, backend: str | None) -> Generator[Done, None, None]:
    if not groups:
        return
    import joblib

    settings: dict[str, Any] = {}
    if backend is not None:
        settings["backend"] = backend
    if jobs is not None:
        settings["n_jobs"] = jobs
    try:
        context = joblib.parallel_config(**settings) if settings else contextlib.nullcontext()
    except (ValueError, ImportError) as error:
        raise PstarError(
            f"backend {backend!r} is not known to joblib here ({error}); import the package that registers it, or "
            "leave backend out"
        ) from None
    with context:
        try:
            parallel = joblib.Parallel(return_as="generator_unordered")
        except (ValueError, NotImplementedError):  # a backend that returns only all results together
            yield from _in_batches(groups)
            return
        yield from parallel(joblib.delayed(evaluate)(group) for group in groups)


def _in_batches(groups: Sequence[Group]) -> Iterator[Done]:
    import joblib

    size = max(1, joblib.effective_n_jobs())
    for begin in range(0, len(groups), size):
        yield from joblib.Parallel()(joblib.delayed(evaluate)(group) for group in groups[begin : begin + size])


# Files.


def _read_point(path: Path) -> dict[str, object] | None:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(row, dict) or tuple(row) != COLUMNS:
        return None
    return row


def _check_output(path: Path, grid: Grid) -> None:
    if path.suffix != ".parquet":
        raise PstarError(f"{path}: results are written as Parquet; name a file that ends in .parquet")
    check_writable(path)
    if not path.exists():
        return
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    try:
        found = (parquet.read_schema(path).metadata or {}).get(_METADATA)
        kept = None if found is None else json.loads(found)
    except (ArrowException, OSError, ValueError) as error:
        raise PstarError(f"{path}: exists and is not a results file ({error}); choose another output") from None
    if kept is None:
        raise PstarError(f"{path}: exists and is not a results file of a sweep; choose another output")
    if kept.get("digest") != grid.digest:
        differ = _difference(kept.get("axes", {}), grid)
        raise PstarError(f"{path}: holds the results of another grid ({differ}); choose another output, or remove it")


def load_results(path: str | Path) -> tuple[list[str], list[dict[str, object]]]:
    """Returns the axes, and the points: axes and `COLUMNS`, None for an unknown value.

    Raises PstarError, naming the file, for a file that no sweep has written.
    """
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    file = file_path("results", path)
    try:
        with file.open("rb") as opened:
            table = parquet.read_table(opened)
        found = (table.schema.metadata or {}).get(_METADATA)
        kept = None if found is None else json.loads(found)
    except (ArrowException, ValueError) as error:
        raise PstarError(f"{file}: is not a results file of a sweep: {error}") from None
    except OSError as error:
        raise PstarError(f"{file}: cannot be read: {error.strerror or error}") from None
    if not isinstance(kept, dict) or not isinstance(kept.get("axes"), dict) or set(COLUMNS) - {*table.column_names}:
        raise PstarError(f"{file}: is not a results file of a sweep; `pstar sweep` writes one")
    rows = [{name: None if value != value else value for name, value in row.items()} for row in table.to_pylist()]
    return list(kept["axes"]), rows


def _difference(axes: Mapping[str, object], grid: Grid) -> str:
    for name in dict.fromkeys([*axes, *grid.axes]):
        there, here = axes.get(name), list(grid.axes.get(name, ())) or None
        if there != here:
            shown = "no such axis" if there is None else json.dumps(there)
            return f"{name} there: {shown}, here: {json.dumps(here) if here else 'no such axis'}"
    return "its values are in another order"


def _write(path: Path, answer: Sweep) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_pandas(answer.to_frame(), preserve_index=False)
    axes = {name: list(values) for name, values in answer.grid.axes.items()}
    kept = {"digest": answer.grid.digest, "axes": axes, "version": __version__}
    metadata = {**(table.schema.metadata or {}), _METADATA: json.dumps(kept).encode()}
    with replaced_atomically(path) as temporary:
        parquet.write_table(table.replace_schema_metadata(metadata), temporary)
