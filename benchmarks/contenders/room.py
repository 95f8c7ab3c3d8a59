"""Bytes per parameter, and the largest model for which they leave room.

[Note: arithmetic] Model data in bytes per parameter, where w is the working dtype's width (fp32 4, bf16 2):

| contender         | on the GPU              | on the host                                        |
|-------------------|-------------------------|----------------------------------------------------|
| plain, fp32       | 4 + 4 + 8               | - (param, gradient, moments)                       |
| plain, bf16       | 2 + 2 + 4 + 4 + 8       | - (besides: master and its gradient in fp32)       |
| ZeRO-2 offload    | w (gradients leave)     | 4 + 8 + 4 (master, moments, fp32 gradient)         |
| ZeRO-3 offload    | gathered parameters     | w + 4 + 8 + 4 (param, then the same)               |
| FSDP2 CPU offload | gathered parameters     | 4 + 4 + 8 (fp32 param, its gradient, moments)      |
| ours              | by the plan             | by the plan: w + 12, or that on the GPU instead    |

On a CPU the "GPU" is host memory too, so both columns add up. Pinned memory that torch rounds up to a power of two,
buckets and gathered parameters come on top: the measured column has them, the arithmetic does not. So the arithmetic
can show that a contender does not fit; only a run can show that it fits.
"""

from __future__ import annotations

from collections.abc import Callable

from contenders.task import Task

__all__ = ["bytes_per_param", "largest_by_trial", "least_host_bytes", "model_bytes_per_param"]

BASE_BYTES = 400 << 20
"""Interpreter, torch and the code of a model: 430 to 460 MB were measured."""
MOST_TIMES = 4
_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


def bytes_per_param(task: Task) -> dict[str, int] | None:
    """Returns {"gpu", "host"} of the note's table; None for ours, whose plan decides."""
    w = _WIDTH[task.dtype]
    master = 0 if task.dtype == "fp32" else 8  # the parameter and its gradient
    table = {
        "plain": {"gpu": 2 * w + 8 + master, "host": 0},
        "zero2": {"gpu": w, "host": 16},
        "zero3": {"gpu": 0, "host": w + 16},
        "zero3_twinflow": {"gpu": 0, "host": w + 16},
        "fsdp2": {"gpu": 0, "host": 16},
    }
    return table.get(task.contender)


def model_bytes_per_param(dtype: str) -> int:
    """Returns the bytes per parameter of our model data in all places: the note's w + 12."""
    return _WIDTH[dtype] + 12


def least_host_bytes(task: Task, params: int) -> int:
    """Returns the least host memory with which the contender can train, by arithmetic: its process and its model
    data."""
    by_place = bytes_per_param(task) or {"gpu": 0, "host": 0}
    on_host = by_place["host"] + (by_place["gpu"] if task.device == "cpu" else 0)
    if task.device == "cpu" and not on_host:
        on_host = model_bytes_per_param(task.dtype)
    return BASE_BYTES + on_host * params


def largest_by_trial(
    trial: Callable[[int], int | None],
    *,
    cap_bytes: int,
    small_layers: int,
    small_bytes: int,
    layer_bytes: float,
    most_trials: int = 6,
) -> tuple[int, int | None, list[tuple[int, int | None]]]:
    """Find the most layers whose peak stays within the cap. Returns (most layers that ran and fit, fewest layers that
    ran and did not fit, every trial as (layers, peak bytes or None where it died)). 0 layers: none fits.

    trial: layers -> peak in bytes, None where it died.
    small_layers, small_bytes: a known run, within the cap or above it.
    layer_bytes: estimated bytes per layer.

    The next trial is where the line through the last two points meets the cap, but has at most MOST_TIMES the layers
    that fit: two equal peaks say nothing about a layer's bytes. After a run that died, the middle is tried.
    """
    least_bytes = layer_bytes / MOST_TIMES
    fits, fits_bytes = small_layers, small_bytes
    fails: int | None = None
    if small_bytes > cap_bytes:
        fits, fits_bytes, fails = 0, max(0, int(small_bytes - small_layers * layer_bytes)), small_layers
    tried: list[tuple[int, int | None]] = []
    died = 0  # layers of the last run that fit
    for _ in range(most_trials):
        guess = fits + max(1, int((cap_bytes - fits_bytes) / layer_bytes))
        guess = min(guess, MOST_TIMES * max(fits, small_layers))
        if fails is not None:
            guess = min(guess, fails - 1)
        if died:
            guess = min(guess, (fits + died) // 2)
        if guess <= fits:
            break
        peak = trial(guess)
        tried.append((guess, peak))
        if peak is not None:
            layer_bytes = max((peak - fits_bytes) / (guess - fits), least_bytes)
        if peak is not None and peak <= cap_bytes:
            fits, fits_bytes = guess, peak
        else:
            fails = guess
            if peak is None:
                died = guess
        if fails == fits + 1:
            break
    return fits, fails, tried
