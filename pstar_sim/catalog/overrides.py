"""Figures replaced by hand: `--set gpu.memory=48GB` and `machine(name, overrides={...})`.

The value is a size (48GB), a rate (25GB/s), flops (150T), a count, a duration (10us), true or false, or a change: +10%,
-25%, x2. It must stay in the range of catalog files, and not contradict another figure.

[Note: cores and Adam] CPU Adam's rate is a figure of its own, measured with all cores. `host.cores` scales it, up to
what DRAM allows (28 bytes per parameter); `host.dram` lowers it only if the new bandwidth allows less; `host.adam` sets
it, and is refused where DRAM could not feed it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

from pstar_sim.arguments import real
from pstar_sim.catalog.figures import Figure, figures_of
from pstar_sim.catalog.machine import ADAM_BYTES_PER_PARAM, Fabric, Gpu, Host, Link, Machine, Nvme
from pstar_sim.catalog.pool import share_pool
from pstar_sim.errors import CatalogError
from pstar_sim.quantities import COUNT, FLAG, SECONDS, Quantity
from pstar_sim.units import format_bytes

Value = str | int | float | bool


@dataclass(frozen=True)
class _Path:
    """quantity: how it is written.
    low, high: SI.
    get: None without such a part.
    """

    quantity: Quantity
    low: float
    high: float
    get: Callable[[Machine], float | None]
    put: Callable[[Machine, float], Machine]


def override(machine: Machine, changes: Mapping[str, Value] | Iterable[str]) -> Machine:
    """The machine with these figures replaced: {"gpu.memory": "48GB"} or ["gpu.memory=48GB"].

    Raises CatalogError, naming path and value, for an unknown path, a value that is no quantity, out of range or
    contradictory, and a part that the machine does not have.
    """
    given = dict(changes) if isinstance(changes, Mapping) else parse_settings(changes)
    given = {path: _plain(value) for path, value in given.items()}
    if not given:
        return machine
    was = machine
    _check_disk(machine, given)
    for path in _in_order(machine, given):
        machine = _put(machine, path, given[path])
    _check(machine, given)
    if was.pool_bytes is not None:
        host_given = "host.memory" in given
        machine = share_pool(machine, was.pool_bytes, gpu_given="gpu.memory" in given, host_given=host_given)
    return _named(was, machine, given)


def _plain(value: object) -> Any:
    if isinstance(value, (str, bool)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def has_figure(machine: Machine, path: str) -> bool:
    return _PATHS[path].get(machine) is not None


def override_paths() -> tuple[str, ...]:
    return tuple(_PATHS)


def override_rows() -> list[tuple[str, str, str, str]]:
    """Name, value and how it is written, and range of each path."""
    rows = []
    for path, figure in _PATHS.items():
        quantity = figure.quantity
        written = f"{quantity.what}, such as {quantity.example}" if quantity is not FLAG else quantity.example
        rows.append((f"`{path}`", written, quantity.shown(figure.low), quantity.shown(figure.high)))
    return rows


def parse_settings(texts: Iterable[str]) -> dict[str, Value]:
    """["gpu.memory=48GB", "nodes=2"] as a mapping. Raises CatalogError for a text that is not PATH=VALUE, and a path
    given twice."""
    found: dict[str, Value] = {}
    for text in texts:
        if not isinstance(text, str):
            raise CatalogError(f"{text!r} is not PATH=VALUE, such as gpu.memory=48GB")
        path, equals, value = text.partition("=")
        path, value = path.strip(), value.strip()
        if not (path and equals and value):
            raise CatalogError(f"{text!r} is not PATH=VALUE, such as gpu.memory=48GB")
        if path in found:
            raise CatalogError(f"{path} is set twice, to {found[path]} and to {value}; give it once")
        found[path] = value
    return found


def _in_order(machine: Machine, given: Mapping[str, Value]) -> list[str]:
    """Nodes and GPUs, which multiply parts, come first, and cores before Adam's rate. Where a memory shrinks, what is
    subtracted from it comes before, so no intermediate machine contradicts itself."""
    places = {path: place for place, path in enumerate(_PATHS)}
    paths = sorted(given, key=lambda path: places.get(path, len(places)))
    for memory, taken in (("gpu.memory", "gpu.context"), ("host.memory", "host.reserved")):
        if memory in given and taken in given:
            now = _PATHS[memory].get(machine)
            if now is not None and _number(machine, memory, _PATHS[memory], given[memory]) < now:
                paths.remove(taken)
                paths.insert(paths.index(memory), taken)
    return paths


def _put(machine: Machine, path: str, value: Value) -> Machine:
    figure = _PATHS.get(path)
    if not isinstance(path, str) or not isinstance(value, (str, int, float)):
        raise CatalogError(
            f"{path!r} = {value!r}: give the path of a figure and its value, such as 'gpu.memory': '48GB'"
        )
    if figure is None:
        near = difflib.get_close_matches(path, _PATHS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"it can be {', '.join(_PATHS)}"
        raise CatalogError(f"{path} = {value!r}: there is no such figure of a machine; {hint}")
    number = _number(machine, path, figure, value)
    if not figure.low <= number <= figure.high:
        unit, shown = figure.quantity.likely, figure.quantity.shown
        if unit and re.fullmatch(r"\s*[0-9.]+\s*", str(value)):
            raise CatalogError(f"{path} = {value!r} has no unit; write {value}{unit}")
        between = f"{shown(figure.low)} and {shown(figure.high)}"
        raise CatalogError(f"{path} = {value!r} is absurd; it must be between {between}")
    try:
        return figure.put(machine, number)
    except CatalogError as error:
        if str(error).startswith(path):
            raise
        raise CatalogError(f"{path} = {value} on {machine.name}: {error}") from None


_RELATIVE = re.compile(r"([+-])\s*([0-9]+(?:\.[0-9]*)?)\s*%|[x*]\s*([0-9]+(?:\.[0-9]*)?)")


def _number(machine: Machine, path: str, figure: _Path, value: Value) -> float:
    """SI (true as 1, false as 0)."""
    quantity = figure.quantity
    refusal = CatalogError(
        f"{path} = {value!r} is no {quantity.what}; write {quantity.example}"
        + ("" if quantity is FLAG else ", or a change such as +10% or x2")
    )
    if isinstance(value, bool) != (quantity is FLAG) and not isinstance(value, str):
        raise refusal
    if isinstance(value, (int, float)):
        number = float(value) if isinstance(value, bool) else real(value)
    elif quantity is not FLAG and (change := _RELATIVE.fullmatch(value.strip())) is not None:
        present = figure.get(machine)
        if present is None:
            raise CatalogError(
                f"{path} = {value!r}: {machine.name} has no {path} to change; give it as {quantity.example}"
            )
        number = _changed(quantity, present, change)
    else:
        try:
            number = quantity.parse(value)
        except ValueError:
            raise refusal from None
    if number != number or (number <= 0 and not (figure.low <= 0 == number)):
        raise CatalogError(f"{path} = {value!r}: it must be positive; write {quantity.example}")
    if quantity is COUNT and not number.is_integer():
        raise refusal
    return number


def _changed(quantity: Quantity, present: float, change: re.Match[str]) -> float:
    if change[3] is not None:
        number = present * float(change[3])
    else:
        number = present * (1 + float(change[2]) / (100 if change[1] == "+" else -100))
    if quantity is COUNT:
        return float(max(round(number), 1 if change[1] != "-" else 0))
    return number


# Parts of a machine.


def _with(machine: Machine, name: str, change: Callable[[Any], Any]) -> Machine:
    if name in ("gpu", "link"):
        ranks = tuple(replace(rank, **{name: change(getattr(rank, name))}) for rank in machine.ranks)
        return replace(machine, ranks=ranks)
    return replace(machine, **{name: change(getattr(machine, name) or _new(name))})


def _new(name: str) -> Fabric | Nvme:
    if name == "nvme":
        rates: dict[str, Any] = dict.fromkeys(("memory_bytes", "read_bytes_per_s", "write_bytes_per_s"), 1)
        return Nvme(name=name, **rates, latency_s=1e-4, measured=False, source="set by hand")
    return Fabric(name=name, bytes_per_s=1.0, latency_s=1e-5, measured=False, source="set by hand")


def _of_part(name: str, figure: Figure) -> _Path:
    def get(machine: Machine) -> float | None:
        part = getattr(machine, name)
        value: float | None = None if part is None else figure.get(part)
        return value

    def put(machine: Machine, value: float) -> Machine:
        if getattr(machine, name) is None and figure.unit[0] is SECONDS:
            lack = f"{machine.name} has no {name}; set {name}.bandwidth too"
            raise CatalogError(f"{name}.{figure.path} = {SECONDS.shown(value)}: {lack}")
        return _with(machine, name, lambda part: figure.put(part, value))

    return _Path(figure.unit[0], *figure.range, get, put)


def _gpu_memory(machine: Machine, size: float) -> Machine:
    return _with(machine, "gpu", lambda g: replace(g, memory_bytes=round(size), usable_bytes=round(size)))


def _cores(machine: Machine, count: float) -> Machine:
    host = machine.host
    most = max(host.adam_params_per_s, host.dram_bytes_per_s / ADAM_BYTES_PER_PARAM)
    rate = min(host.adam_params_per_s * count / host.cores, most)
    return replace(machine, host=replace(host, cores=round(count), adam_params_per_s=rate))


def _hbm(machine: Machine, rate: float) -> Machine:
    """Bandwidth of operators and products changes in proportion."""

    def change(gpu: Gpu) -> Gpu:
        was, operators, shape = gpu.hbm_bytes_per_s, gpu.operator_bytes_per_s, gpu.products
        return replace(
            gpu,
            hbm_bytes_per_s=rate,
            operator_bytes_per_s=operators and operators * rate / was,
            products=shape and replace(shape, bytes_per_s=shape.bytes_per_s * (rate / was)),
        )

    return _with(machine, "gpu", change)


def _dram(machine: Machine, rate: float) -> Machine:
    host = machine.host
    most = max(rate / ADAM_BYTES_PER_PARAM, 0.0)
    adam = min(host.adam_params_per_s, most) if rate < host.dram_bytes_per_s else host.adam_params_per_s
    return replace(machine, host=replace(host, dram_bytes_per_s=rate, adam_params_per_s=adam))


def _gpus(machine: Machine, count: float) -> Machine:
    per_node = machine.ranks[: machine.local_ranks]
    if machine.mixed:
        raise CatalogError(f"gpus = {count:g}: the GPUs of {machine.name} differ; write a machine file that lists them")
    wanted, nodes = round(count), machine.nodes
    node = tuple(per_node[i % len(per_node)] for i in range(wanted))
    share = 1 / (wanted * nodes)
    price = machine.price_usd_per_hour
    return replace(
        machine,
        ranks=tuple(replace(rank, batch_share=share) for _ in range(nodes) for rank in node),
        price_usd_per_hour=price if wanted == machine.local_ranks else None,
    )


def _both_ways(machine: Machine, rate: float) -> Machine:
    return _with(machine, "link", lambda k: replace(k, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate))


def _paths() -> dict[str, _Path]:
    paths = {
        "nodes": _Path(COUNT, 1, 4096, lambda m: m.nodes, lambda m, count: m.with_nodes(round(count))),
        "gpus": _Path(COUNT, 1, 64, lambda m: m.local_ranks, _gpus),
    }
    for name, part in _PARTS.items():
        paths |= {f"{name}.{f.path}": _of_part(name, f) for f in figures_of(part) if f.path}
    for path, put in _PUTS.items():
        paths[path] = replace(paths[path], put=put)
    paths["link.bandwidth"] = replace(
        paths["link.h2d"], get=lambda m: min(m.link.h2d_bytes_per_s, m.link.d2h_bytes_per_s), put=_both_ways
    )
    paths |= {f.path: _Path(f.unit[0], *f.range, f.get, f.put) for f in figures_of(Machine)}
    return dict(sorted(paths.items(), key=lambda row: row[0].startswith(("peer", "network", "nvme", "price"))))


_PARTS: Mapping[str, type] = {
    "gpu": Gpu, "host": Host, "link": Link, "peer": Fabric, "network": Fabric, "nvme": Nvme,
}  # fmt: skip
_PUTS = {"gpu.memory": _gpu_memory, "gpu.hbm": _hbm, "host.dram": _dram, "host.cores": _cores}
"""Path -> function that sets it, where other attributes depend on it."""
_PATHS = _paths()


def _refusal(
    machine: Machine, given: Mapping[str, Value], paths: Iterable[str], why: str, instead: str
) -> CatalogError:
    named = [f"{path} = {given[path]}" for path in paths if path in given]
    return CatalogError(f"{' and '.join(named)} on {machine.name}: {why}; {instead}")


def _check_disk(machine: Machine, given: Mapping[str, Value]) -> None:
    needed = ("nvme.memory", "nvme.read", "nvme.write")
    of_disks = [path for path in given if path.startswith("nvme.")]
    if machine.nvme is None and of_disks and not all(path in given for path in needed):
        instead = "a disk needs all three: nvme.memory, nvme.read and nvme.write"
        raise _refusal(machine, given, of_disks, "it has no disk of its own", instead)


def _check(machine: Machine, given: Mapping[str, Value]) -> None:
    refuse = partial(_refusal, machine, given)
    if "link.bandwidth" in given and ("link.h2d" in given or "link.d2h" in given):
        raise refuse(
            ("link.bandwidth", "link.h2d", "link.d2h"),
            "link.bandwidth sets both directions",
            "give it, or one or both of the others",
        )
    host = machine.host
    traffic = host.adam_params_per_s * ADAM_BYTES_PER_PARAM
    if "host.adam" in given and traffic > host.dram_bytes_per_s * 1.001:
        raise refuse(
            ("host.adam", "host.dram"),
            f"Adam at that rate moves {format_bytes(traffic)}/s, its DRAM only {format_bytes(host.dram_bytes_per_s)}/s",
            f"give at most {host.dram_bytes_per_s / ADAM_BYTES_PER_PARAM / 1e9:.3g}G, or a higher host.dram",
        )
    if machine.nvme is not None and (one := machine.nvme.only_rate_beside):
        other = "write" if one == "read" else "read"
        raise refuse((f"nvme.{one}_beside",), "both rates count together", f"set nvme.{other}_beside too")
    if machine.nodes > 1 and machine.network is None:
        raise refuse(("nodes",), "it has no network between nodes", "set network.bandwidth too, such as 25GB/s")


def _named(was: Machine, machine: Machine, given: Mapping[str, Value]) -> Machine:
    """Changes are noted in parts' `source`. With another GPU speed the machine has another name: recorded timings do
    not hold."""
    note = "; by hand: " + ", ".join(f"{path} = {value}" for path, value in given.items())

    for part in ("gpu", "link", "host"):
        if any(path.startswith(f"{part}.") for path in given):
            machine = _with(machine, part, lambda p: replace(p, source=p.source + note))
    if was.gpu.flops_per_s != machine.gpu.flops_per_s or was.gpu.hbm_bytes_per_s != machine.gpu.hbm_bytes_per_s:
        faster = ", ".join(f"{p}={v}" for p, v in given.items() if p.startswith(("gpu.flops", "gpu.hbm")))
        machine = replace(machine, name=f"{machine.name} ({faster})")
    return machine
