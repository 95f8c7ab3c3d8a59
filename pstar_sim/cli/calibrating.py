"""`pstar calibrate`: measures the machine."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pstar_sim.cli.bars import bar
from pstar_sim.cli.declare import command
from pstar_sim.cli.executor_parts import executor_module
from pstar_sim.cli.flag_values import one_of
from pstar_sim.cli.flags import output
from pstar_sim.cli.output import Header, check_apart, say_answer, say_table, tell
from pstar_sim.errors import PstarError
from pstar_sim.units import GB, format_count

if TYPE_CHECKING:
    from executor.calibration.folders import DiskPoint
    from pstar_sim.catalog.curves import Curve
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.recorded.profile import Profile

commands = typer.Typer()

DEVICES = Literal["auto", "virtual", "cuda"]


@command(
    commands,
    "pstar calibrate -o my.toml && pstar plan --trace gpt2.parquet --machine my.toml --gpu-memory 1GB -o plan.json\n"
    "example: pstar calibrate --from-profile trace.json -o my.toml",
)
def calibrate(
    *,
    path: Annotated[str, output("the machine file to write (.toml)")],
    device: Annotated[
        DEVICES,
        typer.Option(
            parser=one_of(DEVICES),
            help="what to measure (auto: the GPU where there is one, else the virtual accelerator)",
        ),
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="a quarter of the time, for twice the scatter")] = False,
    from_profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="measure nothing: take the rates of copies, products, launches, CPU Adam and collectives from a trace "
            "of torch's profiler (export_chrome_trace, with record_shapes=True)",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help="the machine whose other figures stay (default: that of the trace's GPU; with --disks, here)",
        ),
    ] = None,
    disks: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER[,FOLDER]",
            help="measure these folders alone, in half a minute: reads and writes as plans make them, by size and "
            "threads",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="what was measured as a JSON object")] = False,
) -> int:
    """Measure the machine this runs on, in less than two minutes, and write it as a machine file; or take its rates
    from a profiler's trace."""
    if not path.endswith(".toml"):
        raise PstarError(f"{path!r}: the name of a machine file must end in .toml, by which --machine recognises it")
    if from_profile is not None and disks is not None:
        raise PstarError("--from-profile and --disks of `pstar calibrate` are two ways to measure; give one")
    if from_profile is not None:
        return _from_profile(from_profile, machine, path, as_json=json)
    if disks is not None:
        return _disks(tuple(disks.split(",")), machine or "here", path, as_json=json)
    if machine is not None:
        raise PstarError("--machine of `pstar calibrate` goes with --from-profile or --disks")
    measure = executor_module("calibrate").calibrate
    with bar("starting", quiet=json) as on_part:
        measured, found = measure(path, device=device, quick=quick, on_part=on_part)
    if json:
        say_answer(Header(machine=measured.name), **_facts(measured, path, found.skipped))
        return 0
    say_table(("measured", "figure", "by size"), _rows(measured))
    tell("\n".join([f"not measured: {reason}" for reason in found.skipped] or ["everything was measured"]))
    if found.taken_by_others > 0.1:
        tell(
            f"other programs had {found.taken_by_others:.0%} of the processor time meanwhile; measure again when the "
            "machine is idle"
        )
    tell(f"{path}: use it with --machine {path}")
    return 0


def _disks(folders: tuple[str, ...], base: str, path: str, *, as_json: bool) -> int:
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.catalog.writing import save_machine

    rates = executor_module("calibration.folders").folder_rates(folders)
    known = load_machine(base, disks=folders)
    assert known.nvme is not None
    machine = replace(
        known,
        name=Path(path).stem,
        nvme=replace(
            known.nvme,
            name=f"{Path(path).stem}-disks",
            **rates.figures,
            measured=True,
            source=f"pstar calibrate --disks {','.join(folders)}",
        ),
    )
    save_machine(machine, path)
    if as_json:
        say_answer(Header(machine=machine.name), **_facts(machine, path, []), **asdict(rates))
        return 0
    rows = [
        (
            f"lists of {point.size_bytes >> 20} MiB, {format_count(point.threads, 'thread')} per folder",
            *map(_gb, _both(point)),
        )
        for point in rates.points
    ]
    together = tuple(map(_gb, rates.together))
    say_table(("measured", "read", "write"), [*rows, ("reads and writes at the same time", *together)])
    tell(f"all other figures are those of {base}; {path}: use it with --machine {path}")
    return 0


