"""Who may know whom: every import is read from the source, also deferred ones, those for types alone, and strings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

import pytest

from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.registry import built_in, can, find_policy, named, policy_at, reorders

ROOT = Path(__file__).parents[2]
Edges = Mapping[str, frozenset[str]]

# Floors of pstar_sim, lowest first: files and folders of one floor do not know each other.
FLOORS = (
    ("dtypes", "units", "collector", "python310", "terminal", "renderers", "version", "words"),
    ("quantities",),
    ("errors",),
    ("arguments",),
    ("files",),
    ("schema",),
    ("catalog",),
    ("workload",),
    ("core",),
    ("cost",),
    ("policy", "sim"),
    ("bounds",),
    ("planner",),
    ("validation",),
    ("frameworks", "recorded"),
    ("report",),
    ("cli", "testing"),
    ("__main__",),
)
EXECUTOR_MAY_KNOW = 11  # floors: policy and below
DOOR = "pstar_sim"  # the front door names what is public and who shows an answer; nobody inside goes through it

# Of the executor, lowest first, in the same way; its front door and what `python -m` starts lie above all.
EXECUTOR_FLOORS = (
    ("devices", "disks"),
    ("memory",),
    ("queues",),
    ("moments",),
    ("activations", "calibration", "contract", "models", "scaling"),
    ("descriptions",),
    ("capture", "compatibility"),
    ("distributed",),
    ("session",),
    ("off_plan",),
    ("driving",),
    ("measuring",),
    ("lifetime",),
    ("engine",),
    ("saving", "training"),
    ("optimizer",),
    # what puts one together
    ("describing", "prepare"),
    ("recording",),
    ("longest_rows", "offloading"),
    ("trainer_capture",),
    ("hf", "lightning"),
    ("axolotl",),
    ("calibrate", "running"),
    ("examples", "run"),
    ("__init__", "__main__"),
)

# Inside a folder one file may close a circle, for a reason.
CIRCLES = {
    ("pstar_sim.core.plan", "pstar_sim.core.plan_file"): "a plan can save itself: plan.save()",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_in(tree: ast.AST, package: str) -> Iterable[str]:
    """Every dotted name that an import or a string outside docstrings could mean."""
    nodes = [*ast.walk(tree)]
    prose = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and isinstance(node.body[0] if node.body else None, ast.Expr)
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value.partition(":")[0].rstrip(".")


def read() -> Edges:
    sources = {module_of(p): p for name in ("pstar_sim", "executor") for p in sorted((ROOT / name).rglob("*.py"))}
    edges: dict[str, frozenset[str]] = {}
    for module, path in sources.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {name for name in named_in(tree, package) if name in sources and name != module}
        # Its own package is loaded before it; `from a.b import c` names a.b too: not meant where a module of it is.
        found -= {name for name in found if package.startswith(f"{name}.") or name == package}
        found -= {name for name in found if sources[name].name == "__init__.py" and f"{name}." in " ".join(found)}
        edges[module] = frozenset(found)
    return edges


@pytest.fixture(scope="module")
def edges() -> Edges:
    return read()


def room_of(module: str) -> str:
    """The folder of a module; a file directly in a package is a room of its own."""
    path = PurePath(*module.split("."))
    folder = path if (ROOT / path).is_dir() else path.parent
    return str(folder if folder.parent.name or len(folder.parts) > 1 else path)


def floor_of(module: str, floors: tuple[tuple[str, ...], ...]) -> int:
    name = "__init__" if "." not in module else module.split(".")[1]
    found = next((i for i, names in enumerate(floors) if name in names), None)
    assert found is not None, f"{module} has no floor; put {name} on one"
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Nodes that are left when those without a successor, and then those without a predecessor, are taken away."""
    left = {node: {n for n in nexts if n in graph and n != node} for node, nexts in graph.items()}
    for _ in range(2):
        while ends := {node for node, nexts in left.items() if not nexts}:
            left = {node: nexts - ends for node, nexts in left.items() if node not in ends}
        turned: dict[str, set[str]] = {node: set() for node in left}
        for node, nexts in left.items():
            for n in nexts:
                turned[n].add(node)
        left = turned
    return [sorted(left)] if left else []


