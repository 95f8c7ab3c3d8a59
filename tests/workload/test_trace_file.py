"""A trace file holds workloads exactly, and says in one message what is wrong with any other file."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pstar_sim.errors import TraceError
from pstar_sim.testing import chain_workload, random_workload
from pstar_sim.workload.presets import preset
from pstar_sim.workload.trace import (
    SCHEMA_VERSION,
    load_trace,
    load_variants,
    moments_frame,
    save_trace,
    tensors_frame,
    uses_frame,
)
from pstar_sim.workload.workload import Workload


def same(a: Workload, b: Workload) -> bool:
    return all(getattr(a, f.name) == getattr(b, f.name) for f in dataclasses.fields(Workload))


def four_variants() -> list[Workload]:
    both = [chain_workload(2, 64, checkpointing=on) for on in (True, False)]
    return [dataclasses.replace(w, batch=batch) for batch in (2, 4) for w in both]


def rewrite(path: Path, *, columns: dict[str, Any] | None = None, metadata: dict[str, str] | None = None) -> None:
    """The same file with some columns (None drops one) or metadata replaced: a file somebody else wrote."""
    table = pq.read_table(path)
    kept = dict(table.schema.metadata)
    for name, values in (columns or {}).items():
        i = table.schema.get_field_index(name)
        if values is None:
            table = table.remove_column(i)
        elif i < 0:
            table = table.append_column(name, values)
        else:
            table = table.set_column(i, name, values)
    kept.update({k.encode(): v.encode() for k, v in (metadata or {}).items()})
    pq.write_table(table.replace_schema_metadata(kept), path)


def test_a_workload_comes_back_as_it_was(tmp_path: Path) -> None:
    for seed in range(5):
        w = random_workload(seed)
        save_trace(w, tmp_path / "w.parquet")
        assert same(load_trace(tmp_path / "w.parquet"), w)


def test_products_and_attention_come_back_and_a_file_without_any_is_of_version_1(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    w = preset("gpt2", batch=1, seq=8, dtype="bf16")
    save_trace(w, path)
    assert same(load_trace(path), w)
    assert pq.read_schema(path).metadata[b"pstar.schema_version"] == b"3"
    unnamed = dataclasses.replace(
        w, moments=tuple(dataclasses.replace(m, attentions=(), operators=0) for m in w.moments)
    )
    save_trace(unnamed, path)
    assert same(load_trace(path), unnamed)
    assert pq.read_schema(path).metadata[b"pstar.schema_version"] == b"2"
    products = tuple(dataclasses.replace(m, products=()) for m in unnamed.moments)
    plain = dataclasses.replace(unnamed, kernels="", moments=products)
    save_trace(plain, path)
    assert same(load_trace(path), plain)
    assert pq.read_schema(path).metadata[b"pstar.schema_version"] == b"1"


def test_products_that_do_not_fit_their_moment_are_refused() -> None:
    w = chain_workload(2, 64)
    first, *others = w.moments
    for rows, words in ((((1, 0, 2, 2),), "extents .* at least 1"), (((1, 9, 9, first.flops),), "more flops than")):
        with pytest.raises(TraceError, match=words):
            dataclasses.replace(w, moments=(dataclasses.replace(first, products=rows), *others))


def test_attention_that_does_not_fit_its_moment_is_refused() -> None:
    w = chain_workload(2, 64)
    first, *others = w.moments
    for call, words in (
        ((1, 0, 2, 2, 2, 1, 0), "must be at least 1"),
        ((1, 2, 2, 2, 2, -1, 0), "causal at least 0"),
        ((1, 2, 2, 2, 2, 1, 2), "backward 0 or 1"),
        ((1, 9, 9, 1, first.flops, 1, 1), "more flops than"),
    ):
        with pytest.raises(TraceError, match=words):
            dataclasses.replace(w, moments=(dataclasses.replace(first, attentions=(call,)), *others))


def test_measured_durations_and_their_machine_come_back_to_the_last_bit(tmp_path: Path) -> None:
    w = chain_workload(3, 300, forward_s=0.1 + 0.2)
    save_trace(w, tmp_path / "w.parquet")
    back = load_trace(tmp_path / "w.parquet")
    assert back.moments[0].duration_s == 0.30000000000000004
    assert back.recorded_on == "virtual"
    assert load_trace(tmp_path / "w.parquet").fingerprint == w.fingerprint


def test_saving_replaces_a_file_in_one_step_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    path.write_text("something older")
    save_trace(chain_workload(2, 64), path)
    assert load_trace(path).model == "chain-2x64"
    assert [p.name for p in tmp_path.iterdir()] == ["w.parquet"]


def test_a_failed_save_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    save_trace(chain_workload(2, 64), path)
    before = path.read_bytes()
    huge = chain_workload(2, 64, flops=2**64)
    with pytest.raises(TraceError, match=r"w\.parquet: a field does not fit"):
        save_trace(huge, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["w.parquet"]


def test_saving_into_a_missing_folder_or_nothing_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no folder"):
        save_trace(chain_workload(2, 64), tmp_path / "nowhere" / "w.parquet")
    with pytest.raises(TraceError, match="at least one workload"):
        save_trace([], tmp_path / "w.parquet")


def test_variants_are_chosen_by_what_tells_them_apart(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    variants = four_variants()
    save_trace(variants, path)
    assert [same(a, b) for a, b in zip(load_variants(path), variants, strict=True)] == [True] * 4
    assert same(load_trace(path, batch=4, checkpointing=False), variants[3])
    assert same(load_trace(path, batch=2), variants[0])  # the first of those that agree
    with pytest.raises(TraceError, match=r"no variant has batch=3; it holds: batch 2"):
        load_trace(path, batch=3)
    assert same(load_trace(path), variants[0])


def test_micro_batches_a_file_does_not_hold_are_made_from_one(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    one = chain_workload(2, 64)  # 4 moments and the step
    save_trace(one, path)
    assert len(load_trace(path, micro_batches=3).moments) == 3 * 4 + 1
    save_trace(chain_workload(2, 64, micro_batches=2), path)
    assert load_trace(path, micro_batches=2).micro_batches == 2
    with pytest.raises(TraceError, match="no variant has micro_batches=3"):
        load_trace(path, micro_batches=3)


def test_two_variants_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="variants 0 and 1 are both batch 1"):
        save_trace([chain_workload(2, 64), chain_workload(2, 64)], tmp_path / "w.parquet")


def test_a_13b_trace_is_small(tmp_path: Path) -> None:
    path = tmp_path / "llama.parquet"
    save_trace(preset("llama-13b", batch=4, seq=1024, micro_batches=8), path)
    assert len(load_trace(path).moments) > 3000
    assert path.stat().st_size < 300_000


def test_files_of_other_kinds_are_named_as_what_they_are_not(tmp_path: Path) -> None:
    csv, pkl, empty, parquet = (tmp_path / name for name in ("a.csv", "a.pkl", "empty", "other.parquet"))
    csv.write_text("moment,flops\n0,1\n")
    pkl.write_bytes(pickle.dumps({"moments": [1, 2]}))
    empty.write_bytes(b"")
    pq.write_table(pa.table({"moments": [1, 2]}), parquet)
    for path, words in (
        (csv, "is not a trace"),
        (pkl, "is not a trace"),
        (empty, "is not a trace"),
        (parquet, "is a Parquet file but not a trace"),
        (tmp_path / "missing.parquet", "cannot be read .No such file"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(TraceError, match=rf"{path.name}.*{words}"):
            load_trace(path)


def test_a_truncated_file_is_called_truncated(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    save_trace(chain_workload(2, 64), path)
    data = path.read_bytes()
    for kept in (len(data) - 1, len(data) // 2, 8):
        path.write_bytes(data[:kept])
        with pytest.raises(TraceError, match=r"w\.parquet: is truncated"):
            load_trace(path)


def test_a_newer_file_asks_for_a_newer_reader(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    save_trace(chain_workload(2, 64), path)
    rewrite(path, metadata={"pstar.schema_version": str(SCHEMA_VERSION + 1)})
    with pytest.raises(TraceError, match=r"w\.parquet: schema_version is 4, .*reads up to 3; update"):
        load_trace(path)
    rewrite(path, metadata={"pstar.schema_version": "new"})
    with pytest.raises(TraceError, match="field schema_version is 'new'"):
        load_trace(path)


def test_a_missing_unknown_or_mistyped_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    for columns, words in (
        ({"moments": None}, "field moments is missing"),
        ({"batch": pa.array(["two"])}, "field batch is string; expected int64"),
        ({"uses": pa.array([[1, 2]])}, "field uses is list.*expected list<element: struct"),
        ({"colour": pa.array(["red"])}, "field colour is unknown"),
    ):
        save_trace(chain_workload(2, 64), path)
        rewrite(path, columns=columns)
        with pytest.raises(TraceError, match=rf"w\.parquet: {words}"):
            load_trace(path)


def edited(path: Path, change: Any) -> None:
    """A file whose one row was changed by hand, its digest made to agree again."""
    from pstar_sim.workload.trace import _digest

    table = pq.read_table(path)
    row = table.to_pylist()[0]
    change(row)
    row["digest"] = _digest(row)
    pq.write_table(pa.Table.from_pylist([row], schema=table.schema), path)


def test_content_that_contradicts_itself_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    for change, words in (
        (lambda r: r["moments"][1].update(phase="PAUSE"), r"'moments\[1\].phase' is .PAUSE.; it must be one of FWD"),
        (lambda r: r["uses"][0].update(kind="write"), r"'uses\[0\].kind' is .write."),
        (lambda r: r["uses"][0].update(tensor=99), "uses is .0, 99."),
        (lambda r: r["moments"][0].update(peak_bytes=-1), r"moments\[0\].peak_bytes is -1"),
        (lambda r: r["tensors"][0].update(tied_to=7), r"tensors\[0\].tied_to is 7"),
        (lambda r: r.update(moments=r["moments"][:-1]), "last moment must be the optimizer step"),
        (lambda r: r.update(batch=0), "batch is 0"),
    ):
        save_trace(chain_workload(2, 64), path)
        edited(path, change)
        with pytest.raises(TraceError, match=rf"w\.parquet: variant 0: .*{words}"):
            load_trace(path)


def test_a_changed_figure_is_noticed_by_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    save_trace(chain_workload(2, 64), path)
    rewrite(path, columns={"batch": pa.array([9], pa.int64())})
    with pytest.raises(TraceError, match=r"digest is .* does not match the content"):
        load_trace(path)


def test_null_where_a_value_must_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    save_trace(chain_workload(2, 64), path)
    rewrite(path, columns={"model": pa.array([None], pa.string())})
    with pytest.raises(TraceError, match="variant 0: field 'model' is null; it must be a text"):
        load_trace(path)


def test_frames_show_the_tables() -> None:
    w = chain_workload(2, 64, tensors_per_layer=2, tide_bytes=[10, 30, 30, 20, 0])
    moments, tensors, uses = moments_frame(w), tensors_frame(w), uses_frame(w)
    assert list(moments["peak_bytes"]) == [10, 30, 30, 20, 0]
    assert list(moments["phase"]) == ["FWD", "FWD", "BWD", "BWD", "ADAM"]
    assert moments["duration_s"].isna().all()
    assert list(tensors["numel"]) == [32] * 4
    assert list(tensors["reads"]) == [2] * 4  # FWD and BWD
    assert list(tensors["gradients"]) == [1] * 4
    assert len(uses) == 4 * 2 + 4
    assert json.loads(tensors.to_json())["tied_to"]["0"] is None
