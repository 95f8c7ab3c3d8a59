"""What a forward changes besides gradients: random generators, and running statistics; an iteration that ran out of
memory runs again as if it had not begun (`Ladder.recover`)."""

from __future__ import annotations

import torch


class Before:
    """Norm buffers and random generators before an iteration."""

    def __init__(self, model: torch.nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]
        self._buffers = [(b, b.clone()) for m in norms for b in m.buffers(recurse=False)]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