def rooms(edges: Edges, package: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, nexts in edges.items():
        if module.split(".")[0] == package and module != DOOR:
            found.setdefault(room_of(module), set()).update(room_of(n) for n in nexts)
    return found


def test_no_import_of_pstar_sim_runs_upwards(edges: Edges) -> None:
    upwards = [
        f"{a} -> {b}"
        for a, nexts in edges.items()
        for b in nexts
        if a.startswith("pstar_sim.")
        and (
            b == DOOR
            or (b.startswith("executor") and a.split(".")[1] not in ("cli", "__main__"))
            or (b.startswith("pstar_sim.") and room_of(a) != room_of(b) and _above(a, b))
        )
    ]
    assert upwards == []


def _above(a: str, b: str) -> bool:
    """Whether b lies above a, or beside it."""
    if a.split(".")[1] == b.split(".")[1]:
        return False
    return floor_of(b, FLOORS) >= floor_of(a, FLOORS)


def test_the_executor_knows_policy_and_below(edges: Edges) -> None:
    upwards = [
        f"{a} -> {b}"
        for a, nexts in edges.items()
        for b in nexts
        if a.startswith("executor") and a != "executor.__main__" and b.startswith("pstar_sim")
        if b == DOOR or floor_of(b, FLOORS) >= EXECUTOR_MAY_KNOW
    ]
    assert upwards == []
    assert edges["executor.__main__"] == {"pstar_sim.__main__"}, "a program's door, which nobody imports"


@pytest.mark.parametrize("package", ["pstar_sim", "executor"])
def test_no_circle_between_folders(edges: Edges, package: str) -> None:
    """Folders, and files directly in the package, each a room of its own."""
    assert circles(rooms(edges, package)) == []


def test_the_executors_front_door_lists_its_rooms_from_the_lowest_up(edges: Edges) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "executor" / "__init__.py").read_text(encoding="utf-8"))) or ""
    rows = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    listed = {word for row in rows for word in re.findall(r"\w+", row)}
    assert {room.partition("/")[2] for room in rooms(edges, "executor")} - {"", "__main__"} <= listed
    first = [name for row in rows for name in re.split(r"\s{2,}", row)[0].split(", ")]
    floors = [floor_of(f"executor.{name}", EXECUTOR_FLOORS) for name in first]
    assert len(floors) > 15 and floors == sorted(floors)


def test_a_circle_of_the_executor_is_found(edges: Edges) -> None:
    """A file that lies directly in the package closes it, a folder does, and one inside a folder does not."""
    assert {"executor/engine", "executor/session", "executor/prepare"} <= set(rooms(edges, "executor"))
    for a, b in (("executor.contract", "executor.engine"), ("executor.distributed.ranks", "executor.session.state")):
        (found,) = circles(rooms({**edges, a: edges[a] | {b}}, "executor"))
        assert {room_of(a), room_of(b)} <= set(found)
    inside = edges["executor.session.state"] | {"executor.session.following"}
    assert circles(rooms({**edges, "executor.session.state": inside}, "executor")) == []


def test_circles_inside_a_folder_are_those_listed(edges: Edges) -> None:
    """At most five, and none that is not one any more."""
    assert len(CIRCLES) <= 5 and all(CIRCLES.values())
    own = {a: set(nexts) for a, nexts in edges.items() if a != DOOR}
    for a, b in CIRCLES:
        assert a.rpartition(".")[0] == b.rpartition(".")[0]
        own[a].remove(b)
    assert circles(own) == []
    for a, b in CIRCLES:
        assert circles({**own, a: own[a] | {b}}) != [], f"{a} -> {b} closes no circle: take it off the list"


