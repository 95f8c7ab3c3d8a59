"""A script as users have it: QLoRA with TRL's SFTTrainer on a model that transformers loads in 4 bits."""

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
from words import tokenizer  # beside this file

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=512, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
four_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four_bits, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
draw = torch.Generator().manual_seed(1)
rows = [{"input_ids": torch.randint(3, 512, (32,), generator=draw).tolist()} for _ in range(32)]

with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        gradient_checkpointing=False, learning_rate=2e-3, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, max_length=64, dataset_num_proc=None,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
if options.out:
    torch.save({"losses": losses, "weights": trainer.model.state_dict()}, options.out)
