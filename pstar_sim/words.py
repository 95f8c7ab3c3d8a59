"""What other tools' words mean here."""

from __future__ import annotations

from collections.abc import Mapping

_SPREAD = (
    "tensor, context and pipeline parallelism are no policies: `pstar compare --parallel auto` spreads a job, and so "
    "does --parallel tp=N,cp=N,pp=N"
)
_DEEPSPEED = (
    "stages are --policy zero1, zero2, zero3, zero-offload, zero3-offload or zero-infinity, and a configuration is "
    "--like FILE"
)
_FSDP = "it is --policy ddp (all_on_gpu), zero2 or fsdp (zero3_resident), and a configuration is --like FILE"
_LIGER = "Liger's kernels are --kernels fused, and its loss is --loss fused"
_QUANTISED = "a base in 4 bits is --base nf4 beside --lora r=16; --base int8 and fp8 are others"
_FP8 = "products in fp8 are --products fp8, and frozen weights in fp8 --base fp8"
_TRAINERS = "a configuration of a trainer is --like FILE"
_TOKENS = "tokens of a sequence are --seq N, such as 4096 or 16k"
_SEQUENCES = "sequences per micro-batch, of all GPUs together, are --batch N"
_MICRO_BATCHES = "accumulation is --micro-batches N"
_GPUS = "GPUs per node are --gpus N"
_KEPT = "activations are recomputed with --checkpointing, as presets are by default"
_NOT_MODELLED = {
    "packing": ("packing", "packed", "samplepacking"),
    "this optimizer or adapter": ("galore", "lisa", "lomo", "badam", "apollo", "reft", "ia3"),
    "inference": ("vllm", "sglang", "tensorrt", "kvcache"),
    "asynchronous or low-communication training": ("diloco", "localsgd"),
    "accelerators that are no GPUs": ("tpu", "tpuv4", "tpuv5e", "tpuv5p", "tpuv6e", "trainium", "gaudi2", "gaudi3"),
}
_NEAREST = {
    "packing": "a full pack is one sequence: --seq its tokens, --batch packs",
}
_MEANT: Mapping[str, tuple[str, ...]] = {
    _SPREAD: ("tp", "pp", "sp", "megatron", "megatronlm", "tensor", "pipeline", "3d", "tensorparallel"),
    "ranks that split each sequence are --parallel cp=N": (
        *("cp", "contextparallel", "ringattention", "ulysses", "contextparallelsize"),
    ),
    "ranks that share experts are --parallel ep=N": ("ep", "expertparallel", "moeep", "expertmodelparallelsize"),
    "stages of a pipeline are --parallel pp=N": ("pipelineparallel", "pipelineparallelsize", "stages"),
    _DEEPSPEED: ("deepspeed", "zero", "zerostage", "zero1", "zero2", "zero3", "ds"),
    _FSDP: ("fsdp", "fsdp2", "ddp", "hsdp", "shardingstrategy", "horovod"),
    _LIGER: ("liger", "ligerkernel", "useligerkernel"),
    "DoRA is --lora r=16,dora": ("dora", "usedora", "peftusedora"),
    "AdamW in 8 bits is --optimizer adamw-8bit": ("8bitadam", "adam8bit", "8bit", "8bitoptimizer", "pagedadam8bit"),
    "rsLoRA is --lora r=16,rs": ("rslora", "userslora", "peftuserslora"),
    "modules of adapters are --lora r=16,targets=NAME+NAME,save=NAME+NAME": (
        *("targetmodules", "loratargetmodules", "loratarget", "modulestosave", "loramodulestosave"),
    ),
    _QUANTISED: ("qlora", "4bit", "loadin4bit", "loadin8bit", "nf4", "bnb", "bitsandbytes", "quantization", "gptq"),
    "its kernels and base are --kernels fused --loss fused --base nf4 --lora r=16": ("unsloth",),
    _FP8: ("fp8", "fp8training", "transformerengine", "te", "mxfp8", "float8"),
    _TRAINERS: ("torchtitan", "accelerate", "trainer", "axolotl", "llamafactory", "lightning", "config"),
    _TOKENS: ("seqlen", "seqlength", "sequencelength", "maxseqlength", "maxseqlen", "context", "contextlength", "ctx"),
    _SEQUENCES: ("batchsize", "bs", "microbatchsize", "perdevicetrainbatchsize", "trainbatchsize", "mbs"),
    _MICRO_BATCHES: ("gradaccum", "gradientaccumulation", "gradientaccumulationsteps", "accumulate", "ga"),
    _GPUS: ("ngpus", "numgpus", "nprocpernode", "gpuspernode", "devices", "worldsize"),
    "nodes are --nodes N": ("nnodes", "numnodes"),
    _KEPT: ("gradientcheckpointing", "activationcheckpointing", "recomputation", "ac"),
    "it is --attention flash (torch's own, the default) or fa2, fa3, fa4": ("flashattention", "flashattn", "sdpa"),
    "a deadline is --deadline TIME, such as 14d, 36h or 2w": ("days", "hours", "weeks"),
    "the host's memory is --host-memory SIZE": ("ram", "cpumemory", "hostram", "memory"),
    "the GPU's memory is --gpu-memory SIZE": ("vram", "gpuram", "gpumem"),
    "a GPU comes with its machine: --machine NAME (see `pstar machines`)": ("gpu", "device", "gputype"),
    "--policy zero-offload keeps optimizer states on the host, zero3-offload all model data, optimal what pays": (
        "offload",
        "cpuoffload",
        "offloadoptimizer",
        "offloadparam",
    ),
    "activations on the host are --policy karma, or --global-batch, which chooses": ("activationoffload",),
    "it is --kernels compiled": ("compile", "torchcompile", "inductor"),
    "it is --dtype bf16 or fp16, or --autocast over fp32 weights": (
        "bf16",
        "fp16",
        "amp",
        "mixedprecision",
        "precision",
    ),
}
_SAID = {word: sentence for sentence, words in _MEANT.items() for word in words} | {
    word: f"not modelled: {what}" + (f"; {_NEAREST[what]}" if what in _NEAREST else "")
    for what, words in _NOT_MODELLED.items()
    for word in words
}


def letters(name: str) -> str:
    """Letters and digits, in lower case, and signs between parts of a mixed machine."""
    return "".join(c for c in name.lower() if c.isalnum() or c == "+")


def meant(name: str) -> str | None:
    """What the word means here, in a sentence; None for an unknown word."""
    return _SAID.get(letters(name))
