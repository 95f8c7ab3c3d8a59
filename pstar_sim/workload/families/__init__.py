"""Transformer families, operator by operator: which parameters, flops and live bytes, in the order of one iteration.

Each `write_*` follows what PyTorch and transformers do (module names, operators, what autograd saves, when a local
variable dies), so that a preset is close to a capture of the same model. The units are: `u` one activation of the
hidden size (batch x sequence x hidden, working dtype), `f` one of the feed-forward size. A residual stream value counts
from its making until nobody needs it. [Note: early stop] Non-reentrant checkpointing ends a recompute when the last
tensor that backward needs exists, so a last matmul whose output only feeds the residual sum is not recomputed.

Source: transformers 5 models gpt2, llama (qwen2), bert, vit; torch 2.13 autograd formulas; sizes compared with
storages counted under fake tensors. Bytes of the attention mask are left out: with no padding, none is made.
"""

from __future__ import annotations

from pstar_sim.workload.families.bert import write_bert
from pstar_sim.workload.families.gpt import write_gpt
from pstar_sim.workload.families.llama import write_llama
from pstar_sim.workload.families.shared import Shape
from pstar_sim.workload.families.vit import write_vit

__all__ = ["Shape", "write_bert", "write_gpt", "write_llama", "write_vit"]
