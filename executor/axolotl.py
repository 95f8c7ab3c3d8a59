"""axolotl: a plugin that runs axolotl's trainers by a plan.

    plugins:
      - executor.axolotl.OffloadPlugin
    offload_gpu_memory: 24GB

axolotl chooses the class of the trainer (SFT, DPO, reward models) and makes its optimizer. The plugin then offloads the
trainer, whose optimizer has to be torch's AdamW (`optimizer: adamw_torch`).

Written against the published interface of axolotl 0.19 (`axolotl.integrations.base.BasePlugin`). Without axolotl the
plugin does nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

from executor.hf import offload

__all__ = ["OffloadArguments", "OffloadPlugin"]


def _of(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return object


class OffloadArguments(_of("pydantic", "BaseModel")):  # type: ignore[misc]
    """Keys of axolotl's configuration that the plugin reads; see `executor.offloading.Request`."""

    offload_gpu_memory: str | None = None
    offload_device: str | None = None
    offload_machine: str = "here"
    offload_policy: str = "optimal"


class OffloadPlugin(_of("axolotl.integrations.base", "BasePlugin")):  # type: ignore[misc]
    """Makes axolotl's trainer run by a plan for this machine."""

    def get_input_args(self) -> str:
        return "executor.axolotl.OffloadArguments"

    def get_trainer_cls(self, cfg: Any) -> None:
        """Returns None: axolotl's own choice of the class stands."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Offload the trainer that axolotl has made."""
        offload(
            trainer,
            cfg.offload_gpu_memory,
            device=cfg.offload_device,
            machine=cfg.offload_machine or "here",
            policy=cfg.offload_policy or "optimal",
        )

    def create_optimizer(self, cfg: Any, trainer: Any) -> None:
        """Returns None: axolotl makes its own optimizer, whose groups and settings the plan takes over."""
