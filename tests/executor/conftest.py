"""What the executor's tests share: small models of each kind, a machine that is too small for them, and plain PyTorch.

Reference in fp32 is torch.optim.AdamW(fused=True) with clip_grad_norm_; in bf16 the same over fp32 master weights,
written out (master from the loaded weights, working copy = cast(master), gradients cast to fp32 and summed in fp32).
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import itertools
import pickle
import random
import sys
import threading
import time
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's optimizers import it when the first is made: before what is imported is frozen
from torch import nn
from torch.utils.hooks import RemovableHandle

import executor
from executor.capture import capture_module
from executor.models import enable_checkpointing
from executor.queues.threads import ThreadQueues
from pstar_sim.catalog.machine import Machine, Nvme
from pstar_sim.core.effects import CATEGORIES, NON_MODEL, category_of
from pstar_sim.core.ledger import PLACES, WIDTH, Moves
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place, Queue
from pstar_sim.core.workspace import with_host_budget, workspace_bytes
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.registry import find_policy, plan_to_run
from pstar_sim.testing import round_machine
from pstar_sim.workload.workload import Workload, repeat_micro_batch

BATCH, SEQUENCE, VOCABULARY = 2, 12, 96
LAYERS = 2
"""Of transformers: with embeddings and a head, chunks before, between and behind."""
LITTLE_EFFORT = 0.02
"""`Settings.effort`: plans are run here, not compared."""


def small_machine(gpu_bytes: int, host_bytes: int = 2 * 10**9) -> Machine:
    """Rates of a processor, as if the virtual accelerator had them."""
    return round_machine(
        gpu_memory_bytes=gpu_bytes,
        host_memory_bytes=host_bytes,
        h2d_bytes_per_s=2e9,
        latency_s=1e-5,
        hbm_bytes_per_s=20e9,
        flops_per_s={"fp32": 20e9, "bf16": 20e9},
        dram_bytes_per_s=20e9,
        cores=2,
        adam_params_per_s=1e9,
        measured=False,
    )


DISKS = Nvme(
    name="test", memory_bytes=10**9, read_bytes_per_s=2e9, write_bytes_per_s=1e9, latency_s=1e-4, measured=False,
    source="test",
)  # fmt: skip
BESIDE = replace(DISKS, read_beside_bytes_per_s=1.6e9, write_beside_bytes_per_s=0.8e9)
"""Reads and writes run at the same time."""


class Mlp(nn.Module):
    """Layers of different widths; loss computed inside."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        widths = (*(24, 64, 48, 80, 32, 64)[:layers], 24)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.checkpointing = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(layer, torch.relu(x), use_reentrant=False)
            else:
                x = layer(torch.relu(x))
        return ((x - y) ** 2).mean()


def mlp(checkpointing: bool, layers: int = 6) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    model = Mlp(layers)
    model.checkpointing = checkpointing

    def batch(draw: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(BATCH, 24, generator=draw), "y": torch.randn(BATCH, 24, generator=draw)}

    return model, batch