def _both(point: DiskPoint) -> tuple[float, float]:
    return point.read_bytes_per_s, point.write_bytes_per_s


def _from_profile(trace: str, base: str | None, path: str, *, as_json: bool) -> int:
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.catalog.writing import save_machine
    from pstar_sim.recorded.profile import load_profile, machine_named_by, with_profile

    check_apart([trace], [path])
    profile = load_profile(trace)
    name = base or machine_named_by(profile)
    if name is None:
        what = (
            "names no GPU" if profile.gpu is None else f"names the GPU {profile.gpu!r}, which the catalog does not have"
        )
        raise PstarError(f"{trace}: {what}; give --machine NAME, whose other figures stay")
    machine = with_profile(load_machine(name), profile, name=Path(path).stem)
    save_machine(machine, path)
    rows = _profile_rows(profile)
    left = [what for what, seen in _of_profile(profile).items() if not seen]
    if as_json:
        taken = {what: figure for what, figure, _ in rows}
        facts = _facts(machine, path, [f"not in the trace: {what}" for what in left])
        say_answer(Header(machine=machine.name), **facts, from_profile=taken)
        return 0
    say_table(("measured", "figure", "by size"), rows)
    stays = f"not in the trace, and as of {name}: {', '.join(left)}, and all sizes" if left else ""
    tell("\n".join(line for line in (f"{trace}: {', '.join(profile.counts)}", stays) if line))
    tell(f"{path}: use it with --machine {path}")
    return 0


def _of_profile(profile: Profile) -> dict[str, object]:
    return {
        "products": profile.products,
        "copies to the device": profile.h2d,
        "copies to the host": profile.d2h,
        "launches": profile.kernel_s,
        "CPU Adam": profile.adam_params_per_s,
        "collectives": profile.collectives,
    }


def _profile_rows(profile: Profile) -> list[tuple[str, str, str]]:
    rows = [
        (f"products in {dtype}", f"{max(rate for _, rate in curve) / 1e12:.4g} TFLOP/s", _span(curve, 1e12))
        for dtype, curve in profile.products.items()
    ]
    copies = (("host to device", profile.h2d), ("device to host", profile.d2h), ("collectives", profile.collectives))
    rows += [(name, _gb(max(rate for _, rate in curve)), _span(curve, GB)) for name, curve in copies if curve]
    if profile.pageable_bytes_per_s is not None:
        rows.append(("either way, not pinned", _gb(profile.pageable_bytes_per_s), ""))
    if profile.kernel_s is not None:
        rows.append(("beginning and end of a kernel", f"{profile.kernel_s * 1e6:.1f} us", ""))
    if profile.adam_params_per_s is not None:
        rows.append(("CPU Adam", f"{profile.adam_params_per_s / 1e9:.3g} Gparam/s", ""))
    return rows


