"""A script as users have it: transformers.Trainer with bf16=True and gradient accumulation."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(config)
draw = torch.Generator().manual_seed(1)
rows = []
for _ in range(64):
    start = int(torch.randint(512, (), generator=draw))
    tokens = (start + 3 * torch.arange(32)) % 512
    rows.append({"input_ids": tokens, "labels": tokens})

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        bf16=True, learning_rate=1e-3, weight_decay=0.01, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
if options.out:
    torch.save({"losses": losses, "weights": model.state_dict()}, options.out)