class Switch(nn.Module):
    """Layers whose order, and use, a loop can change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.order = list(range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.layers[i](x)) + x
        return (x**2).mean()


class Experts(nn.Module):
    """Four experts; `route` has the number of the one that each row goes to. One that gets no row is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(24, 40)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(4))
        self.after = nn.Linear(40, 24)

    def forward(self, x: torch.Tensor, y: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        out = x
        for number, expert in enumerate(self.experts):
            rows = (route == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return ((self.after(out) - y) ** 2).mean()


ROUTES = ((0, 1, 2, 3), (1, 1, 2, 2), (0, 0, 1, 1), (2, 2, 2, 2), (3, 3, 0, 0), (0, 1, 1, 0))


def experts() -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    """The first batch uses every expert; of the next ones some use two, some one."""
    routes = itertools.cycle(ROUTES)

    def batch(draw: torch.Generator) -> dict[str, torch.Tensor]:
        x, y = torch.randn(4, 24, generator=draw), torch.randn(4, 24, generator=draw)
        return {"x": x, "y": y, "route": torch.tensor(next(routes))}

    return Experts(), batch


def _text(draw: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=draw)
    return {"input_ids": ids, "labels": ids}


def _hf(name: str, checkpointing: bool, layers: int) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.BertConfig(
            num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = transformers.BertForMaskedLM(config)
    model.config.use_cache = False
    if checkpointing:
        enable_checkpointing(name, model)
    model.train()
    return model, _text


def build(
    name: str, *, checkpointing: bool = False, seed: int = 0, layers: int = LAYERS
) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    """A small model and a function that draws a batch for it. Names: mlp, mlp-4 (four layers), experts, gpt2
    (tied), llama, bert.

    layers: of a transformer.
    """
    torch.manual_seed(seed)
    if name == "experts":
        return experts()
    if name == "mlp-4":
        return mlp(checkpointing, 4)
    return mlp(checkpointing) if name == "mlp" else _hf(name, checkpointing, layers)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


class _Likeness(pickle.Pickler):
    """Of a tensor, what a capture sees of it, and which tensors are one; of a function in a function, where it stands
    and what it keeps; of hooks, their order: torch numbers the hooks of a process."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._tensors: dict[int, int] = {}
        self._hooks: dict[int, int] = {}

    def _hook(self, number: int) -> int:
        return self._hooks.setdefault(number, len(self._hooks))

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and "<locals>" in obj.__qualname__:
            return obj.__module__, obj.__qualname__, [cell.cell_contents for cell in obj.__closure__ or ()]
        if isinstance(obj, RemovableHandle):
            return "handle", self._hook(obj.id)
        if isinstance(obj, OrderedDict) and obj and all(isinstance(key, int) for key in obj):
            return "hooks", [(self._hook(key), hook) for key, hook in obj.items()]
        if not isinstance(obj, torch.Tensor):
            return None
        number = self._tensors.setdefault(id(obj), len(self._tensors))
        return number, type(obj).__name__, obj.shape, obj.stride(), obj.dtype, obj.device.type, obj.requires_grad


def likeness(*values: Any) -> bytes | None:
    """Equal for models and batches that are captured alike; None for a model that cannot be pickled."""
    text = io.BytesIO()
    try:
        _Likeness(text).dump((*values, torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
    except (AttributeError, TypeError, ValueError, RecursionError, pickle.PicklingError):
        return None
    return text.getvalue()


CAPTURED: dict[bytes, Workload] = {}
"""What `workload_of` captured, by likeness: of one micro-batch."""


def workload_of(model: nn.Module, batch: Any, *, micro_batches: int = 1, name: str = "test") -> Workload:
    shape = next(iter(batch.values())).shape
    key = likeness(model, batch, name)
    w = None if key is None else CAPTURED.get(key)
    if w is None:
        w = capture_module(model, batch, name=name, batch=shape[0], sequence=shape[1] if "input_ids" in batch else 1)
    if key is not None:
        CAPTURED[key] = w
    return repeat_micro_batch(w, micro_batches)


def tight_plan(policy: str, w: Workload, settings: Settings) -> Plan:
    """A plan at the smallest of a few gpu budgets at which the policy fits, so that chunks must move. It is sought with
    little effort."""
    plan_for, settings = find_policy(policy), replace(settings, effort=LITTLE_EFFORT)
    params = sum(t.bytes for t in w.tensors if t.tied_to is None)
    for share in (0.25, 0.4, 0.55, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 12.0):
        try:
            return plan_for(w, small_machine(w.peak_non_model_bytes + int(share * params)), settings)
        except DoesNotFit:
            continue
    raise AssertionError(f"{policy} fits nowhere")


def plan_on_disks(
    name: str,
    policy: str,
    *,
    micro_batches: int,
    clip: bool,
    dtype: torch.dtype = torch.float32,
    host_share: float | None = None,
    beside: bool = False,
    chunk_bytes: int | None = None,
    effort: float = LITTLE_EFFORT,
    layers: int = LAYERS,
) -> Plan:
    """policy: also options of zero_infinity alone.
    host_share: host memory beside the workspace, as a share of all parameters and states; None: enough without disks.
    beside: whether the disks read while they write.
    """
    model, draw = build(name, checkpointing=True, layers=layers)
    model.to(dtype)
    w = repeat_micro_batch(workload_of(model, draw(torch.Generator().manual_seed(9)), name=name), micro_batches)
    params = sum(t.bytes for t in w.tensors if t.tied_to is None)
    machine = replace(small_machine(w.peak_non_model_bytes + int(3.0 * params)), nvme=BESIDE if beside else DISKS)
    if host_share is not None:
        bytes_each = 16 if dtype == torch.float32 else 14
        host_bytes = int(host_share * bytes_each * params / dtype.itemsize)
        machine = with_host_budget(machine, host_bytes + workspace_bytes(w))
    small = "subgroup=30000,bucket=20000,reuse=20000"
    spec = f"zero_infinity:{policy},{small}" if policy.startswith(("params=", "states=")) else policy
    return plan_to_run(spec, w, machine, Settings(clip=clip, effort=effort, chunk_bytes=chunk_bytes))


@dataclass
class Reference:
    """Plain training: fp32 with torch's fused AdamW, bf16 the same over fp32 master weights."""

    model: nn.Module
    lr: float
    weight_decay: float
    max_grad_norm: float | None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    master: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.bf16 = named[0][1].dtype == torch.bfloat16
        if self.bf16:
            self.master = {n: nn.Parameter(p.detach().float()) for n, p in named}
        self.optimizer = torch.optim.AdamW(
            self.master.values() if self.bf16 else [p for _, p in named],
            lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True,
        )  # fmt: skip

    def after_backward(self) -> None:
        """bf16: add each micro-batch's gradients, cast to fp32, to the master's."""
        for name, p in self.model.named_parameters():
            if self.bf16 and p.grad is not None:
                master, gradient = self.master[name], p.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                p.grad = None

    def step(self) -> None:
        updated = list(self.master.values()) if self.bf16 else list(self.model.parameters())
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(updated, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, p in self.model.named_parameters():
            if self.bf16:
                p.data.copy_(self.master[name])


def train_both(
    model: nn.Module,
    reference: Reference,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    *,
    steps: int,
    micro_batches: int,
) -> tuple[list[float], list[float]]:
    """The same loop on both; losses of every micro-batch."""
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(steps):
        for _ in range(micro_batches):
            batch = next(batches)
            loss = loss_of(model, batch) / micro_batches
            loss.backward()
            mine.append(float(loss.detach()))
            loss = loss_of(reference.model, batch) / micro_batches
            loss.backward()
            theirs.append(float(loss.detach()))
            reference.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    return mine, theirs


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any], micro_batches: int
) -> float:
    """One iteration of the usual loop; the loss of its last micro-batch."""
    for _ in range(micro_batches):
        loss = loss_of(model, next(batches)) / micro_batches
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest element."""
    a, b = a.cpu(), b.cpu()
    scale = float(b.abs().max())
    return float((a - b).abs().max()) / scale if scale else float((a - b).abs().max())


def batches(draw_batch: Callable[[torch.Generator], Any], seed: int = 1) -> Iterator[Any]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield draw_batch(draw)


@dataclass
class Run:
    """A prepared model beside its reference."""

    model: nn.Module
    optimizer: executor.OffloadedOptimizer
    reference: Reference
    plan: Plan
    batches: Iterator[Any]

    @property
    def session(self) -> executor.Session:
        return self.optimizer.session


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of `offload` are sought with little effort, too."""

    def planned(policy: str, w: Workload, machine: Machine, settings: Settings) -> Plan:
        return plan_to_run(policy, w, machine, replace(settings, effort=LITTLE_EFFORT))

    monkeypatch.setattr("executor.offloading.plan_to_run", planned)


@pytest.fixture(autouse=True)
def _streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --streams: every virtual accelerator that a test does not make itself has streams."""
    if not request.config.getoption("--streams"):
        return
    rng = random.Random(7)

    def with_streams(**options: Any) -> executor.VirtualStreams:
        return executor.VirtualStreams(
            delays=lambda queue: rng.random() * 3e-4 if rng.random() < 0.4 else 0.0, **options
        )

    monkeypatch.setattr("executor.devices.opening.VirtualBackend", with_streams)


def waits_of_training(monkeypatch: pytest.MonkeyPatch, owners: Sequence[tuple[Any, str]]) -> list[str]:
    """Grows by each call of an owner's `synchronize` in the calling thread or in one that Python did not start:
    backward on a device runs in a thread of autograd's own. The executor's own threads may wait."""
    mine = threading.get_ident()
    waits: list[str] = []
    for owner, word in owners:
        plain = owner.synchronize

        def noted(*given: Any, _plain: Any = plain, _word: str = word, **more: Any) -> Any:
            thread = threading.current_thread()
            if thread.ident == mine:
                waits.append(_word)
            elif isinstance(thread, threading._DummyThread):
                waits.append(f"{_word}, in backward's own thread")
            return _plain(*given, **more)

        monkeypatch.setattr(owner, "synchronize", noted)
    return waits


def stands_still(queues: ThreadQueues, *, but: Queue) -> bool:
    """Return True when the training thread waits and no queue `but` one can start a step; False after a minute."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        with queues._lock:
            progress = queues._progress
            ready = [
                queue
                for queue, (iteration, at) in queues._at.items()
                if iteration <= queues._limit(queue) and progress.ready(progress.order[queue][at], iteration)
            ]
            if Queue.COMPUTE in queues._waiting and not {*ready, *queues._busy} - {but}:
                return True
        time.sleep(0.002)
    return False


def byte_changes(session: executor.Session) -> tuple[Counter[tuple[Place, str, int]], ...]:
    """How often each (place, category, bytes) of model data changed since the session began, once it is drained: in its
    log, and as the simulator books the steps that it ran, in the order in which they began and ended."""
    plan, position = session.plan, {step.id: i for i, step in enumerate(session.plan.steps)}
    rows = [(row, position[row.step.id]) for row in session.steps.span_log]
    events = [(row.start_s, 2 * i) for row, i in rows] + [(row.end_s, 2 * i + 1) for row, i in rows]
    changes = Moves(plan).book([event for _, event in sorted(events)])
    cells = [(PLACES[cell // WIDTH], CATEGORIES[cell % WIDTH]) for cell in changes.cell.tolist()]
    booked = Counter((*cell, size) for cell, size in zip(cells, changes.size.tolist()) if cell[1] != NON_MODEL)
    logged = Counter((r.place, r.category, r.change) for r in session.arena.log.changes if r.category != NON_MODEL)
    loaded = [r for r in plan.initial if r.chunk >= 0]
    logged.subtract((r.place, category_of(r.list), plan.layout.payload_bytes(r.chunk, r.list)) for r in loaded)
    return +logged, booked


def names_within(events: Iterable[Any], mark: str) -> set[str]:
    """Names of the profiler's events on the host that began inside the `record_function` of that name. What ends a
    profile (torch waits for the device before it stops) is in it, too."""
    here = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    (within,) = (event.time_range for event in here if event.name == mark)
    return {event.name for event in here if within.start <= event.time_range.start <= within.end}


@pytest.fixture
def kit() -> Any:
    """The helpers of this file, for tests to call (test modules cannot import a conftest)."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def rows() -> Any:
    """semantics_rows.py, which benchmarks read by its path, too."""
    path = Path(__file__).parent / "semantics_rows.py"
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


PLANNED: dict[tuple[Any, ...], Plan] = {}
"""What `start` planned, by what it depends on; not with `optimal`, whose search some tests replace."""


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """start(name, policy, ...): a prepared model at a tight budget and its plain twin; sessions are closed at the
    end."""
    sessions: list[executor.Session] = []

    def begin(
        name: str,
        policy: str,
        *,
        checkpointing: bool = False,
        micro_batches: int = 1,
        update: str = "step",
        clip: float | None = None,
        dtype: torch.dtype = torch.float32,
        plan: Plan | None = None,
        layers: int = LAYERS,
        **options: Any,
    ) -> Run:
        model, draw = build(name, checkpointing=checkpointing, layers=layers)
        model.to(dtype)
        if dtype != torch.float32:
            plain_draw = draw

            def draw(generator: torch.Generator) -> Any:
                rows = plain_draw(generator)
                return {k: v.to(dtype) if v.is_floating_point() else v for k, v in rows.items()}

        twin = copy.deepcopy(model)
        if plan is None:
            row = (name, layers, checkpointing, dtype, micro_batches, policy, update, clip is not None)
            if row not in PLANNED or policy.startswith("optimal"):
                example = draw(torch.Generator().manual_seed(9))
                w = workload_of(model, example, micro_batches=micro_batches, name=name)
                PLANNED[row] = tight_plan(policy, w, Settings(update=update, clip=clip is not None))
            plan = PLANNED[row]
        spec = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=clip, eager=update == "eager")
        model, optimizer = executor.prepare(model, plan, spec, watchdog_s=5.0, **options)
        sessions.append(optimizer.session)
        return Run(model, optimizer, Reference(twin, 1e-2, 0.1, clip), plan, batches(draw))

    yield begin
    for session in sessions:
        session.close(restore=False)


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimal` streams the states of every second chunk."""

    def every_second(order: Sequence[int], *_: object) -> tuple[list[int], list[int]]:
        return [], list(order[::2])

    monkeypatch.setattr(importlib.import_module("pstar_sim.policy.family.search"), "interleave", every_second)
    monkeypatch.setattr(importlib.import_module("pstar_sim.policy.optimal"), "_others", lambda *_: [])
