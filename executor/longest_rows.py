"""The largest batch of a data set, of its longest rows, for which a run is planned.

All rows of a list, tuple or `datasets.Dataset` are measured; in any other data set about LOOKED_AT rows, because
reading a row may open a file or compute it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from executor.moments.hooks import tensors_of

LOOKED_AT = 512
"""Number of rows that are measured in a data set whose rows may be costly to read. They are spread evenly."""
JOINED = 6
"""Number of columns of which each pair is taken as joined by the collator. The columns with the longest rows count."""
_AT_ONCE = 10_000  # rows of Arrow


def largest_batch(rows: Any, count: int, collate: Callable[[list[Any]], Any]) -> Any:
    """The largest of several batches of `count` rows: `longest_rows`, for a collator that pads column by column; the
    rows longest over all columns, for one that joins rows (packing); and, per pair of columns, the rows longest in
    both, for one that joins columns (a prompt and its answer). None where `longest_rows` returns none."""
    batches = (collate([rows[number] for number in numbers]) for numbers in _choices(rows, count))
    return max(batches, key=lambda batch: sum(t.numel() for t in tensors_of(batch)), default=None)


def longest_rows(rows: Any, count: int) -> list[Any]:
    """Returns the longest row over all columns, then each column's, then the next longest; none if the data set cannot
    be indexed or has fewer rows. With as many as there are different longest rows, a batch padded by column is the
    largest possible."""
    return [rows[number] for numbers in _choices(rows, count)[:1] for number in numbers]


def _choices(rows: Any, count: int) -> list[list[int]]:
    """Numbers of rows in one or more choices, as `largest_batch` orders them."""
    if rows is None or not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__") or len(rows) < count:
        return []
    lengths = dict(_arrow_lengths(rows) or _lengths(rows, count))
    order = heapq.nlargest(count, lengths, key=lambda number: sum(lengths[number].values()))
    chosen = order[:1]
    names = sorted({column for of_row in lengths.values() for column in of_row})
    for column in names:
        longest = max(lengths, key=lambda number: lengths[number].get(column, 0))
        if all(lengths[number].get(column, 0) < lengths[longest].get(column, 0) for number in chosen):
            chosen.append(longest)
    by_column = list(dict.fromkeys([*chosen, *order]))[:count]
    joined = [
        heapq.nlargest(count, lengths, key=lambda number: lengths[number].get(a, 0) + lengths[number].get(b, 0))
        for a, b in itertools.combinations(_columns_that_differ(lengths, names), 2)
    ]
    choices: dict[frozenset[int], list[int]] = {}
    for numbers in (by_column, order, *joined):
        choices.setdefault(frozenset(numbers), numbers)
    return list(choices.values())


def _columns_that_differ(lengths: Mapping[int, Mapping[str, int]], names: Sequence[str]) -> list[str]:
    found: dict[tuple[int, ...], str] = {}
    for name in names:
        column = tuple(of_row.get(name, 0) for of_row in lengths.values())
        if len(set(column)) > 1:
            found.setdefault(column, name)
    return [found[column] for column in heapq.nlargest(JOINED, found, key=max)]


def _lengths(rows: Any, count: int) -> Iterator[tuple[int, dict[str, int]]]:
    step = 1 if isinstance(rows, (list, tuple)) else max(1, len(rows) // max(LOOKED_AT, count))
    for number in range(0, len(rows), step):  # one at a time: rows may be images
        row = rows[number]
        columns = row if isinstance(row, Mapping) else {"": row}
        yield number, {str(name): _length(value) for name, value in columns.items()}


def _arrow_lengths(rows: Any) -> list[tuple[int, dict[str, int]]] | None:
    """For a `datasets.Dataset` of numbers, texts, and lists of numbers; None for others, and for one that transforms
    rows when they are read."""
    if type(rows).__module__ != "datasets.arrow_dataset" or rows.format["type"] == "custom":
        return None
    import pyarrow as pa
    import pyarrow.compute as pc

    found: list[tuple[int, dict[str, int]]] = []
    for table in rows.with_format("arrow").iter(batch_size=_AT_ONCE):
        columns: dict[str, list[int]] = {}
        for name, column in zip(table.column_names, table.columns):
            kind = column.type
            if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                if pa.types.is_nested(kind.value_type):
                    return None
                columns[name] = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
            elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
                columns[name] = pc.fill_null(pc.utf8_length(column), 0).to_pylist()
            elif pa.types.is_nested(kind):
                return None
        for number in range(table.num_rows):
            found.append((len(found), {name: values[number] for name, values in columns.items()}))
    return found


def _length(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(_length(part) for part in value.values())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return len(value) if not value or isinstance(value[0], (int, float)) else sum(_length(part) for part in value)
    if isinstance(value, (str, bytes)):
        return len(value)
    size = getattr(value, "size", 1)  # a number in numpy's arrays, (width, height) in an image
    return math.prod(size) if isinstance(size, tuple) else size if isinstance(size, int) else 1
