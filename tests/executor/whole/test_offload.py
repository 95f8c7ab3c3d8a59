"""One line in a script that is there already: `executor.offload` for a loop, `executor.hf.offload` for a Trainer."""

from __future__ import annotations

import copy
import pickle
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import executor
from executor.capture import capture_module
from executor.describing import description_of
from executor.offloading import Refused, cuda_devices
from executor.session.spelling import TRAINER
from pstar_sim.catalog.here import this_machine
from pstar_sim.catalog.loader import load_catalog, load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CheckpointError, ContractError, DoesNotFit, ModelError, PstarError, UnknownName
from pstar_sim.units import MIB

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parents[1]))
import script_runs as scripts  # noqa: E402

sys.path.pop(0)

LOSS = 0.01  # bound of benchmarks/scripts.py, fixed before the first run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages that the scripts use
@pytest.mark.parametrize(
    ("name", "memory", "needs", "steps"),
    [
        ("trainer_bf16", "1.4MB", "transformers", 2),
        ("plain_loop", "950KB", "torch", 2),
        ("lightning_module", "1MB", "lightning", 2),
        ("trl_sft", "7.4MB", "trl", 1),
        ("trl_dpo_lora", "7MB", "trl", 1),
        ("trl_sft_qlora", "6.4MB", "bitsandbytes", 2),
    ],
)
def test_an_unchanged_script_is_the_written_out_reference_to_the_bit(
    name: str, memory: str, needs: str, steps: int, tmp_path: Path
) -> None:
    """Steps with autocast: losses and weights of plain torch with fp32 masters, while chunks come and go."""
    pytest.importorskip(needs)
    ours = scripts.offloaded(name, tmp_path, memory, "--steps", str(steps), policy="tide")
    reference = scripts.written_out(name, tmp_path, "--steps", str(steps))
    assert scripts.equal_to_the_bit(ours, reference)
    assert len(ours.losses) >= steps
    if name == "plain_loop":  # all five: benchmarks/results/scripts.json
        assert scripts.loss_distance(ours, scripts.own(name, tmp_path, "--steps", str(steps))) < LOSS
    session = ours.session
    assert session is not None and session.iteration == steps
    moved, adapters = session.status().links, name in ("trl_dpo_lora", "trl_sft_qlora")
    assert moved["h2d"].moved_bytes > 250_000 and (adapters or moved["d2h"].moved_bytes > 300_000)
    if name != "trl_sft":  # its second batch has another shape
        assert session.deviations == 0, list(session.deviation_log)


# -- a loop of one's own ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 48, generator=draw)


