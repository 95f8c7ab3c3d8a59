"""The published rows are read as they are written, and every one of them has exactly one place in the scope."""

from collections import Counter

import pytest

from pstar_sim.errors import CatalogError
from pstar_sim.validation.rows import COLUMNS, number, published_rows, read_rows
from pstar_sim.validation.scope import published_scope, read_scope, rule_of


@pytest.mark.parametrize(
    ("text", "value"), [("12.5", 12.5), ("18B", 18e9), ("1T", 1e12), ("25680-26756", 26218.0), ("1.717B", 1.717e9)]
)
def test_a_figure_is_a_number_a_count_or_the_middle_of_a_range(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "about 3", "1-2-3", "5 B"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a figure"):
        number(text)


def test_a_line_that_cannot_be_read_is_named() -> None:
    head = ",".join(COLUMNS)
    with pytest.raises(CatalogError, match=r"m.csv, row 2: 'fast' is not a figure"):
        read_rows("m.csv", f"{head}\na,b,1,,,,,iter_ms,3,s\na,b,1,,,,,iter_ms,fast,s\n")
    with pytest.raises(CatalogError, match="they must be system, hardware"):
        read_rows("m.csv", "system,value\na,1\n")


def test_every_row_has_one_use() -> None:
    rules = published_scope()
    uses = Counter(rule_of(row, rules).use for row in published_rows())
    assert uses == {"tested": 304, "fitted": 111, "no policy": 14, "out": 177}
    assert sum(uses.values()) == 606


def test_every_rule_says_something() -> None:
    rules = published_scope()
    used = {rule_of(row, rules).name for row in published_rows()}
    assert used == {rule.name for rule in rules}


def test_no_system_of_a_machine_is_both_fitted_and_tested() -> None:
    rules = published_scope()
    by_use = {
        use: {(r.hardware, r.system) for r in published_rows() if rule_of(r, rules).use == use}
        for use in ("fitted", "tested")
    }
    assert not by_use["fitted"] & by_use["tested"]
    fitted_machines = {machine for machine, _ in by_use["fitted"]}
    untouched = {machine for machine, _ in by_use["tested"]} - fitted_machines
    assert {m.split(" ")[0] for m in untouched} == {
        "4xH100-80GB-node(local)",
        "4xH100-80GB",
        "8xV100-SXM2-32GB",
        "1xV100-32GB",
    }


def test_a_rule_needs_a_use_and_a_reason() -> None:
    with pytest.raises(CatalogError, match="rule 'a': needs a name, a use"):
        read_scope("s.toml", '[[rule]]\nname = "a"\nuse = "tested"\n')
    with pytest.raises(CatalogError, match="rule 'a': unknown key 'machine'"):
        read_scope("s.toml", '[[rule]]\nname = "a"\nuse = "out"\nwhy = "b"\nmachine = ["c"]\n')


def test_a_row_that_no_rule_matches_is_an_error() -> None:
    with pytest.raises(CatalogError, match=r"row 1 .*: no rule of scope"):
        rule_of(published_rows()[0], ())