def test_the_checker_shares_nothing_with_what_it_checks(edges: Edges) -> None:
    """Whatever it reaches: the steps, the layout and the plan, not the rules, the ledger or what makes plans."""
    reached: set[str] = set()
    todo = [module for module in edges if module.startswith("pstar_sim.core.checker")]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += edges[module]
    own = {module.rpartition(".")[2] for module in reached if module.startswith("pstar_sim.core.")}
    assert {"step", "layout", "plan", "walk", "worst_case"} <= own
    assert not own & {"effects", "ledger", "rules", "program", "choose", "follow", "draft", "slabs"}
    floors = {module.split(".")[1] for module in reached}
    assert floors <= {name for row in FLOORS[: FLOORS.index(("core",)) + 1] for name in row}


def test_no_import_of_the_executor_runs_upwards(edges: Edges) -> None:
    upwards = [
        f"{a} -> {b}"
        for a, nexts in edges.items()
        for b in nexts
        if a.startswith("executor") and b.startswith("executor") and room_of(a) != room_of(b)
        if floor_of(b, EXECUTOR_FLOORS) >= floor_of(a, EXECUTOR_FLOORS)
    ]
    assert upwards == []


def test_planner_and_ladder_know_no_policy_by_name() -> None:
    """They ask what a policy can do (`CAPABILITIES`). Words of options, the keys of tables, are no names."""
    found = []
    for path in [
        *sorted((ROOT / "pstar_sim" / "planner").glob("*.py")),
        *(ROOT / "executor" / "off_plan" / name for name in ("ladder.py", "rungs.py")),
    ]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in keys:
                if node.value.partition(":")[0] in built_in():
                    found.append(f"{path.name}:{node.lineno} {node.value!r}")
    assert found == []


def test_what_a_policy_can_do_is_its_modules_word() -> None:
    assert named(lambda able: able.tries_others) == ("optimal",)
    assert policy_at(Point(capacity="peak")) == "static_partition"
    assert can("tide").point == Point()
    assert can(lambda workload, machine, settings: None) == Capabilities()  # type: ignore[arg-type, return-value]
    for name in built_in():
        for options in can(name).from_disks:
            assert find_policy(f"{name}:{options}")


def test_with_options_a_policy_can_do_what_it_can_from_there() -> None:
    assert can("tide:adam=fifo").point == Point(adam="fifo") and can("tide:pins=0").point is None
    assert can("optimal:shares=machine") == can("optimal")
    ordered = can("optimal:order=relay")
    assert ordered.searches and not ordered.tries_others and ordered.point is None
    assert can("zero_infinity:states=nvme").from_disks == can("zero_infinity").from_disks


def test_a_policy_is_layer_major_by_itself_or_by_its_option() -> None:
    assert reorders("l2l") and reorders("l2l:stash=host")
    assert reorders("tide:order=relay") and reorders(find_policy("tide:pins=0,order=relay-host"))
    assert not any(reorders(spec) for spec in ("tide", "tide:pins=0", "tide:order=depth-first", "zero_offload"))


@pytest.mark.parametrize(
    "code, meant",
    [
        ("def f():\n    from pstar_sim.report import tide_picture", "pstar_sim.report.tide_picture"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pstar_sim.cli", "pstar_sim.cli"),
        ("import importlib\nimportlib.import_module('pstar_sim.report.html')", "pstar_sim.report.html"),
        ("from ..report import html", "pstar_sim.report.html"),
        ("_WHERE = {'a': 'pstar_sim.cli.planning:plan'}", "pstar_sim.cli.planning"),
        ("name = f'pstar_sim.report.{1}'", "pstar_sim.report"),
    ],
)
def test_every_way_to_import_is_read(code: str, meant: str) -> None:
    assert meant in set(named_in(ast.parse(code), "pstar_sim.core"))
