"""A script as users have it: TRL's DPOTrainer on LoRA adapters; the reference is the model without them."""

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer
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


def words(count):
    return " ".join(f"w{number}" for number in torch.randint(3, 512, (count,), generator=draw).tolist())


rows = [{"prompt": words(6), "chosen": " " + words(12), "rejected": " " + words(10)} for _ in range(32)]

with tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        gradient_checkpointing=False, learning_rate=2e-3, beta=0.5, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, max_length=64,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]),
    )  # fmt: skip
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
if options.out:
    torch.save({"losses": losses, "weights": trainer.model.state_dict()}, options.out)