def steps(model: nn.Module, optimizer: Any, scheduler: Any, rows: Iterator[torch.Tensor], count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(next(rows))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adamw(model: Net) -> tuple[torch.optim.AdamW, Any]:
    groups = [
        {"params": [layer.weight for layer in model.layers], "lr": 3e-3, "weight_decay": 0.1},
        {"params": [layer.bias for layer in model.layers], "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-7, weight_decay=0.0, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_groups_states_and_a_scheduler_that_is_there_already_go_on() -> None:
    """Two plain steps, then offloaded: as if nothing had happened, with the scheduler made for the first optimizer."""
    one, other = net(), net()
    plain, plain_schedule = adamw(one)
    mine, schedule = adamw(other)
    rows, again = batches(), batches()
    losses = steps(one, plain, plain_schedule, rows, 5)
    before = steps(other, mine, schedule, again, 2)
    model, optimizer = executor.offload(other, mine, (torch.zeros(4, 48),), gpu_memory="40KB", policy="tide")
    try:
        assert model is other and optimizer.param_groups is mine.param_groups
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler warns where it hears of no step
            assert before + steps(model, optimizer, schedule, again, 3) == losses
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
        for (name, p), q in zip(one.named_parameters(), other.parameters()):
            assert torch.equal(p.detach(), q.detach().clone()), name
        assert optimizer.session.deviations == 0
        assert optimizer.session.status().links["h2d"].moved_bytes > 0
    finally:
        optimizer.session.close()


class Reading(Net):
    """Looks at values, as models of pictures and texts do that count the tokens of a picture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[: int((x[:, 0] < 9).sum())])


def test_states_live_in_a_folder_that_is_given(tmp_path: Path) -> None:
    one, other = net(), net()
    plain, plain_schedule = adamw(one)
    mine, schedule = adamw(other)
    model, optimizer = executor.offload(
        other, mine, (torch.zeros(4, 48),), policy="zero_infinity:states=nvme,subgroup=3000", disks=[tmp_path]
    )
    try:
        losses = steps(model, optimizer, schedule, batches(), 3)
        assert losses == steps(one, plain, plain_schedule, batches(), 3)
        assert all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), one.state_dict().values()))
        moved = optimizer.session.timeline().moved_bytes
        assert moved["nvme_write"] and [*tmp_path.glob("*.slots")]
    finally:
        optimizer.session.close()
    assert list(tmp_path.iterdir()) == []


def test_what_fake_tensors_cannot_run_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """4 layers of 9,408 B and their states are 150,528 B: chunks come and go in 60 kB."""
    one, other = Reading(), Reading()
    other.load_state_dict(one.state_dict())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    plain, plain_schedule = adamw(one)
    mine, schedule = adamw(other)
    expected = steps(one, plain, plain_schedule, batches(), 3)
    with pytest.raises(DoesNotFit):
        executor.offload(other, mine, next(batches()), gpu_memory="6KB")
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    caplog.clear()
    model, optimizer = executor.offload(other, mine, next(batches()), gpu_memory="60KB", policy="tide")
    (said,) = [r.message for r in caplog.records if "recorded" in r.message]
    assert said == (
        "Reading: module '<root>' (Reading) cannot run on fake tensors: aten._local_scalar_dense.default: its result "
        "depends on the values of tensors; an iteration is recorded instead, on virtual"
    )
    assert steps(model, optimizer, schedule, batches(), 3) == expected
    assert optimizer.session.deviations == 0 and not optimizer.session.status().tide.above  # type: ignore[union-attr]


def test_what_runs_on_no_tensors_is_refused_with_both_reasons() -> None:
    model = Net()
    with pytest.raises(ModelError, match=r"cannot run on fake tensors: .*recorded on virtual ended with RuntimeError"):
        executor.offload(model, adamw(model)[0], torch.zeros(4, 47), gpu_memory="60KB")


def test_batches_may_be_slices_of_a_data_set_that_is_larger_than_the_gpu() -> None:
    """Neither the plan nor the first iteration's count takes the data set for memory of the GPU."""
    data = torch.randn(400, 48, generator=torch.Generator().manual_seed(1))
    model = net()
    model, optimizer = executor.offload(
        model, adamw(model)[0], (data[:4],), gpu_memory="40KB", micro_batches=2, policy="tide"
    )
    try:
        for step in range(2):
            for number in (2 * step, 2 * step + 1):
                (model(data[4 * number : 4 * number + 4]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        status = optimizer.session.status()
        assert data.nbytes > 40_000 > status.gpu_peak_bytes and status.deviations == 0
        assert status.tide is not None and status.tide.above == 0
    finally:
        optimizer.session.close()


def test_a_loop_scales_its_loss_where_gradients_of_fp16_outputs_are_small() -> None:
    """Output gradients of 4e-8 are zero or 6e-8 in fp16; multiplied before they are rounded they are exact."""

    class Forwards(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def summed(module: nn.Module, batch: Any) -> torch.Tensor:
        return module(batch[0].half()).float().sum() * 4e-8

    batch = (torch.randn(4, 48, generator=torch.Generator().manual_seed(1)),)
    norms = []
    for scaled in (True, False):
        torch.manual_seed(0)
        model = Forwards()
        exact = torch.linalg.vector_norm(
            torch.stack([g.norm() for g in torch.autograd.grad(model(batch[0]).sum() * 4e-8, list(model.parameters()))])
        )
        _, optimizer = executor.offload(
            model, torch.optim.AdamW(model.parameters()), batch, gpu_memory="64KB", dtype="fp16", loss=summed,
            policy="tide", max_grad_norm=1.0,
        )  # fmt: skip
        try:
            if scaled:
                with optimizer.session.scaled(summed(model, batch)) as value:
                    value.backward()
            else:
                summed(model, batch).backward()
            optimizer.step()
            assert optimizer.session.grad_norm is not None and optimizer.session.skipped_steps == 0
            norms.append(float(optimizer.session.grad_norm) / float(exact))
        finally:
            optimizer.session.close()
    assert norms[0] == pytest.approx(1, rel=0.01) and norms[1] == pytest.approx(1.5, rel=0.05)  # 6e-8 for 4e-8


def test_masters_begin_as_the_values_that_were_there() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer, _ = adamw(model)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return module(batch[0].to(torch.bfloat16)).float()

    _, offloaded = executor.offload(
        model, optimizer, (torch.zeros(4, 48),), gpu_memory="64KB", dtype="bf16", loss=loss, policy="tide"
    )
    try:
        session = offloaded.session
        for tensor, row in enumerate(session.plan.workload.tensors):
            assert torch.equal(session.reader.state_value(tensor, "param32"), before[row.name]), row.name
            assert torch.equal(session.reader.value_now(tensor), before[row.name].bfloat16()), row.name
    finally:
        session.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda ps: torch.optim.Adadelta(ps), r"torch\.optim\.adadelta\.Adadelta.*AdamW, Adam and SGD"),
        (lambda ps: torch.optim.NAdam(ps), r"torch\.optim\.nadam\.NAdam"),
        (lambda ps: torch.optim.Adafactor(ps), r"Adafactor; a plan's updates are .* of transformers' Adafactor"),
        (lambda ps: torch.optim.SGD(ps, maximize=True), "maximize=True"),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), "amsgrad=True"),
    ],
)
def test_an_update_that_no_plan_has_is_refused_by_name(make: Callable[..., Any], words: str) -> None:
    model = net()
    with pytest.raises(ContractError, match=words):
        description_of(model, make(model.parameters()), max_grad_norm=None)


def test_an_optimizer_that_accelerate_wraps_is_refused_with_the_way_it_works() -> None:
    """Its data loader, its backward, and its word for when to step, around a loop by a plan."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # of trainers in this process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rows = torch.randn(8, 48, generator=torch.Generator().manual_seed(1))

    def train(model: nn.Module, optimizer: Any, loader: Any, mine: bool) -> list[float]:
        losses = []
        for x in loader:
            with accelerator.accumulate(model):
                loss = model(x)
                accelerator.backward(loss)
                if accelerator.sync_gradients and not mine:
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)
                if accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses

    def loader() -> Any:
        return torch.utils.data.DataLoader(rows, batch_size=2)

    theirs = net()
    wrapped = accelerator.prepare(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), loader())
    with pytest.raises(ContractError, match=r"accelerate's wrapper of AdamW; .*accelerator.prepare\(loader\)"):
        executor.offload(theirs, wrapped[1], (torch.zeros(2, 48),), gpu_memory="40KB", policy="tide")
    plain = train(*wrapped, mine=False)
    model = net()
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = executor.offload(
        model, own, (torch.zeros(2, 48),), gpu_memory="40KB", policy="tide", micro_batches=2, max_grad_norm=0.01
    )
    try:
        assert train(model, optimizer, accelerator.prepare(loader()), mine=True) == pytest.approx(plain, rel=1e-6)
        assert optimizer.session.deviations == 0
    finally:
        optimizer.session.close()


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """An Accelerator for two micro-batches per step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of trainers in this process
    GradientState._reset_state()
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    GradientState._reset_state()


def accumulate(accelerator: Any, model: nn.Module, optimizer: Any) -> list[float]:
    """accelerate's documented loop over 5 micro-batches: the wrapped optimizer steps after the 2nd, 4th and 5th."""
    rows = torch.randn(10, 48, generator=torch.Generator().manual_seed(1))
    losses = []
    for x in accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=2)):
        with accelerator.accumulate(model):
            loss = model(x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def offloaded_net(micro_batches: int) -> tuple[nn.Module, Any]:
    model = net()
    return executor.offload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), (torch.zeros(2, 48),), gpu_memory="40KB",
        policy="tide", micro_batches=micro_batches,
    )  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_that_accelerate_would_skip_is_refused(accelerator: Any, micro_batches: int) -> None:
    """Plain torch's optimizer would step five times, accelerate's three times."""
    model, optimizer = offloaded_net(micro_batches)
    before = copy.deepcopy(model.state_dict())
    try:
        with pytest.raises(ContractError, match=r"sync_gradients is False.*accelerator\.prepare\(optimizer\)"):
            accumulate(accelerator, model, optimizer)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    finally:
        optimizer.session.close()


