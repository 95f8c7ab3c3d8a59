"""Files of trainers over transformers, axolotl and LLaMA-Factory: a launch by DeepSpeed, FSDP or neither, and the job.

Both load the weights in the dtype of the run, freeze them beside adapters, and leave the rest to transformers' Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pstar_sim.dtypes import WORKING
from pstar_sim.errors import PstarError, UnknownName
from pstar_sim.frameworks import accelerate, deepspeed
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.keys import KeyReading
from pstar_sim.schema.parsing import parse_json
from pstar_sim.schema.reading import Fault, brief
from pstar_sim.workload.adapter import ALL_LINEAR, Adapter
from pstar_sim.workload.optimizers import MASTERS, optimizer_spec

_PLAIN = (
    "launched as one process or as DistributedDataParallel; a launcher's own file (accelerate, DeepSpeed) says more"
)
_SAME = ("batch_per_gpu", "micro_batches", "clip")
"""Values that DeepSpeed's file has too: transformers refuses two that differ."""


def launched(file: str, *, dtype: str | None, zero: object, words: object, values: object) -> Configuration:
    """By DeepSpeed or by FSDP, as their own files are read, or by neither. Raises PstarError as these readers do.

    zero, words, values: of the keys deepspeed (a file or its content), fsdp and fsdp_config (likewise).
    """
    if zero:
        content, where = (zero, f"{file}: deepspeed") if isinstance(zero, dict) else _file(str(zero), file)
        launch = deepspeed.read(content, where)
        return replace(launch, dtype=launch.dtype or dtype)
    said = [
        str(word) for word in (words.split() if isinstance(words, str) else words if isinstance(words, list) else [])
    ]
    values = _file(values, file)[0] if isinstance(values, str) else values
    if not said and not values:
        launch = accelerate.read({"distributed_type": "MULTI_GPU"}, file)
        return replace(launch, dtype=dtype, notes=(_PLAIN,))
    names = _with_prefix(values if isinstance(values, dict) else {})
    strategy = next((word for word in said if word not in ("auto_wrap", "offload")), None)
    if strategy is not None and names.get("fsdp_version") in (None, 1):
        names.setdefault("fsdp_sharding_strategy", strategy.upper())
    if "offload" in said:
        names.setdefault("fsdp_offload_params", True)
    names.pop("fsdp_final_state_dict_type", None)
    content = {"distributed_type": "FSDP", "mixed_precision": dtype or WORKING, "fsdp_config": names}
    return accelerate.read(content, file)


def _with_prefix(given: Mapping[str, Any]) -> dict[str, Any]:
    """As accelerate names the keys: transformers and axolotl take them without "fsdp_", too."""
    return {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in given.items()}


def _file(named: str, file: str) -> tuple[object, str]:
    paths = [Path(file).parent / named, Path(named)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise PstarError(f"{file}: names {named}, which is neither beside it nor in this folder; put it there")
    try:
        return parse_json(path.read_text(encoding="utf-8-sig")), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PstarError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    except Fault as fault:
        raise PstarError(f"{path}: {fault.in_json()}") from None


def adapter_text(found: KeyReading, rank: int, targets: object) -> str:
    """targets, and what is trained whole: names between commas or in a list; "all" means all linear modules, None the
    family's usual; a single text that is neither is a regular expression."""
    named = _names(targets)
    if "all" in named:
        named = (ALL_LINEAR,)
    chosen = named[0] if isinstance(targets, str) and len(named) == 1 and not named[0].isidentifier() else named or None
    return str(
        Adapter(
            rank=rank, targets=chosen, save=_names(found["save"]), rs=found["rs"] is True, dora=found["dora"] is True
        )
    )


def _names(given: object) -> tuple[str, ...]:
    words = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else ()
    return tuple(dict.fromkeys(word for word in (str(word).strip() for word in words) if word))


def optimizer_of(name: str | None, key: str) -> tuple[str | None, list[str]]:
    """(name here, notes) of an `optim` of transformers; None without one."""
    if name is None:
        return None, []
    try:
        return optimizer_spec(name).name, []
    except UnknownName:
        return "adamw", [f"not modelled: {key} = {brief(name)}: predicted as AdamW"]


def trained(launch: Configuration, found: KeyReading, file: str, notes: list[str], **job: Any) -> Configuration:
    """The launch with a job's values. Without DeepSpeed, FSDP and autocast, an optimizer updates 16-bit weights
    themselves. Raises PstarError for a value in which launch and job differ, and for a base without adapters.

    job: attributes of `Configuration` beside those that both trainers have; None for what the file does not say.
    """
    job |= {name: found.known(name) for name in ("model", "batch_per_gpu", "micro_batches", "sequence")}
    job |= {"clip": found.usual("clip", 1.0) > 0, "products": "fp8" if found["fp8"] is True else None}
    said = {name: value for name, value in job.items() if value is not None}
    details = {**launch.detail, **({"sequence": said.pop("sequence")} if "sequence" in said else {})}
    if "base" in said and "lora" not in said:
        raise PstarError(
            f"{file}: says a base in {said['base']} without adapters; what is trained is not quantised: name an "
            "adapter, or leave the quantisation out"
        )
    for name in _SAME:
        other = getattr(launch, name)
        if other is not None and said.get(name, other) != other:
            raise PstarError(
                f"{file}: {name.replace('_', ' ')} is {said[name]}, and {other} in the launcher's file; transformers "
                'refuses it; "auto" there takes the value from here'
            )
    whole = launch.framework == accelerate.ACCELERATE and launch.policy_base == "all_on_gpu"
    if whole and launch.dtype in (None, WORKING) and "lora" not in said and "autocast" not in said:
        said["masters"] = MASTERS[1]
    return replace(
        launch,
        **said,
        dtype=None if "autocast" in said else launch.dtype,
        loading=f"{launch.loading}:{launch.dtype or WORKING}",
        details=tuple(sorted(details.items())),
        notes=(*launch.notes, *found.notes, *notes),
        without_effect=(*launch.without_effect, *found.without_effect),
    )
