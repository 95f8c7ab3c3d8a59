"""The schema library: what fits its type, and one sentence for what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from pstar_sim.errors import CatalogError, PstarError
from pstar_sim.quantities import FLAG, RATE, SECONDS, SIZE, Quantity
from pstar_sim.schema.fields import Checked, Curve, Table, Text, between, choice, curve, filled, least, want
from pstar_sim.schema.reading import Fault, convert, read_table
from pstar_sim.schema.records import columns, read_record, to_columns


class Engine(Table, frozen=True, kw_only=True):
    """Of a test."""

    power_kw: Annotated[float, between(1, 500)]
    rates: Annotated[Curve | None, curve("load", "kW")] = None
    fuel: Annotated[str, choice(("petrol", "diesel"))] = "petrol"
    serviced: Checked | None = None


class Car(Table, frozen=True, kw_only=True):
    """Of a test."""

    doors: Annotated[tuple[Engine, ...], filled()] | None = None

    name: Text
    seats: Annotated[int, least(1)] = 4
    engine: Engine | None = None
    spare: tuple[Engine, ...] = ()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (3, "f.toml: a = 3; must be a table: [a] and its fields below it"),
        ({}, "f.toml: [a] name is missing; it must be a text that is not empty"),
        ({"name": " "}, "f.toml: [a] name = ' '; must be a text that is not empty"),
        ({"name": "x", "seat": 2}, "f.toml: [a] seat = 2 is not a known field; did you mean seats?"),
        (
            {"name": "x", "zzz": 2},
            "f.toml: [a] zzz = 2 is not a known field; it takes doors, name, seats, engine, spare",
        ),
        ({"name": "x", "seats": True}, "f.toml: [a] seats = True; must be a whole number of at least 1"),
        ({"name": "x", "engine": 1}, "f.toml: [a] engine = 1; must be a table"),
        ({"name": "x", "spare": [3]}, "f.toml: a.spare[0] = 3; must be a table"),
        ({"name": "x", "doors": []}, "f.toml: [a] doors = []; must be a list of tables, one at least"),
        (
            {"name": "x", "engine": {"power_kw": float("nan")}},
            "f.toml: [a.engine] power_kw = nan; must be a number from 1 to 500",
        ),
        (
            {"name": "x", "spare": [{"power_kw": 2}, {"power_kw": 2, "fuel": "gas"}]},
            "f.toml: [a.spare[1]] fuel = 'gas'; must be one of petrol, diesel",
        ),
        (
            {"name": "x", "engine": {"power_kw": 2, "rates": [[2, 1], [1, 1]]}},
            (
                "f.toml: [a.engine] rates = [[2.0, 1.0], [1.0, 1.0]]; must be a list of [load, kW] pairs of positive "
                "numbers, sizes ascending"
            ),
        ),
        (
            {"name": "x", "engine": {"power_kw": 2, "serviced": "2026-01-01"}},
            (
                "f.toml: [a.engine] serviced = '2026-01-01'; must be a date from 2015 on, without quotes, such as "
                "2026-11-21"
            ),
        ),
    ],
)
def test_a_table_is_refused_by_file_entry_field_value_and_what_would_do(raw: object, said: str) -> None:
    with pytest.raises(CatalogError) as caught:
        read_table(Car, "f.toml", "a", raw)
    assert str(caught.value) == said


def test_a_table_that_fits_is_read() -> None:
    car = read_table(Car, "f.toml", "a", {"name": "x", "engine": {"power_kw": 2, "rates": [[1, 2], [2, 3]]}})
    assert car.engine is not None
    assert (car.seats, car.engine.power_kw, car.engine.rates) == (4, 2.0, ((1.0, 2.0), (2.0, 3.0)))


@dataclass(frozen=True, kw_only=True)
class Stop:
    place: str
    km: float
    crew: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.km < 0:
            raise PstarError(f"stop {self.place!r}: km is {self.km}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class Trip:
    stops: tuple[Stop, ...]
    legs: tuple[Stop, ...] = ()
    notes: Mapping[str, float] = field(default_factory=dict)
    home: Stop | None = None


TRIP = Annotated[Trip, columns(stops=Stop)]
ROWS = (Stop(place="a", km=1.0, crew=(1, 2)), Stop(place="b", km=2.5))


def test_a_dataclass_comes_back_from_its_columns() -> None:
    values = {"stops": to_columns(Stop, ROWS), "legs": [{"place": "c", "km": 1}], "notes": {"toll": 2}}
    assert read_record(TRIP, values) == Trip(stops=ROWS, legs=(Stop(place="c", km=1.0),), notes={"toll": 2.0})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stop": 1}, "field 'stop' is not known; did you mean stops?"),
        ({"home": {"place": "x"}}, "field 'home.km' is missing"),
        ({"home": {"place": "x", "km": 1, "plase": 2}}, "field 'home.plase' is not known; did you mean place?"),
        ({"home": {"place": "x", "km": -1}}, "field 'home': stop 'x': km is -1.0; it must not be negative"),
        ({"legs": [{"place": "x", "km": -1}]}, "field 'legs[0]': stop 'x': km is -1.0; it must not be negative"),
        ({"notes": {"toll": "much"}}, "field 'notes.toll' is \"much\"; it must be a finite number"),
        ({"notes": {"toll": float("inf")}}, "field 'notes.toll' is Infinity; it must be a finite number"),
        ({"stops": []}, "field 'stops' is []; it must be an object of columns"),
        (
            {"stops": {"place": ["a"], "km": [1], "crew": [[2**63]]}},
            "field 'stops.crew[0][0]' is 9223372036854775808; it must be a whole number of at most 64 bits",
        ),
        (
            {"stops": {"place": ["a"], "km": [], "crew": [[]]}},
            "field 'stops': its columns differ in length: {'place': 1, 'km': 0, 'crew': 1}",
        ),
    ],
)
def test_a_record_is_refused_by_path_value_and_what_would_do(change: dict[str, object], said: str) -> None:
    with pytest.raises(Fault) as caught:
        read_record(TRIP, {"stops": to_columns(Stop, ROWS), **change})
    assert caught.value.in_json() == said


def test_a_bound_is_said_as_it_is_declared() -> None:
    assert want(Annotated[int, between(1, 8)]) == "a whole number from 1 to 8"
    assert want(Annotated[float, least(0.5)]) == "a number of at least 0.5"
    assert convert(Annotated[int, between(1, 8)], 8) == 8
    with pytest.raises(Fault):
        convert(Annotated[int, between(1, 8)], 9)


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [(SIZE, "48GB", 48e9), (SIZE, "2 gib", 2**31), (RATE, "25 MB /s".replace(" /", "/"), 25e6), (SECONDS, "10us", 1e-5),
     (FLAG, "Off", 0), (FLAG, "true", 1), (SIZE, "-3GB", -1)],
)  # fmt: skip
def test_a_quantity_is_read_with_its_unit(quantity: Quantity, text: str, value: float) -> None:
    assert quantity.parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("quantity", "text"), [(SIZE, "much"), (SIZE, "3us"), (FLAG, "1"), (FLAG, "-1"), (SECONDS, "")]
)
def test_what_is_no_quantity_is_refused(quantity: Quantity, text: str) -> None:
    with pytest.raises(ValueError):
        quantity.parse(text)