def test_accelerate_steps_an_offloaded_optimizer_that_it_wraps(
    accelerator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The last window of the epoch has one micro-batch of two: counted, and nothing is said."""
    plain = net()
    theirs = accelerator.prepare(torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    losses = accumulate(accelerator, plain, theirs)
    model, optimizer = offloaded_net(2)
    try:
        assert accumulate(accelerator, model, accelerator.prepare(optimizer)) == pytest.approx(losses, rel=1e-6)
        assert optimizer.session.iteration == 3 and optimizer.session.deviations == 1
        assert not caplog.records
    finally:
        optimizer.session.close()


def test_a_window_of_accelerate_that_was_left_open_says_nothing_of_a_later_loop(accelerator: Any) -> None:
    with accelerator.accumulate(net()):
        pass  # Ctrl-C here, in a notebook
    assert not accelerator.sync_gradients
    model, optimizer = offloaded_net(1)
    try:
        model(torch.ones(2, 48)).backward()
        optimizer.step()
        assert optimizer.session.iteration == 1
    finally:
        optimizer.session.close()


def test_messages_name_the_settings_as_the_program_does(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that steps after each of two planned micro-batches hears of it once, with offload's own argument."""
    model, optimizer = offloaded_net(2)
    try:
        for _ in range(3):
            model(torch.ones(2, 48)).backward()
            optimizer.step()
            optimizer.zero_grad()
        (said,) = [record.message for record in caplog.records if "backwards" in record.message]
        assert said == (
            "optimizer.step() after 1 of the 2 backwards that the plan was made for: the step is taken; if the loop "
            "accumulates gradients, call step() and zero_grad() after backward 2, else make the plan for 1 "
            "(executor.offload(micro_batches=))"
        )
        loss = model(torch.ones(2, 48))
        loss.backward(retain_graph=True)
        with pytest.raises(ContractError, match=r"accumulates \(executor\.offload\(micro_batches=\)\)"):
            loss.backward()
    finally:
        optimizer.session.close()


@pytest.mark.parametrize(("counts", "warned"), [("22122", 0), ("2212122", 0), ("2211", 1), ("221122111", 1), ("11", 1)])
def test_two_short_steps_in_a_row_are_not_the_end_of_an_epoch(
    counts: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The backwards of each step, where two are planned."""
    model, optimizer = offloaded_net(2)
    try:
        for count in map(int, counts):
            for _ in range(count):
                model(torch.ones(2, 48)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len([record for record in caplog.records if "optimizer.step() after 1" in record.message]) == warned
    finally:
        optimizer.session.close()


def test_a_hook_that_several_micro_batches_refuse_is_told_why() -> None:
    def run(micro_batches: int, register: Callable[[nn.Parameter], object]) -> None:
        model = net()
        for parameter in model.parameters():
            register(parameter)
        model, optimizer = executor.offload(
            model, torch.optim.AdamW(model.parameters(), fused=True), (torch.zeros(2, 48),), gpu_memory="40KB",
            policy="tide", micro_batches=micro_batches,
        )  # fmt: skip
        try:
            for _ in range(micro_batches):
                model(torch.ones(2, 48)).backward()
            optimizer.step()
        finally:
            optimizer.session.close()

    def halved_in_place(p: nn.Parameter) -> object:
        return p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])

    with pytest.raises(
        ContractError, match=r"use p\.register_hook, or make the plan for one micro-batch: with several,"
    ):
        run(2, halved_in_place)
    run(1, halved_in_place)  # what would do, does
    run(2, lambda p: p.register_hook(lambda g: 0.5 * g))


class Turning(nn.Module):
    """Two layers; `turned` decides which runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.turned = nn.Linear(48, 48), nn.Linear(48, 48), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.second, self.first) if self.turned else (self.first, self.second)
        return layers[1](torch.tanh(layers[0](x))).square().mean()


@pytest.mark.parametrize("source", ["recorded", "captured", "Trainer"])
def test_a_plan_that_is_never_followed_is_named_with_what_would_do(
    kit: Any, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, machine, x = Turning(), kit.small_machine(40_000), torch.ones(2, 48)
    if source == "recorded":
        workload = executor.record(model, [x], machine, name="turning", timed=0)
    else:
        workload = capture_module(model, x)
    model, optimizer = executor.prepare(model, kit.tight_plan("tide", workload, Settings(clip=False)), executor.AdamW())
    if source == "Trainer":
        optimizer.session.state.spelling = TRAINER
    model.turned = True
    for _ in range(3):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.session.close(restore=False)
    (said,) = [record.message for record in caplog.records if "followed the plan" in record.message]
    assert said.endswith(
        {
            "recorded": "record one with the loop's own batches, loss and settings of the model",
            "captured": "record an iteration of this loop (executor.record), make the plan from it, and run it with "
            "executor.prepare()",
            "Trainer": "run it with executor.prepare and executor.hf.connect",
        }[source]
    )


def test_an_optimizer_of_other_parameters_too_is_refused() -> None:
    model, temperature = net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [temperature]}])
    with pytest.raises(
        ContractError, match=r"param_groups\[1\] has a parameter \(shape \(3,\)\) that is not the model"
    ):
        executor.offload(model, optimizer, (torch.zeros(4, 48),), policy="tide")


