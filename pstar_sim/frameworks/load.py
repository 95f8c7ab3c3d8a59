"""The ending of a file says which framework its configuration belongs to; trainers are known by their keys."""

from __future__ import annotations

from pathlib import Path

import msgspec
import msgspec.yaml

from pstar_sim.catalog.configurations import QUANTISATION
from pstar_sim.core.plan_file import FORMAT
from pstar_sim.errors import PstarError
from pstar_sim.frameworks import axolotl, llama_factory, quantization
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.targets import TARGETS
from pstar_sim.schema.parsing import parse_json, parse_toml
from pstar_sim.schema.reading import Fault

_TRAINERS = (
    ({"base_model"}, axolotl.read),
    ({"finetuning_type", "cutoff_len", "template", "quantization_bit"}, llama_factory.read),
    ({"model_type", "architectures", QUANTISATION}, quantization.read),
)
"""Keys by which files of trainers and models are known, and their readers: no framework's file has one at the top."""
_SCRIPT = {"model_name_or_path", "per_device_train_batch_size"}
"""Keys of a training script's arguments."""

_ENDINGS = {ending: target for target in TARGETS.values() for ending in target.endings}


def load_configuration(path: str) -> Configuration:
    """Raises PstarError, naming the file, if it is unreadable, of no known kind, or wrong."""
    ending = Path(path).suffix.lower()
    if ending not in _ENDINGS:
        known = ", ".join(f"{end} ({target.name})" for end, target in _ENDINGS.items())
        raise PstarError(
            f"{path}: no framework has files with its ending; the ending must be one of {known}. FSDP2 code is written "
            "(pstar export) and not read: give accelerate's YAML for FSDP2"
        )
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise PstarError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise PstarError(f"{path}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise PstarError(f"{path}: is empty; give a configuration")
    read = _ENDINGS[ending].read
    assert read is not None
    content = _content(path, ending, text)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        raise PstarError(
            f"{path}: is a plan of pstar, not a framework's configuration; `pstar explain {path}` and `pstar export "
            f"{path} --deepspeed ds.json` read it; give --policy NAME to set its policy beside others"
        )
    if isinstance(content, dict):
        reader = next((reader for keys, reader in _TRAINERS if keys & content.keys()), None)
        if reader is not None:
            return reader(content, path)
        if _SCRIPT & content.keys():
            also = "".join(f", and {flag} for its {key}" for key, flag in _flags(content))
            raise PstarError(
                f"{path}: has the arguments of a training script, which are not read; {_launched_with(content)}{also}"
            )
    return read(content, path)


def _flags(content: dict[str, object]) -> list[tuple[str, str]]:
    """(key, flag) of a script's arguments that a job has flags for."""
    words = {"optim": "--optimizer {}", "lora_r": "--lora r={}", "load_in_4bit": "--base nf4-single"}
    words["load_in_8bit"] = "--base int8"
    given = [(key, flag, content.get(key)) for key, flag in words.items()]
    return [(key, flag.format(value)) for key, flag, value in given if value and isinstance(value, (str, int))]


def _launched_with(content: dict[str, object]) -> str:
    named = content.get("deepspeed")
    if isinstance(named, str):
        return f"give --like the DeepSpeed file that its key deepspeed names, {named}"
    if isinstance(content.get("fsdp_config"), dict):
        return "give --like an accelerate file with distributed_type: FSDP and its fsdp_config (keys with fsdp_ before)"
    return "give --like the DeepSpeed file (JSON) or the accelerate file (YAML) that it is launched with"


def _content(path: str, ending: str, text: str) -> object:
    if ending == ".toml":
        return parse_toml(path, text)
    if ending in (".yaml", ".yml"):
        try:
            return msgspec.yaml.decode(text)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise PstarError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if ending != ".json":
        return text
    try:
        return parse_json(text)
    except Fault as fault:
        comments = any(line.lstrip().startswith(("//", "/*", "#")) for line in text.splitlines())
        hint = "; take the comments out, which JSON does not have" if comments else ""
        raise PstarError(f"{path}: not a JSON file: {fault.in_json()}{hint}") from None