def _rows(machine: Machine) -> list[tuple[str, str, str]]:
    gpu, link, host = machine.gpu, machine.link, machine.host
    rows = [
        (f"products in {dtype}", f"{rate / 1e12:.4g} TFLOP/s", _span(gpu.matmul_tables.get(dtype, ()), 1e12))
        for dtype, rate in gpu.flops_per_s.items()
    ]
    rows.append(("device memory", _gb(gpu.hbm_bytes_per_s), ""))
    if gpu.operator_bytes_per_s is not None:
        rows.append(("operators of a moment", _gb(gpu.operator_bytes_per_s), ""))
    if gpu.products is not None:
        shape = gpu.products
        rows.append(("products by shape", _gb(shape.bytes_per_s), f"{shape.kernel_s * 1e6:.1f} us a kernel"))
        rows.append(("attention", f"{shape.flash:.0%} of the rate of large products", ""))
    if gpu.launch_s is not None:
        rows.append(("kernels of every moment", f"{gpu.launch_s * 1e6:.1f} us", ""))
    if machine.framework is not None:
        rows.append(("Python of a moment", f"{machine.framework.python_s * 1e6:.1f} us", ""))
        rows.append(("the engine adds to a moment", f"{machine.framework.wait_s * 1e6:.1f} us", ""))
    rows.append(("host to device", _gb(link.h2d_bytes_per_s), _span(link.h2d_table, GB)))
    rows.append(("device to host", _gb(link.d2h_bytes_per_s), _span(link.d2h_table, GB)))
    if link.pageable_bytes_per_s is not None:
        rows.append(("either way, not pinned", _gb(link.pageable_bytes_per_s), ""))
    threads = ", ".join(f"{rate / 1e9:.3g} on {count:g}" for count, rate in host.adam_table)
    rows.append(("CPU Adam", f"{host.adam_params_per_s / 1e9:.3g} Gparam/s", f"{threads} threads"))
    rows += [(f"update by {rule}", f"{share:.2g} of AdamW's rate", "") for rule, share in machine.updates.items()]
    rows.append(("host memory", _gb(host.dram_bytes_per_s), ""))
    if machine.nvme is not None:
        rows.append(("disk, read", _gb(machine.nvme.read_bytes_per_s), ""))
        rows.append(("disk, write", _gb(machine.nvme.write_bytes_per_s), ""))
        together = machine.nvme.read_beside_bytes_per_s, machine.nvme.write_beside_bytes_per_s
        rows += [
            (f"disk, {name} beside the other", _gb(rate), "")
            for name, rate in zip(("read", "write"), together)
            if rate is not None
        ]
    if machine.peer is not None:
        rates = _span(machine.peer.table, GB)
        rows.append((f"collectives ({machine.peer.name})", _gb(machine.peer.bytes_per_s), rates))
    rows += [
        (name.replace("_", " "), f"{factor:.2f} times as long", "")
        for name, factor in sorted(machine.slowdowns.items())
    ]
    return rows


def _span(curve: Curve, unit: float) -> str:
    return ", ".join(f"{rate / unit:.3g}" for _, rate in curve)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GB:.3g} GB/s"


def _facts(machine: Machine, path: str, skipped: list[str]) -> dict[str, object]:
    gpu, link, host = machine.gpu, machine.link, machine.host
    return {
        "file": path,
        "gpu": gpu.name,
        "flops_per_s": dict(gpu.flops_per_s),
        "matmul_tables": {dtype: list(curve) for dtype, curve in gpu.matmul_tables.items()},
        "memory_bytes_per_s": gpu.hbm_bytes_per_s,
        "operator_bytes_per_s": gpu.operator_bytes_per_s,
        "products": None if gpu.products is None else asdict(gpu.products),
        "moment_s": gpu.launch_s,
        "python_s": None if machine.framework is None else machine.framework.python_s,
        "wait_s": None if machine.framework is None else machine.framework.wait_s,
        "h2d_bytes_per_s": link.h2d_bytes_per_s,
        "d2h_bytes_per_s": link.d2h_bytes_per_s,
        "h2d_table": list(link.h2d_table),
        "d2h_table": list(link.d2h_table),
        "pageable_bytes_per_s": link.pageable_bytes_per_s,
        "adam_params_per_s": host.adam_params_per_s,
        "adam_table": list(host.adam_table),
        "updates": dict(machine.updates),
        "dram_bytes_per_s": host.dram_bytes_per_s,
        "disk_read_bytes_per_s": None if machine.nvme is None else machine.nvme.read_bytes_per_s,
        "disk_write_bytes_per_s": None if machine.nvme is None else machine.nvme.write_bytes_per_s,
        "disk_read_beside_bytes_per_s": None if machine.nvme is None else machine.nvme.read_beside_bytes_per_s,
        "disk_write_beside_bytes_per_s": None if machine.nvme is None else machine.nvme.write_beside_bytes_per_s,
        "collectives_bytes_per_s": None if machine.peer is None else machine.peer.bytes_per_s,
        "collectives_table": [] if machine.peer is None else list(machine.peer.table),
        "slowdowns": dict(machine.slowdowns),
        "not_measured": skipped,
    }
