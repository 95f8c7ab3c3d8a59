"""The rows from which an example batch is made, of data sets as scripts have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.longest_rows import LOOKED_AT, largest_batch, longest_rows


def lengths(rows: list[Any]) -> list[int]:
    return [len(row["input_ids"]) for row in rows]


class Made(torch.utils.data.Dataset[Any]):
    """Rows that are made when they are asked for, and counted."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.asked = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.asked += 1
        return {"input_ids": torch.zeros(number % 7 + 1)}


def test_every_row_in_memory_is_looked_at() -> None:
    rows = [{"input_ids": [0] * (900 if number == 1234 else 3)} for number in range(5000)]
    assert lengths(longest_rows(rows, 2)) == [900, 3]


def test_rows_that_are_made_are_looked_at_evenly() -> None:
    rows = Made(100 * LOOKED_AT)
    assert lengths(longest_rows(rows, 3)) == [7, 7, 7]
    assert rows.asked == LOOKED_AT + 3


def test_a_row_that_is_longest_in_one_column_is_among_them() -> None:
    """The longest rows together have short answers: a collator that pads each column needs the third row."""
    rows = [
        {"input_ids": [0] * 9, "answer": "ab"},
        {"input_ids": [0] * 8, "answer": "ab"},
        {"input_ids": [0] * 2, "answer": "abcdef"},
        {"input_ids": [0] * 2, "answer": None},
    ]
    assert longest_rows(rows, 2) == [rows[0], rows[2]]
    assert longest_rows(rows, 1) == [rows[0]] and longest_rows(rows, 5) == []
    assert longest_rows(iter(rows), 2) == [] and longest_rows(None, 1) == []


@pytest.mark.parametrize(("joins", "elements"), [(True, 9 + 8), (False, 2 * (9 + 3))])
def test_the_largest_batch_depends_on_whether_the_collator_joins_rows_or_pads_them(joins: bool, elements: int) -> None:
    """Packed rows: the row with the most parts is not a full one. Joined, the two longest rows are the largest batch;
    padded, the longest row and that with the most parts."""
    rows = [
        {"input_ids": torch.zeros(length), "parts": torch.zeros(parts)} for length, parts in ((9, 1), (8, 1), (6, 3))
    ]

    def collate(chosen: list[Any]) -> dict[str, torch.Tensor]:
        if joins:
            return {"input_ids": torch.cat([row["input_ids"] for row in chosen])[None]}
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad([row[name] for row in chosen], batch_first=True) for name in ("input_ids", "parts")}

    batch = largest_batch(rows, 2, collate)
    assert sum(t.numel() for t in batch.values()) == elements
    assert largest_batch(iter(rows), 2, collate) is None


def test_columns_that_the_collator_joins_are_longest_together() -> None:
    """As preferences are: prompt and chosen in one row of the batch, prompt and rejected in another."""

    def row(prompt: int, chosen: int, rejected: int) -> dict[str, Any]:
        return {"prompt": [0] * prompt, "chosen": [0] * chosen, "rejected": [0] * rejected, "id": 7}

    def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
        texts = [row["prompt"] + row[answer] for answer in ("chosen", "rejected") for row in rows]
        return torch.zeros(len(texts), max(map(len, texts)))

    longest_of_each = [row(20, 1, 1), row(1, 20, 1), row(1, 1, 20), row(10, 15, 15)]  # the last over all columns
    for both in (row(14, 19, 1), row(14, 1, 19)):
        batch = largest_batch([row(2, 2, 2), both, *longest_of_each, row(3, 3, 3)], 2, collate)
        assert batch.shape == (4, 33)


@pytest.mark.parametrize("changed", ["plain", "shuffled", "torch"])
def test_a_data_set_of_arrow_is_looked_at_by_its_columns(changed: str) -> None:
    datasets = pytest.importorskip("datasets")
    ids = [[0] * (number % 5) for number in range(3000)]
    ids[1999] = [0] * 700
    rows = datasets.Dataset.from_dict({"input_ids": ids, "number": list(range(3000)), "text": ["ab"] * 2999 + [None]})
    rows = {
        "plain": lambda: rows,
        "shuffled": lambda: rows.shuffle(seed=0),
        "torch": lambda: rows.with_format("torch"),
    }[changed]()
    assert lengths(longest_rows(rows, 2)) == [700, 4]


def test_a_data_set_whose_rows_go_through_a_function_is_looked_at_row_by_row() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"number": [1, 5, 3]})
    rows = rows.with_transform(lambda batch: {"input_ids": [[0] * n for n in batch["number"]]})
    assert lengths(longest_rows(rows, 2)) == [5, 3]
    nested = datasets.Dataset.from_dict({"turns": [[[0]], [[0] * 4, [0] * 4], [[0] * 5]]})
    assert longest_rows(nested, 1) == [{"turns": [[0] * 4, [0] * 4]}]
