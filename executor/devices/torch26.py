"""Functions that torch 2.6 to 2.8 lack.

The functions that push and pop hooks on saved tensors get wrappers when the executor is imported. torch's older
function for whether the compiler watches this thread loses a reference to None at each call, until the process dies; it
is never called.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_WATCH_COUNTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)
_PUSH, _POP = "_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"

SavedHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def watch_hooks(where: Any) -> Callable[[], SavedHooks | None]:
    """Counts calls of `where`'s two functions (torch._C._autograd), and returns a function that gives the hooks in
    force."""
    mine = threading.local()
    push, pop = getattr(where, _PUSH), getattr(where, _POP)

    @functools.wraps(push)
    def pushed(*hooks: Any) -> Any:
        result = push(*hooks)
        mine.stack = [*getattr(mine, "stack", []), hooks]
        return result

    @functools.wraps(pop)
    def popped() -> Any:
        result = pop()
        mine.stack = mine.stack[:-1]
        return result

    def top() -> SavedHooks | None:
        stack: list[SavedHooks] = getattr(mine, "stack", [])
        return stack[-1] if stack else None

    setattr(where, _PUSH, pushed)
    setattr(where, _POP, popped)
    return top


def compiler_watches() -> Callable[[], object] | None:
    """The function gives None while the compiler does not watch this thread; None in torch versions without one."""
    if not _WATCH_COUNTS:
        return None
    ask: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
    return ask


if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):

    def saved_tensor_hooks() -> SavedHooks | None:
        hooks: SavedHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks

else:
    saved_tensor_hooks = watch_hooks(torch._C._autograd)


@contextlib.contextmanager
def allocating_in(pool: Any, device: torch.device) -> Iterator[None]:
    """Allocations of this thread come from the pool (torch.cuda.MemPool), before torch 2.8 those of the current
    stream."""
    c: Any = torch._C
    if hasattr(c, "_cuda_beginAllocateCurrentThreadToPool"):
        with torch.cuda.use_mem_pool(pool, device):
            yield
        return
    c._cuda_beginAllocateCurrentStreamToPool(device.index, pool.id)
    try:
        yield
    finally:
        end = getattr(c, "_cuda_endAllocateCurrentStreamToPool", None) or c._cuda_endAllocateToPool
        end(device.index, pool.id)
        c._cuda_releasePool(device.index, pool.id)


def set_allocator(settings: str) -> None:
    """settings: as PYTORCH_ALLOC_CONF has them ("max_split_size_mb:128")."""
    c: Any = torch._C
    change = (
        getattr(c, "_accelerator_setAllocatorSettings", None) or c._cuda_cudaCachingAllocator_set_allocator_settings
    )
    change(settings)


def maps_pages() -> bool:
    """Whether torch and the driver do what expandable_segments:True asks for, tried with one byte."""
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            torch.empty(1, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
    return bool(torch.cuda.memory._snapshot().get("allocator_settings", {}).get("expandable_segments"))