def test_gpu_memory_caps_a_machine_that_is_given_too() -> None:
    """As a value, by name, or as it is found here: the virtual accelerator of 1 GB is planned for as one of 40 kB."""
    budgets = []
    for machine in (load_machine("virtual"), "virtual", "here"):
        model = net()
        _, optimizer = executor.offload(
            model, adamw(model)[0], (torch.zeros(4, 48),), gpu_memory="40KB", policy="tide", machine=machine,
            device="virtual", on_plan=lambda plan: budgets.append(plan.gpu_budget_bytes),
        )  # fmt: skip
        optimizer.session.close()
    assert budgets == [40_000] * 3


def test_devices_of_torch_in_the_words_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=40960 * MIB + 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    here = this_machine(load_catalog(), gpus=cuda_devices)
    assert [(rank.gpu.name, rank.gpu.usable_bytes) for rank in here.ranks] == [("a100-40", 40960 * MIB)] * 2
    assert here.link.name == "pcie4-x16"


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"gpu_memory": "6KB"}, DoesNotFit, "gpu needs"),
        ({"gpu_memory": 6_000}, DoesNotFit, "but has 6 kB,"),
        ({"gpu_memory": "a lot"}, PstarError, "a lot"),
        ({"machine": "nowhere"}, UnknownName, "nowhere"),
        ({"dtype": "bfloat16"}, ContractError, "dtype 'bfloat16' is not known; .*bf16"),
        ({"micro_batches": 0}, ContractError, "micro_batches=0"),
    ],
)
def test_what_cannot_be_planned_leaves_the_model_as_it_was(
    more: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=words):
        executor.offload(
            model, adamw(model)[0], (torch.zeros(4, 48),), policy="tide", loss=lambda m, b: m(b[0].bfloat16()),
            **{"dtype": "bf16", **more},
        )  # fmt: skip
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[name])


