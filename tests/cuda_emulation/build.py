"""Builds the emulated device against the torch of this interpreter: libcudart, libcuda, libcupti,
libnccl, libnvidia-ml and the operators.

What torch wants from the runtime and the driver, and the emulation lacks, becomes a function that names itself and
fails. Results lie in the environment, in a folder for each state of the sources and of torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from locked import locked

HERE = Path(__file__).parent
SOURCES = sorted(path for path in HERE.glob("*/*") if path.suffix in (".c", ".cpp", ".h"))
LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libcupti.so.13", "libnccl.so.2", "libnvidia-ml.so.1")
OPERATORS = "libemulated_cuda_operators.so"
ASKING = (
    "c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "torch_nvshmem", "torch_cpu", "caffe2_nvrtc",
)  # fmt: skip
FLAGS = ("-fPIC", "-w")


def fingerprint() -> str:
    versions = [importlib.metadata.version(name) for name in ("torch", "cuda-toolkit")]
    texts = [path.read_text(encoding="utf-8") for path in (Path(__file__), *SOURCES)]
    return hashlib.sha256("".join([*versions, *texts]).encode()).hexdigest()[:12]


BUILT = Path(sys.prefix) / "emulated_cuda" / fingerprint()


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def symbols(files: Iterable[Path], *, undefined: bool) -> set[str]:
    """Names that the files define, or want; without the version behind the @ of a library."""
    option = "--undefined-only" if undefined else "--defined-only"
    names = set()
    for file in files:
        lines = run("nm", *(("-D",) if ".so" in file.name else ()), option, file).splitlines()
        names |= {line.split()[-1].split("@")[0] for line in lines if line.strip()}
    return names


def missing(wanted: Iterable[str]) -> str:
    """Source of functions that fail with cudaErrorNotSupported (801)."""
    head = "#include <stdio.h>\n"
    body = (
        f'int {name}(void) {{ fputs("emulated CUDA: {name} is not emulated\\n", stderr); return 801; }}\n'
        for name in sorted(wanted)
    )
    return head + "".join(body)


def compiled(source: Path, *options: str | Path) -> Path:
    target = BUILT / (source.stem + ".o")
    compiler = ("gcc", "-O1") if source.suffix == ".c" else ("g++", "-O2", "-std=c++20")
    run(*compiler, *FLAGS, *options, "-c", source, "-o", target)
    return target


def build() -> None:
    torch = Path(importlib.metadata.distribution("torch").locate_file("torch"))
    cuda = torch.parent / "nvidia" / "cu13" / "include"
    libraries = [path for name in ASKING if (path := torch / "lib" / f"lib{name}.so").exists()]
    wanted = symbols(libraries, undefined=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        operators = pool.submit(build_operators, torch, cuda)
        runtime = list(pool.map(lambda source: compiled(source, "-I", cuda), sorted(HERE.glob("runtime/*.cpp"))))
        driver = [compiled(HERE / "runtime" / "driver.c")]
        write_callback_numbers(cuda)
        profiler = [compiled(HERE / "profiler" / "cupti.cpp", "-I", cuda, "-I", BUILT)]
        nccl = cuda.parents[1] / "nccl" / "include"
        collectives = [compiled(HERE / "collectives" / "nccl.cpp", "-I", cuda, "-I", nccl)]
        link(LIBRARIES[0], r"_{0,2}cuda[A-Z]\w+$", runtime, wanted)
        link(LIBRARIES[1], r"cu[A-Z]\w+$", driver, wanted)
        link(LIBRARIES[2], r"cupti[A-Z]\w+$", profiler, wanted)
        link(LIBRARIES[3], r"p?nccl[A-Z]\w+$", collectives, wanted)
        link(LIBRARIES[4], r"nvml[A-Z]\w+$", [compiled(HERE / "runtime" / "nvml.c")], wanted)
        operators.result()


def link(library: str, pattern: str, parts: list[Path], wanted: set[str]) -> None:
    """`pattern`: which of the wanted names the library has to have; those that its parts lack name themselves."""
    names = {name for name in wanted if re.match(pattern, name)} - symbols(parts, undefined=False)
    stubs = BUILT / f"missing_in_{library.split('.')[0]}.c"
    stubs.write_text(missing(names))
    versions = BUILT / f"{library}.map"
    name = library.replace("-", "_")
    versions.write_text(f"{name} {{ global: cu*; __cuda*; emulated_cuda_*; nccl*; nvml*; local: *; }};\n")
    run(
        "g++", "-shared", *parts, compiled(stubs), "-o", BUILT / library,
        f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}", "-lpthread", "-ldl", "-lrt",
    )  # fmt: skip


def write_callback_numbers(cuda: Path) -> None:
    """CUPTI's number of each function of the runtime, from its header."""
    header = (cuda / "cupti_runtime_cbid.h").read_text()
    numbers = dict(re.findall(r"CUPTI_RUNTIME_TRACE_CBID_(cuda\w+?)_v\d+\s*= (\d+)", header))
    lines = (f'{{"{name}", {number}}},\n' for name, number in numbers.items() if not name.endswith("tsz"))
    (BUILT / "callback_numbers.inc").write_text("".join(lines))


def build_operators(torch: Path, cuda: Path) -> None:
    headers = (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", cuda, cuda / "cccl")
    run(
        "g++", "-shared", "-O1", "-std=c++20", *FLAGS, *(f"-I{path}" for path in headers),
        HERE / "operators" / "operators.cpp", "-o", BUILT / OPERATORS, f"-L{torch / 'lib'}",
        "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", f"-Wl,-rpath,{torch / 'lib'}", "-Wl,--no-as-needed",
    )  # fmt: skip


def ensure_built() -> None:
    BUILT.mkdir(parents=True, exist_ok=True)
    with locked(BUILT / "lock"):
        if not (BUILT / "complete").exists():
            build()
            (BUILT / "complete").touch()


if __name__ == "__main__":
    ensure_built()
