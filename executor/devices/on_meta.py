"""Models that are built without memory for their parameters.

[Note: buffers on meta] Buffers in the state_dict come from the parameters' file. Others (rotary frequencies, masks) are
computed when the module is built, by the module alone, so they must not be on meta.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside this context, a module that is built keeps no memory for its parameters; its buffers are real.

    A parameter goes to the meta device when it is registered: building needs the room of the largest parameter. Works
    for modules that do not read their parameters' values."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