# -- a Trainer --------------------------------------------------------------------------------------------------------


def gpt() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=96, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False
    )  # dropout stays on: the random numbers are the plain run's
    return transformers.GPT2LMHeadModel(config)


def texts(count: int = 16, length: int = 12) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(96, (length,), generator=draw) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    def make(kind: Any = None, **arguments: Any) -> Any:
        wanted = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": 2, "max_steps": 2, "use_cpu": True,
            "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
        }  # fmt: skip
        args = transformers.TrainingArguments(**{**wanted, **arguments})
        return (kind or transformers.Trainer)(model=gpt(), args=args, train_dataset=texts(), eval_dataset=texts(4))

    return make


def offloaded(trainer: Any, gpu_memory: str = "290KB") -> Any:
    return executor.hf.offload(trainer, gpu_memory, policy="tide")


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_trainer_in_fp32_is_the_plain_one(trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Clipping, accumulation, dropout, the last step of an epoch with one micro-batch, evaluation, saving."""
    shared = {"gradient_accumulation_steps": 3, "optim": "adamw_torch_fused", "max_steps": -1, "num_train_epochs": 1,
              "max_grad_norm": 0.5}  # fmt: skip
    torch.manual_seed(3)
    plain = trainer(**shared)
    plain.train()
    torch.manual_seed(3)
    mine = offloaded(trainer(**shared))
    assert isinstance(mine, transformers.Trainer)
    mine.train()
    assert losses_of(mine) == pytest.approx(losses_of(plain), rel=1e-6) and len(losses_of(mine)) == 3
    named = dict(mine.model.named_parameters())
    for name, p in plain.model.named_parameters():
        assert torch.allclose(named[name].detach().clone(), p.detach(), rtol=1e-4, atol=1e-6), name
    session = mine.offload_session
    assert session.deviations == 1 and "step" in session.deviation_log[0]  # the epoch's last step has two micro-batches
    assert mine.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    mine.save_model(str(tmp_path / "saved"))
    again = transformers.GPT2LMHeadModel.from_pretrained(str(tmp_path / "saved"))
    assert all(torch.equal(p.detach(), named[name].detach().clone()) for name, p in again.named_parameters())


def test_a_run_goes_on_from_its_own_checkpoint_and_from_a_plain_one(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """Four steps with bf16 and dropout; from the checkpoint after two steps the same values, masters and states."""
    shared = {"bf16": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = offloaded(trainer(**shared))
    whole.train()
    again = offloaded(trainer(**shared))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses_of(again) == losses_of(whole)
    ours, theirs = (t.offload_session.optimizer().state_dict()["state"] for t in (again, whole))
    assert len(ours) == len(theirs) > 0
    for number, row in theirs.items():
        assert all(torch.equal(ours[number][key], value) for key, value in row.items())
        assert set(row) == {"step", "exp_avg", "exp_avg_sq", "param32"}

    plain = trainer(max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path / "plain"))
    plain.train()
    from_plain = offloaded(trainer(max_steps=4))
    from_plain.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert losses_of(from_plain) == pytest.approx(losses_of(plain), rel=1e-6)
    with pytest.raises(CheckpointError, match="has no whole folder 'pstar'"):
        from_plain.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    (tmp_path / "checkpoint-2" / "pstar" / "pstar.json").unlink()  # written last: a copy that broke off
    with pytest.raises(CheckpointError, match="has no whole folder 'pstar'"):
        offloaded(trainer(**shared)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "LoRA"])
def test_a_plain_trainer_goes_on_from_a_checkpoint_under_a_plan(
    trainer: Callable[..., Any], tmp_path: Path, adapter: bool
) -> None:
    """With the moments, the step counts and the schedule: the losses, norms and values of a run that was never under a
    plan. Tied weights, groups with and without decay, clipping."""
    shared = {"max_steps": 6, "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5,
              "weight_decay": 0.1, "optim": "adamw_torch_fused"}  # fmt: skip

    def adapted(model: Any, **more: Any) -> Any:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True)
        return transformers.Trainer(model=peft.get_peft_model(model, config), **more)

    def made(**arguments: Any) -> Any:
        return trainer(adapted if adapter else None, **shared, **arguments)

    plain = made()
    plain.train()
    offloaded(made(save_strategy="steps", save_steps=3)).train()
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").is_file()
    resumed = made(output_dir=str(tmp_path / "again"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for key in ("loss", "grad_norm"):
        rows = [[row[key] for row in run.state.log_history if key in row] for run in (plain, resumed)]
        assert rows[1] == pytest.approx(rows[0], rel=1e-5) and len(rows[0]) == 6
    for (name, p), q in zip(plain.model.named_parameters(), resumed.model.parameters()):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6), name


def test_a_checkpoint_without_states_is_said(
    trainer: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True).train()
    with caplog.at_level("WARNING", logger="executor"):
        offloaded(trainer(max_steps=2)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "checkpoint-1 has no optimizer.pt and no scheduler.pt: moments and learning rate begin anew" in caplog.text


def test_the_best_checkpoint_comes_back_at_the_end(trainer: Callable[..., Any]) -> None:
    """The loss falls, and the highest counts as the best: that of the first step."""
    mine = offloaded(
        trainer(
            max_steps=3,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            learning_rate=1e-2,
            load_best_model_at_end=True,
            greater_is_better=True,
        )
    )
    mine.train()
    best = mine.state.best_model_checkpoint
    assert best is not None and best.endswith("checkpoint-1")
    kept = transformers.GPT2LMHeadModel.from_pretrained(best)
    for (name, p), q in zip(kept.named_parameters(), mine.model.parameters()):
        assert torch.equal(p.detach(), q.detach().clone()), name


def test_a_reference_model_is_planned_for(trainer: Callable[..., Any]) -> None:
    """A loss that compares with a frozen model of 118,272 B: refused before its first step, or run within its plan. The
    capture leaves no number in the trainer's metrics."""

    class Referring(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits
            with torch.no_grad():
                reference = self.reference(input_ids=inputs["input_ids"]).logits
            self.metrics["rows"].append(len(reference))
            loss = ((logits - reference) ** 2).mean()
            self.metrics["loss"].append(loss.item())
            return (loss, {"logits": logits}) if return_outputs else loss

    def make() -> Any:
        made = trainer(Referring)
        made.reference, made.metrics = gpt().eval(), {"rows": [], "loss": []}
        return made

    refused = make()
    with pytest.raises(DoesNotFit, match="beside the model, on the GPU throughout: GPT2LMHeadModel"):
        offloaded(refused).train()
    assert refused.metrics == {"rows": [], "loss": []}
    torch.manual_seed(3)
    plain = make()
    plain.train()
    torch.manual_seed(3)
    mine = offloaded(make(), "500KB")
    mine.train()
    assert mine.metrics == plain.metrics and len(plain.metrics["loss"]) == 2
    status = mine.offload_session.status()
    assert status.deviations == 0 and not status.tide.above
    assert status.gpu_peak_bytes <= 500_000


def test_a_trainers_model_that_fake_tensors_cannot_run_is_recorded(trainer: Callable[..., Any]) -> None:
    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        output.sum().item()

    made = trainer()
    made.model.transformer.ln_f.register_forward_hook(look)
    offloaded(made).train()
    assert made.offload_session.plan.workload.source == "recorded" and made.offload_session.deviations == 0


def test_a_class_of_trainers_has_the_mixin(trainer: Callable[..., Any]) -> None:
    """A loss of its own, which reads numbers: it is captured up to there; checkpointing with it. Rows with
    pictures and texts; an optimizer that is not returned."""

    class Theirs(transformers.Trainer):
        seen: list[float] = []

        def create_optimizer(self, *_: Any) -> None:
            self.optimizer = torch.optim.AdamW(self.model.parameters())

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
            self.seen.append(loss.item())
            return (loss, {"logits": logits}) if return_outputs else loss

    class Mine(executor.hf.OffloadTrainerMixin, Theirs):
        offload_request = executor.offloading.Request(gpu_memory="290KB", policy="tide")

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 5.23 has another word for it
        mine = trainer(Mine, gradient_checkpointing=True, remove_unused_columns=False)
    mine.train_dataset = [{**row, "picture": Image.new("L", (3, 2)), "text": "a word"} for row in mine.train_dataset]
    mine.data_collator = collate
    with pytest.raises(ContractError, match="before train"):
        _ = mine.offload_session
    mine.train()
    session = mine.offload_session
    assert session.plan.workload.checkpointing and session.iteration == 2 and len(Mine.seen) == 2
    assert session.deviations == 0, list(session.deviation_log)


@pytest.mark.parametrize("act", ["merge", "fill", "load", "half", "deepcopy"])
def test_after_training_the_weights_are_the_scripts_own(trainer: Callable[..., Any], act: str) -> None:
    """What a prepared model refuses ends the run first, with the trained values; another training plans anew."""
    mine = offloaded(trainer(max_steps=1))
    mine.train()
    model, session = mine.model, mine.offload_session
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine.evaluate()
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not session.closed
    if act == "merge":
        weight = model.get_parameter(name)
        weight.data += 1
        weight.data[3:] *= 2
        before[name] += 1
        before[name][3:] *= 2
    elif act == "fill":
        with torch.no_grad():
            model.get_parameter(name).fill_(0.25)
        before[name].fill_(0.25)
    elif act == "load":
        before = {key: torch.ones_like(value) for key, value in before.items()}
        model.load_state_dict(before)
    elif act == "half":
        model.half()
        before = {key: value.half() for key, value in before.items()}
    else:
        model = copy.deepcopy(model)
    assert session.closed
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    if act == "merge":
        mine.train()
        assert not mine.offload_session.closed and mine.offload_session.iteration == 1


def test_a_batch_that_fits_is_found(trainer: Callable[..., Any]) -> None:
    mine = offloaded(trainer(per_device_train_batch_size=3, auto_find_batch_size=True, max_steps=1), gpu_memory="290KB")
    mine.train()
    assert 1 <= mine._train_batch_size < 3
    assert mine.offload_session.plan.workload.batch == mine._train_batch_size


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's compiler
@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"),
    reason="plain torch 2.6 does not run a compiled GPT-2 of transformers 5",
)
def test_a_compiled_trainer_trains_by_the_plan(trainer: Callable[..., Any]) -> None:
    """The first step is counted, and runs as the model is written. Then the blocks between hooks are compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    mine = offloaded(trainer(torch_compile=True, torch_compile_backend="eager", max_steps=3))
    torch.manual_seed(3)
    mine.train()
    assert counters["frames"]["ok"] > 5 and counters["stats"]["unique_graphs"] > 5
    plain = trainer(max_steps=3)  # its arguments replace accelerate's state, which says whether to compile
    torch.manual_seed(3)
    plain.train()
    assert isinstance(mine.model_wrapped, torch._dynamo.eval_frame.OptimizedModule)
    assert losses_of(mine) == pytest.approx(losses_of(plain), rel=1e-5)
    assert mine.offload_session.deviations == 0, list(mine.offload_session.deviation_log)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fp16_is_the_written_out_reference_through_an_overflow_and_a_resume(
    smoothing: float, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """Four steps with clipping and accumulation, of which the third overflows: the scale halves, nothing is updated. A
    run that begins at the checkpoint behind it has the same scale, losses and masters. With label smoothing the loss is
    computed outside the model: the gradients of its fp16 logits are small."""
    scale = [2.0**16]

    class Overflowing(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **more)
            return loss * 1e30 if self.state.global_step == 2 else loss

    class Scaled(scripts.WrittenOut):
        def step(self, closure: Any = None) -> Any:
            if any(not bool(p.grad.isfinite().all()) for p in self.working):
                scale[0] /= 2
                self.zero_grad()
                return
            for p in self.working:
                p.grad /= scale[0]
            super().step(closure)

    class Reference(Overflowing):
        def create_optimizer(self, *_: Any) -> Any:
            own = super().create_optimizer()
            self.optimizer = Scaled(self.model, own, torch.float16, self.args.max_grad_norm)
            self.accelerator.backward = lambda loss: (loss * scale[0]).backward()
            self.accelerator.clip_grad_norm_ = lambda *_: None  # its step clips
            return self.optimizer

    shared = {"fp16": True, "max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
              "label_smoothing_factor": smoothing}  # fmt: skip
    reference = trainer(Reference, **shared)
    reference.train()
    mine = offloaded(trainer(Overflowing, **shared, save_strategy="steps", save_steps=3), "330KB")
    mine.train()
    session = mine.offload_session
    assert session.plan.workload.dtype == "fp16" and session.status().links["h2d"].moved_bytes > 0
    assert (session.loss_scale, session.skipped_steps) == (scale[0], 1) and scale[0] == 2.0**15
    assert losses_of(mine) == losses_of(reference) and len(losses_of(mine)) == 4
    trained = dict(mine.model.named_parameters())
    for name, p in reference.model.named_parameters():
        assert torch.equal(p.detach(), trained[name].detach().clone()), name
    again = offloaded(trainer(Overflowing, **shared), "330KB")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.offload_session.loss_scale == scale[0] and losses_of(again) == losses_of(mine)
    for name, p in again.model.named_parameters():
        assert torch.equal(p.detach().clone(), trained[name].detach().clone()), name


def test_what_is_not_a_trainer_or_not_alone_is_refused(trainer: Callable[..., Any]) -> None:
    with pytest.raises(ContractError, match=r"Linear is not a transformers.Trainer; .*executor\.offload"):
        executor.hf.offload(nn.Linear(1, 1))
    mine = offloaded(trainer(optim="adagrad"))
    with pytest.raises(ContractError, match="Adagrad"):
        mine.train()
    for more, words in (
        ({"load_best_model_at_end": True, "save_only_model": True, "eval_strategy": "steps", "save_strategy": "steps"},
         "leave save_only_model out"),
        ({"bf16_full_eval": True}, r"TrainingArguments\(bf16_full_eval=True\)"),
    ):  # fmt: skip
        with pytest.raises(ContractError, match=words):
            offloaded(trainer(**more)).train()
    mine = offloaded(trainer())
    mine.is_deepspeed_enabled = True
    with pytest.raises(ContractError, match="runs under DeepSpeed"):
        mine.create_optimizer()


def test_the_plugin_of_axolotl_offloads_the_trainer_that_is_made(trainer: Callable[..., Any]) -> None:
    """By axolotl's calls: the keys of the configuration, then the trainer when it is there."""
    from executor.axolotl import OffloadPlugin

    plugin = OffloadPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    defaults = getattr(sys.modules[module], name)()
    keys = {key: getattr(defaults, key) for key in ("offload_device", "offload_machine")}
    made = trainer(max_steps=1)
    assert plugin.get_trainer_cls(None) is None and plugin.create_optimizer(None, made) is None
    cfg = SimpleNamespace(**keys, offload_gpu_memory="290KB", offload_policy="tide")
    plugin.post_trainer_create(cfg, made)
    made.train()
    assert made.offload_session.plan.policy == "tide" and made.offload_session.iteration == 1


def test_an_error_of_planning_reaches_other_processes_as_it_is() -> None:
    error = DoesNotFit(policy="tide", place="gpu", needed_bytes=2, available_bytes=1, what="all")
    sent = pickle.loads(pickle.dumps(Refused(type(error), error.args, dict(error.__dict__))))
    again = sent.error()
    assert isinstance(again, DoesNotFit) and str(again) == str(error) and again.short_bytes == 1


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_generates_within_its_step_is_refused(tmp_path: Path) -> None:
    """GRPO would train on what it generated for the capture."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_steps=1, use_cpu=True,
        report_to=[], bf16=False,
    )  # fmt: skip
    grpo = trl.GRPOTrainer(
        model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=512)), args=args,
        processing_class=runpy.run_path(str(scripts.SCRIPTS / "words.py"))["tokenizer"](),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w3 w4", "w5 w6"]}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )  # fmt: skip
    with pytest.raises(ContractError, match=r"^GRPOTrainer generates within its steps"):
        executor.hf.offload(grpo, "2MB", policy="tide").train()
    assert "generate" not in vars(grpo.model)


@pytest.mark.parametrize(
    ("masters", "dtype", "said"), [(None, None, 1), ("fp32", None, 0), ("none", None, 0), (None, "bf16", 0)]
)
def test_masters_that_nobody_asked_for_are_said(
    masters: str | None, dtype: str | None, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a model in bf16. One that the call itself converts keeps its fp32 values as masters."""
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 1)).to(torch.float32 if dtype else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(2, 48, dtype=torch.bfloat16)
    _, offloaded = executor.offload(
        model, optimizer, (batch,), gpu_memory="1MB", masters=masters, dtype=dtype, loss=lambda m, b: m(*b).mean()
    )
    offloaded.session.close()
    assert sum("to which the plan adds fp32 masters" in record.message for record in caplog.records) == said
