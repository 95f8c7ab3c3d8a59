"""quantization_config of a config.json of transformers, and the values of bitsandbytes in it: what frozen matrices are
stored in.
"""

from __future__ import annotations

from typing import Any

from pstar_sim.catalog.configurations import QUANTISATION
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import PstarError
from pstar_sim.frameworks import accelerate
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.keys import SLIP, KeyReading, ignored, read_keys, unmodelled, used
from pstar_sim.schema.reading import brief

_NOT_STORED = "bases here are int8, nf4 and fp8"

KEYS = (
    used("quant_method", "method", str, "bitsandbytes"),
    used("load_in_4bit", "four", bool, False, also=("_load_in_4bit",)),
    used("load_in_8bit", "eight", bool, False, also=("_load_in_8bit",)),
    used("bnb_4bit_quant_type", "kind", str, "fp4"),
    used("bnb_4bit_use_double_quant", "nested", bool, False),
    used("bits", "bits", int),
    used("weight_block_size", "block", None),
    unmodelled("llm_int8_skip_modules", "all linear modules of the layers are taken to be quantised", off=None),
    unmodelled("modules_to_not_convert", "all linear modules of the layers are taken to be quantised", off=None),
    unmodelled("llm_int8_enable_fp32_cpu_offload", "a frozen base is taken to be quantised wherever it lies"),
    unmodelled("llm_int8_has_fp16_weight", "matrices are taken to be stored in 8 bits"),
    *ignored(
        "activation_scheme",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
        "fmt",
        "llm_int8_threshold",
    ),
)


def bits_of(found: KeyReading) -> int | None:
    """Of the values four and eight. Raises PstarError for both."""
    if found["four"] is True and found["eight"] is True:
        raise PstarError(f"{found.file}: load_in_4bit and load_in_8bit are both true; a base has one width")
    return 4 if found["four"] is True else 8 if found["eight"] is True else None


def bits_to_base(bits: int | None, *, nested: bool, experts: bool = False) -> str | None:
    """Of bitsandbytes, None for none. Four bits of either kind, fp4 or nf4, take the same bytes.

    experts: stacks of experts are quantised too, in four bits.
    """
    if bits == 8:
        return "int8"
    if bits != 4:
        return None
    return "nf4-experts" if experts else "nf4" if nested else "nf4-single"


def _base(found: KeyReading) -> tuple[str | None, list[str]]:
    method = found["method"]
    if method == "fp8":
        other = found["block"] not in (None, [128, 128])
        said = f"not modelled: weight_block_size = {brief(found['block'])}: predicted with blocks of 128 x 128"
        return "fp8", [said] if other else []
    if method == "bitsandbytes":
        return bits_to_base(bits_of(found), nested=found["nested"]), []
    if found["bits"] in (4, 8):
        base = bits_to_base(found["bits"], nested=True)
        return base, [f"not modelled: quant_method = {method}: predicted in {base}, which is about as wide"]
    return None, [f"not modelled: quant_method = {method}: predicted in the working dtype; {_NOT_STORED}"]


def read(content: dict[str, Any], file: str) -> Configuration:
    """A config.json, launched as a script would: one process, or DistributedDataParallel. Raises PstarError for one
    without quantisation, which says nothing of a run."""
    stored = content.get(QUANTISATION)
    if not isinstance(stored, dict):
        raise PstarError(
            f"{file}: is the config.json of a model without {QUANTISATION}, which says nothing about a run; give it as "
            f"--model hf:{file}"
        )
    found = read_keys(KEYS, stored, f"{file}: {QUANTISATION}", "a quantisation of transformers", alike=SLIP)
    base, notes = _base(found)
    names = {dtype.torch_name: name for name, dtype in DTYPES.items()}
    dtype = names.get(str(content.get("dtype", content.get("torch_dtype"))))
    launch = accelerate.read({"distributed_type": "MULTI_GPU"}, file)
    return Configuration(
        framework=launch.framework,
        policy=launch.policy,
        model=f"hf:{file}",
        dtype=dtype,
        base=base,
        loading=f"each:{dtype}" if dtype else "each",
        details=launch.details,
        notes=(*found.notes, *notes),
        without_effect=found.without_effect,
    )
