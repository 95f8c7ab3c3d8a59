"""Main-thread CPU per event of the module tree: the cost of the executor's Python beside plain PyTorch.

A module tree of the shape of Llama 2 7B (32 layers of seven linears and two norms) has tensors so small that operators
cost next to nothing: 878 events per step. It runs under the plans of `all_on_gpu` and `tide` and in plain PyTorch
(`torch.optim.AdamW(fused=True)`), step by step in turns, in one process. The figure is `time.thread_time` of the
training thread, which counts neither waits nor the threads of the side queues, per event: (ours - plain) / events, of
the medians. The goal is at most 25 microseconds for `all_on_gpu`.

`--profile NAME` prints where the training thread of policy NAME spends a step.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

import torch
from _results import write_result
from torch import nn

from executor import AdamW, prepare
from executor.capture import capture_module
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.policy.registry import find_policy

ROUNDS = 31
WARM_UP = 4
LAYERS = 32
WIDTH = 8
TOKENS = 4
VOCABULARY = 16
EVENTS = 878
GOAL_US = 25
CHUNK_BYTES = 2048
MEMORY = {"all_on_gpu": "1MB", "tide": "64KB"}
"""Policy -> memory of the accelerator; for `tide` less than the model data."""
BATCH = torch.arange(TOKENS).remainder(VOCABULARY).reshape(1, TOKENS)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Layer(nn.Module):
    """The nine modules of a Llama layer that own a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            linear = nn.Linear(WIDTH, WIDTH, bias=False)
            nn.init.normal_(linear.weight, std=0.1)
            self.add_module(name, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.o(self.q(y) + self.k(y) + self.v(y))
        y = self.norm2(x)
        return x + self.down(self.gate(y) * self.up(y))


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float().logsumexp(-1).mean()


def tree() -> Tree:
    torch.manual_seed(0)
    return Tree()


class Runner:
    """One of the models under comparison.

    policy: None for plain PyTorch.
    cpu_s: CPU seconds of the training thread, by step.
    """

    def __init__(self, policy: str | None) -> None:
        self.model: nn.Module = tree()
        self.optimizer: torch.optim.Optimizer
        self.cpu_s: list[float] = []
        self.losses: list[float] = []
        if policy is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
            return
        workload = capture_module(self.model, BATCH, name="tree", loss=lambda model, batch: model(batch))
        machine = load_machine("virtual", gpu_memory=MEMORY[policy])
        settings = Settings(update="step", clip=False, chunk_bytes=CHUNK_BYTES)
        self.plan = find_policy(policy)(workload, machine, settings)
        self.model, self.optimizer = prepare(self.model, self.plan, AdamW(lr=1e-3))

    def step(self) -> None:
        begun_s = time.thread_time()
        loss = self.model(BATCH)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cpu_s.append(time.thread_time() - begun_s)
        self.losses.append(float(loss.detach()))

    @property
    def median_s(self) -> float:
        return statistics.median(self.cpu_s[WARM_UP:])


def profile(runner: Runner, steps: int) -> None:
    for _ in range(WARM_UP):
        runner.step()
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(steps):
        runner.step()
    profiler.disable()
    print(f"{steps} steps of {EVENTS} events")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=list(MEMORY))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    if chosen.profile:
        torch.set_num_threads(1)
        profile(Runner(chosen.profile), chosen.rounds)
        return
    plain = Runner(None)
    ours = {policy: Runner(policy) for policy in MEMORY}
    torch.set_num_threads(1)
    runners = [plain, *ours.values()]
    for turn in range(WARM_UP + chosen.rounds):
        for runner in runners if turn % 2 else reversed(runners):
            runner.step()
    figures: dict[str, float | int] = {"events": EVENTS, "rounds": chosen.rounds, "plain_s": plain.median_s}
    print(f"plain PyTorch: {plain.median_s * 1e3:.1f} ms of the training thread per step of {EVENTS} events")
    for policy, runner in ours.items():
        pairs = [(a - b) / EVENTS * 1e6 for a, b in zip(runner.cpu_s[WARM_UP:], plain.cpu_s[WARM_UP:])]
        per_event_us = statistics.median(pairs)
        figures |= {f"{policy}_s": runner.median_s, f"{policy}_us_per_event": per_event_us}
        equal = runner.losses == plain.losses
        print(f"{policy}: {runner.median_s * 1e3:.1f} ms; {per_event_us:.1f} us per event; losses equal: {equal}")
        session = runner.optimizer.session
        assert session.deviations == 0
        session.close(restore=False)
    met = figures["all_on_gpu_us_per_event"] <= GOAL_US
    print(f"goal at most {GOAL_US} us per event for all_on_gpu: {'met' if met else 'missed'}")
    write_result("event_cost", figures)


if __name__ == "__main__":
    main()
