"""A whole axolotl run, from its configuration file to its saved model, as it is and with the project's plugin: losses
and norms of both.

axolotl pins versions of transformers, accelerate, TRL and other packages, so that it has an environment of its own:
.venv-axolotl (contenders/venv.py), with the project's torch. Model, tokenizer and texts are made here. The run needs no
network. Writes results/axolotl.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _results import ROOT, write_result

STEPS, MEMORY = 6, "3.32MB"
CONFIGURATION: dict[str, Any] = {
    "sequence_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "num_epochs": 1,
    "optimizer": "adamw_torch", "learning_rate": 1e-3, "bf16": False, "fp16": False, "tf32": False,
    "flash_attention": False, "logging_steps": 1, "save_strategy": "no", "seed": 42,
}  # fmt: skip
PLUGIN: dict[str, Any] = {
    "plugins": ["executor.axolotl.OffloadPlugin"], "offload_gpu_memory": MEMORY, "offload_policy": "tide",
}  # fmt: skip
QUIET = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def make(folder: Path) -> None:
    """A small Llama, a tokenizer of 200 words, and texts; in axolotl's environment."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(0)
    torch.manual_seed(0)
    texts = [" ".join(draw.choices([f"w{n}" for n in range(200)], k=60)) for _ in range(64)]
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=list(special.values())))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "base")
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=256, max_position_embeddings=128, **ids)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")


def run(interpreter: str, folder: Path, name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Losses and norms of each step, and whether a model was saved."""
    out = folder / name
    texts = {"path": str(folder / "texts.jsonl"), "ds_type": "json", "type": "completion"}
    content = {
        "base_model": str(folder / "base"), "datasets": [texts], "output_dir": str(out),
        "dataset_prepared_path": str(folder / "prepared"), **CONFIGURATION, **more,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    done = python(interpreter, "-W", "ignore", "-m", "axolotl.cli.train", str(path), cwd=folder)
    rows = re.findall(r"'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'", done)
    return {
        "losses": [float(loss) for loss, _ in rows], "norms": [float(norm) for _, norm in rows],
        "saved": (out / "model.safetensors").is_file(),
    }  # fmt: skip


def python(interpreter: str, *words: str, cwd: Path) -> str:
    """What the process printed. Raises SystemExit with its last lines where it fails."""
    done = subprocess.run(
        [interpreter, *words], cwd=cwd, env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-axolotl", help="the environment that has axolotl")
    parser.add_argument("--out", type=Path, help="where the result is kept (default: benchmarks/results)")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make is not None:
        make(args.make)
        return 0
    from contenders.venv import AXOLOTL, make_environment

    interpreter = make_environment(args.venv, AXOLOTL, print)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python(interpreter, "-W", "ignore", str(Path(__file__).resolve()), "--make", name, cwd=folder)
        plain = run(interpreter, folder, "plain", {})
        ours = run(interpreter, folder, "offloaded", PLUGIN)
    equal = plain["losses"] == ours["losses"] and plain["norms"] == ours["norms"] and len(ours["losses"]) == STEPS
    print(f"losses as they are {plain['losses']}, offloaded {ours['losses']}; as printed, equal: {equal}")
    write_result(
        "axolotl",
        {"packages": AXOLOTL, "gpu_memory": MEMORY, "plain": plain, "offloaded": ours, "equal": equal},
        folder=args.out,
    )
    return int(not (equal and ours["saved"]))


if __name__ == "__main__":
    sys.exit(main())
