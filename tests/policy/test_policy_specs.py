"""Specs of policies: `name[:key=value[,key=value...]]`, normalised, refused with what would do, usable as any name."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest

from pstar_sim.catalog.machine import Machine
from pstar_sim.cli import main
from pstar_sim.core.plan import Plan, Settings, load_plan
from pstar_sim.errors import DoesNotFit, PstarError, UnknownName
from pstar_sim.planner.compare import compare
from pstar_sim.policy import find_policy
from pstar_sim.policy.family.static_partition import static_partition
from pstar_sim.policy.family.tide import tide
from pstar_sim.policy.kit.options import (
    Option,
    either,
    one_of,
    options_of,
    share,
    specified,
    switch,
    whole_number,
)
from pstar_sim.policy.registry import is_built_in, policies, policy_name
from pstar_sim.schema.texts import from_text
from pstar_sim.testing import chain_workload
from pstar_sim.workload.workload import Workload


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("tide", "tide"),
        ("tide:capacity=peak", "tide:capacity=peak"),
        ("tide:pins=2,capacity=peak", "tide:capacity=peak,pins=2"),  # in the order of the options
        (" tide : adam = fifo , prefetch = 2 ", "tide:prefetch=2,adam=fifo"),
        ("tide:prefetch=4e0", "tide:prefetch=4"),
        ("tide:streams=off,barrier=on", "tide:barrier=on"),  # a default is left out
        ("tide:capacity=tide,eviction=belady", "tide"),
        ("static_partition:capacity=peak", "static_partition"),
        ("static_partition:capacity=tide", "static_partition:capacity=tide"),
    ],
)
def test_a_spec_is_normalised(spec: str, name: str) -> None:
    assert policy_name(spec) == name
    assert find_policy(spec) == find_policy(name)
    assert is_built_in(find_policy(spec))


def test_a_spec_of_defaults_is_the_policy_itself() -> None:
    assert find_policy("tide:capacity=tide") is tide
    assert find_policy("static_partition:capacity=peak") is static_partition


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tide:capcity=peak", ["no option 'capcity'", "did you mean capacity?", "eviction=(belady | lru | fifo)"]),
        ("tide:eviction=belody", ["eviction=belody is not allowed", "did you mean belady?", "belady | lru | fifo"]),
        ("tide:prefetch=0", ["prefetch=0", "none | edf | a whole number of at least 1"]),
        ("tide:prefetch=1.5", ["prefetch=1.5", "a whole number"]),
        ("tide:pins=-1", ["pins=-1", "optimal | a whole number of at least 0"]),
        ("tide:pins=nan", ["pins=nan"]),
        ("tide:streams=yes", ["streams=yes", "on | off"]),
        ("tide:adam", ["'adam' is not key=value", "adam=(after-backward | fifo | edf)"]),
        ("tide:", ["policy 'tide' is followed by a colon but by no key=value; tide has "]),
        ("tide:pins=1,pins=2", ["sets pins twice"]),
        ("karma:pins=1", ["'karma' has no options", "use karma"]),
    ],
)
def test_what_is_not_a_spec_is_refused_in_one_line(spec: str, words: list[str]) -> None:
    with pytest.raises(PstarError) as caught:
        find_policy(spec)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_an_unknown_policy_with_options_is_an_unknown_policy() -> None:
    with pytest.raises(UnknownName, match="did you mean tide"):
        find_policy("tida:capacity=peak")


def test_every_default_is_among_the_values_and_documented() -> None:
    for name, policy in policies().items():
        for key, option in options_of(policy).items():
            assert option.help, (name, key)
            assert option.allowed, (name, key)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (whole_number(), "1e9", 10**9),
        (whole_number(least=1), "7", 7),
        (share(), "0.25", 0.25),
        (switch(), "on", True),
        (either(one_of("none"), whole_number()), "none", "none"),
        (either(one_of("none"), whole_number()), "3", 3),
    ],
)
def test_values_are_read(kind: object, text: str, value: object) -> None:
    assert from_text(kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (share(), "1.5"),
        (share(), "nan"),
        (switch(), "yes"),
        (one_of("a"), "b"),
        (whole_number(), "inf"),
        (whole_number(), ""),
    ],
)
def test_values_are_refused(kind: object, text: str) -> None:
    with pytest.raises(ValueError):
        from_text(kind, text)


OPTIONS = {"every": Option(whole_number(least=1), "of a test", 2), "share": Option(share(), "of a test", 0.5)}


def of_a_test(workload: Workload, machine: Machine, settings: Settings, *, every: int = 2, share: float = 0.5) -> Plan:
    raise DoesNotFit(policy="of_a_test", place="gpu", needed_bytes=every, available_bytes=1, what=f"share {share}")


def test_a_policy_takes_its_options_as_keyword_arguments_and_refuses_by_its_full_name() -> None:
    assert options_of(of_a_test) == sys.modules[__name__].OPTIONS
    policy = specified("mine", of_a_test, "share=0.25,every=5")
    assert policy.__name__ == "mine:every=5,share=0.25"
    assert repr(policy) == "<policy mine:every=5,share=0.25>"
    with pytest.raises(DoesNotFit) as caught:
        policy(chain_workload(1, 1024), None, Settings())  # type: ignore[arg-type]
    assert str(caught.value).startswith("mine:every=5,share=0.25 does not fit: gpu needs 5 B (share 0.25)")


def test_a_spec_can_be_sent_to_another_process() -> None:
    policy = find_policy("tide:pins=2")
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert again.__name__ == "tide:pins=2"


def test_compare_takes_specs_and_its_plans_carry_them(toy_machine: Machine, tmp_path: Path) -> None:
    w = chain_workload(4, 1024)
    c = compare(w, toy_machine, policies=["tide", "tide:pins=0,capacity=peak"], chunk_bytes=2048)
    assert [row.policy for row in c.rows] == ["tide", "tide:capacity=peak,pins=0"]
    planned = c["tide:pins=0,capacity=peak"]  # in any spelling
    assert planned.plan.policy == "tide:capacity=peak,pins=0"
    assert planned.timeline.label == planned.plan.policy
    planned.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").policy == planned.plan.policy
    assert planned.explain()
    with pytest.raises(PstarError, match="different names"):
        compare(w, toy_machine, policies=["tide", "tide:capacity=tide"])


def test_the_command_line_takes_specs_and_lists_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    flags = "--model 1B --batch 4 --seq 1024 --machine v100-32 --chunk 256MiB"
    assert main(["plan", *flags.split(), "--policy", "tide:adam=fifo,pins=0", "-o", str(plan)]) == 0
    assert main(["check", str(plan)]) == 0
    assert "tide:adam=fifo,pins=0" in capsys.readouterr().out
    assert main(["compare", *flags.split(), "--policy", "tide:capacity=low"]) == 2
    assert "capacity is tide | peak" in capsys.readouterr().err
    assert main(["policies"]) == 0
    text = capsys.readouterr().out
    assert "--policy tide:capacity=peak,adam=fifo" in text
    assert "after-backward | fifo | edf" in text
    assert main(["policies", "--json"]) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    capacity = next(o for o in rows["static_partition"]["options"] if o["option"] == "capacity")
    assert (capacity["values"], capacity["default"]) == ("tide | peak", "peak")
    assert rows["karma"]["options"] == []
