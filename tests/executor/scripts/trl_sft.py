"""A script as users have it: TRL's SFTTrainer, whose bf16 is on by default, on rows of different lengths."""

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
from words import tokenizer  # beside this file

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=512, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = LlamaForCausalLM(config)
draw = torch.Generator().manual_seed(1)
lengths = torch.randint(12, 40, (48,), generator=draw).tolist()
rows = [{"input_ids": torch.randint(3, 512, (length,), generator=draw).tolist()} for length in lengths]

with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        gradient_checkpointing=False, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, max_length=64, dataset_num_proc=None,
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
if options.out:
    torch.save({"losses": losses, "weights": model.state_dict()}, options.out)
