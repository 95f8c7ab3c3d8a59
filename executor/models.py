"""Models by name: presets, transformers configurations and the user's own factories, with example batches: on `meta`
(no memory, no initialisation) for a capture, on `cpu` with real, seeded weights for a run."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from executor.devices.dtypes import TORCH_DTYPES
from executor.devices.on_meta import parameters_on_meta
from executor.moments.hooks import tensors_of
from pstar_sim.catalog.attention import ATTENTION
from pstar_sim.catalog.model_shapes import ExpertsShape, ModelEntry, model_entry
from pstar_sim.dtypes import MASTER, WORKING
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.python310 import Unpack
from pstar_sim.schema.reading import nearest
from pstar_sim.workload.axes import Axes, AxesGiven, all_axes

IMAGE_SIZE = 224  # pixels per side, where a configuration names none (convolutions accept any)


@dataclass(frozen=True, kw_only=True)
class BuiltModel(Axes):
    """A module in training mode and a batch for `forward_loss`.

    name: the spec it was built from.
    batch, sequence: sequences and tokens per sequence, by which an iteration's tokens are counted. For images, the
        patches and the class token (1 without patches).
    vocabulary: tokens that the model knows, None for a model that reads none.
    dtype: None where the module's own dtypes were kept.
    """

    module: nn.Module
    example_batch: Any
    name: str
    batch: int
    sequence: int
    vocabulary: int | None


def build(
    spec: str,
    *,
    batch: int = 1,
    sequence: int = 1024,
    device: str = "cpu",
    seed: int = 0,
    empty: bool = False,
    **axes: Unpack[AxesGiven],
) -> BuiltModel:
    """Returns the model with an example batch of `batch` sequences of `sequence` tokens.

    spec: a preset's name, "hf:FILE" (a transformers config.json, or its folder), "hf:ORG/NAME" (fetches the
        configuration only; weights are random), or "py:package.module:factory" (returns an nn.Module and an example
        batch, from those of batch, sequence, dtype and checkpointing that its signature names).
    device: "meta" or "cpu"; a "py:" factory decides itself.
    seed: of weights and batch; the global generator stays unchanged.
    axes: dtype (None means bf16, under autocast fp32, for "py:" the module's own dtypes), autocast (of a capture),
        checkpointing, attention.
    empty: parameters on meta for any `device`, for weights that come from a folder.

    Raises ModelError, and UnknownName for an unknown preset.
    """
    asked = Axes(**axes)
    dtype = asked.dtype or (MASTER if asked.autocast else WORKING)
    _check_arguments(spec, asked, batch=batch, sequence=sequence, device=device)
    with torch.random.fork_rng(devices=[]), parameters_on_meta() if empty else contextlib.nullcontext():
        torch.manual_seed(seed)
        if spec.startswith("py:"):
            return _from_factory(spec, batch, sequence, asked)
        if spec.startswith("hf:"):
            config, architecture = _hf_config(spec)
        else:
            config, architecture = config_of(model_entry(spec))
        return _from_config(spec, config, architecture, batch, sequence, asked.but(dtype=dtype), device, seed)


def forward_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Run `model` on `batch`. Returns its loss, a scalar that requires a gradient.

    A mapping is passed as keyword arguments, a tuple or list as positional ones, any other batch alone. The loss is
    `output.loss`, `output["loss"]`, the output itself if it is a scalar, or the first scalar of a tuple. Raises
    ModelError without any."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = _loss_of(output)
    if loss is None:
        raise ModelError(
            f"{type(model).__name__} returns {_describe(output)}, in which there is no loss; return a scalar loss, "
            "an object with .loss, a dict with 'loss', or a tuple with a scalar in it (for transformers: pass labels)"
        )
    if not loss.requires_grad:
        raise ModelError(
            f"the loss of {type(model).__name__} does not depend on any trainable parameter; compute the loss from the "
            "model's outputs, and leave some parameters with requires_grad"
        )
    return loss.reshape(()) if loss.dim() else loss


def under_autocast(
    loss: Callable[[nn.Module, Any], torch.Tensor], kind: str, dtype: str | None
) -> Callable[[nn.Module, Any], torch.Tensor]:
    """None: the loss itself."""
    if dtype is None:
        return loss

    def cast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(kind, dtype=TORCH_DTYPES[dtype]):
            return loss(model, batch)

    return cast


@contextlib.contextmanager
def named_failures(name: str, model: nn.Module) -> Iterator[None]:
    """An error in a module's forward becomes a ModelError that names the module."""
    try:
        yield
    except PstarError:
        raise
    except Exception as error:
        names = {id(part): part_name for part_name, part in model.named_modules()}
        frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        inside = [part for part in frames if isinstance(part, nn.Module) and id(part) in names]
        if not inside:
            raise
        where = f"{names[id(inside[-1])] or '<root>'!r} ({type(inside[-1]).__name__})"
        raise ModelError(f"{name}: module {where} raised {type(error).__name__}: {_one_line(error)}") from error


@contextlib.contextmanager
def attention_kernel(attention: str | None, device: str = "cpu") -> Iterator[None]:
    """scaled_dot_product_attention uses this kernel: "efficient", "math" or, for every other one of
    catalog/attention.py, "flash", which keeps as much; None: torch's choice on the device ("cpu", "cuda"), wherever the
    tensors are.

    "flash" and "efficient" are for fake tensors or a CUDA device. CUDA's flash kernel has dropout at the same bytes;
    the CPU's has none, so attention there leaves it out. "efficient" has no CPU kernel: shapes are those that torch
    registers."""
    if attention is None:
        with contextlib.nullcontext() if device != "cuda" else _Attention(_as_on_cuda):
            yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = ATTENTION[attention].torch
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            yield
    elif kernel == "flash":
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), _Attention(_flash):
            yield
    else:
        with _Attention(_efficient):
            yield


@contextlib.contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Transformers assumes that fake position ids do not pack several sequences into one row.

    Without their values it would build a mask that a real run does not. In versions that check elsewhere or (before
    5.0) always build it, nothing changes, and the mask is counted."""
    masking = sys.modules.get("transformers.masking_utils")

    def made(find: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def find_unpacked(position_ids: torch.Tensor) -> torch.Tensor | None:
            packed = find(position_ids)
            if packed is not None and isinstance(packed, FakeTensor):
                (packed[:, -1] == 0).all()
                return None
            return packed

        return find_unpacked if find(torch.arange(2)[None]) is None else find

    with _replaced(masking, "find_packed_sequence_indices", made):
        yield


@contextlib.contextmanager
def unread_padding() -> Iterator[None]:
    """Versions of transformers before 5.0 read tokens to warn of padding without a mask; the check costs the operators
    of real tensors."""
    owner = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)

    def made(warn: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
        def warn_of_padding(self: Any, input_ids: Any, attention_mask: Any) -> None:
            if not isinstance(input_ids, FakeTensor):
                warn(self, input_ids, attention_mask)
            elif attention_mask is None and self.config.pad_token_id is not None:
                (input_ids[:, [-1, 0]] == self.config.pad_token_id).any()

        return warn_of_padding

    with _replaced(owner, "warn_if_padding_and_no_attention_mask", made):
        yield


@contextlib.contextmanager
def known_masks(is_known: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Transformers then reads fake masks with known values: one of ones alone gives no attention mask."""
    masking = sys.modules.get("transformers.masking_utils")

    def asked(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def is_tracing(tensor: Any = None) -> bool:
            return not (isinstance(tensor, FakeTensor) and is_known(tensor)) and bool(ask(tensor))

        return is_tracing

    def read(ignore: Callable[..., bool]) -> Callable[..., bool]:
        def ignore_mask(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
            unknown = isinstance(padding_mask, FakeTensor) and not is_known(padding_mask)
            return not unknown and ignore(padding_mask, *args, **kwargs)

        return ignore_mask

    asks = hasattr(masking, "is_tracing")  # versions before 5.0 read every mask
    with (
        _replaced(masking, "is_tracing", asked),
        _replaced(None if asks else masking, "_ignore_causal_mask_sdpa", read),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    kept = getattr(owner, name, None)
    if kept is None:
        yield
        return
    setattr(owner, name, made(kept))
    try:
        yield
    finally:
        setattr(owner, name, kept)


class _Attention(torch.overrides.TorchFunctionMode):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _flash(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any) -> Any:
    if query.device.type == "cpu":
        dropout_p = 0.0
    attend = torch.nn.functional.scaled_dot_product_attention
    try:
        return attend(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        why = "its mask needs a gradient" if attn_mask is not None and attn_mask.requires_grad else _one_line(error)
        raise ModelError(f"the flash kernel cannot run this attention ({why}); ask for attention 'math'") from error


def _efficient(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    # As torch does around the kernel: cast under autocast, repeat grouped heads, turn a mask into an additive bias,
    # expand it over heads.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype is torch.bool else attn_mask.to(dtype)
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    bias = attn_mask
    if bias is not None:
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
        bias = bias.expand(*query.shape[:-1], key.size(-2))
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]


def _as_on_cuda(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
    """CUDA's fused kernels make the gradient of a mask; the CPU's cannot and keep the scores."""
    fused = attn_mask is not None and attn_mask.requires_grad
    attend = _efficient if fused else torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask, *args, **options)


def _check_arguments(spec: str, axes: Axes, *, batch: int, sequence: int, device: str) -> None:
    for name, value in (("batch", batch), ("sequence", sequence)):
        if value < 1:
            raise ModelError(f"{name} must be at least 1, not {value}")
    for what, given in axes.given.items():
        axis = all_axes()[what]
        if not axis.of_modules or what in ("lora", "base"):
            raise ModelError(f"{spec}: {what} is for what is planned; a module has its own")
        if axis.names and given not in axis.names:
            raise ModelError(f"{what} {given!r} is not known; it is one of {', '.join(axis.names)}")
    if axes.autocast and axes.dtype not in (None, MASTER):
        raise ModelError(f"{spec}: autocast is over weights in {MASTER}, not {axes.dtype}; leave one of them out")
    if device not in ("meta", "cpu"):
        raise ModelError(f"device {device!r} is not known; a model is built on meta or cpu")


def _from_factory(spec: str, batch: int, sequence: int, axes: Axes) -> BuiltModel:
    factory = _factory_of(spec)
    dtype, checkpointing = axes.dtype, bool(axes.checkpointing)
    wanted = {"batch": batch, "sequence": sequence, "dtype": dtype, "checkpointing": checkpointing}
    names = inspect.signature(factory).parameters
    model, example = _made_by(spec, factory, {name: value for name, value in wanted.items() if name in names})
    if dtype is not None:
        model = model.to(TORCH_DTYPES[dtype])
        example = map_batch(example, lambda t: t.to(TORCH_DTYPES[dtype]) if t.is_floating_point() else t)
    if checkpointing and "checkpointing" not in names:
        enable_checkpointing(spec, model)
    model.train()
    sizes = [t.shape for t in tensors_of(example) if t.dim()]
    return BuiltModel(
        module=model,
        example_batch=example,
        name=spec,
        batch=batch if "batch" in names or not sizes else int(sizes[0][0]),
        sequence=sequence if "sequence" in names else int(sizes[0][1]) if sizes and len(sizes[0]) == 2 else 1,
        vocabulary=None,
        **axes.given,
    )


def _factory_of(spec: str) -> Callable[..., Any]:
    where, _, function_name = spec.removeprefix("py:").partition(":")
    if not where or not function_name:
        raise ModelError(f"{spec!r} is not py:package.module:factory")
    try:
        with _current_folder_importable():
            module = importlib.import_module(where)
    except ImportError as error:
        raise ModelError(f"{spec}: cannot import {where!r}: {error}") from error
    except Exception as error:
        raise ModelError(f"{spec}: importing {where!r} raised {type(error).__name__}: {_one_line(error)}") from error
    factory: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(factory):
        near = nearest(function_name, [name for name, value in vars(module).items() if callable(value)])
        hint = f"did you mean {near}?" if near else "name a function of it that returns (nn.Module, example batch)"
        raise ModelError(f"{spec}: module {where!r} has no callable {function_name!r}; {hint}")
    return factory


def _made_by(spec: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    function_name = spec.rpartition(":")[2]
    try:
        made = factory(**arguments)
    except PstarError:
        raise
    except Exception as error:
        raise ModelError(f"{spec}: {function_name}() raised {type(error).__name__}: {_one_line(error)}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ModelError(f"{spec}: {function_name}() returns {_describe(made)}; return (nn.Module, example batch)")
    return made


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """As with `python -m`, unlike a console script."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _hf_config(spec: str) -> tuple[Any, str | None]:
    transformers = _transformers()
    what = spec.removeprefix("hf:")
    path = Path(what).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file() or path.suffix == ".json":
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{spec}: {path} is not a readable config.json: {error}") from error
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ModelError(f"{spec}: {path} has no field 'model_type'; give the config.json of a transformers model")
        model_type = values.pop("model_type")
        try:
            config = transformers.AutoConfig.for_model(model_type, **values)
        except Exception as error:  # of the checks of any class; huggingface_hub's derive from no other
            raise ModelError(f"{spec}: {_one_line(error)}") from error
    else:
        try:
            with quiet("huggingface_hub"):  # it logs each of its retries
                config = transformers.AutoConfig.from_pretrained(what, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{spec}: the configuration of {what!r} cannot be fetched (offline, or no such model); "
                f"download its config.json and give hf:FILE ({_one_line(error).split('. ')[0]})"
            ) from error
    architectures = getattr(config, "architectures", None) or [None]
    return config, architectures[0]


def config_of(m: ModelEntry) -> tuple[Any, str]:
    """Transformers configuration and class, without dropout, as in pretraining. Raises ModelError for a family without
    a class."""
    transformers = _transformers()
    common: dict[str, Any] = {"tie_word_embeddings": m.tied}
    if m.family == "gpt":
        config = transformers.GPT2Config(
            n_layer=m.layers,
            n_embd=m.hidden,
            n_head=m.heads,
            n_inner=m.ffn,
            vocab_size=m.vocab,
            n_positions=m.max_seq,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        return config, "GPT2LMHeadModel"
    common.update(hidden_size=m.hidden, num_hidden_layers=m.layers, num_attention_heads=m.heads)
    common.update(intermediate_size=m.ffn)
    if m.family == "llama":
        common.update(vocab_size=m.vocab, max_position_embeddings=m.max_seq, num_key_value_heads=m.kv_heads)
        common.update(bos_token_id=0, eos_token_id=0, pad_token_id=None)
        return _llama_config(m, common)
    common.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if m.family == "bert":
        config = transformers.BertConfig(vocab_size=m.vocab, max_position_embeddings=m.max_seq, **common)
        return config, "BertForMaskedLM"
    if m.family == "vit":
        config = transformers.ViTConfig(image_size=m.image, patch_size=m.patch, num_labels=m.classes, **common)
        return config, "ViTForImageClassification"
    raise ModelError(
        f"preset {m.name!r} is of family {m.family!r}, for which no module is known; give py:package.module:factory"
    )


def _llama_config(m: ModelEntry, common: dict[str, Any]) -> tuple[Any, str]:
    transformers = _transformers()
    if m.own_head_dim:
        common.update(head_dim=m.own_head_dim)
    if m.window:
        kinds = ["sliding_attention" if m.window_of(i) else "full_attention" for i in range(m.layers)]
        common.update(sliding_window=m.window, layer_types=kinds)
    if m.experts is not None:
        return _experts_config(m, m.experts, common)
    if m.post_norms:
        return transformers.Gemma3TextConfig(**common), "Gemma3ForCausalLM"
    if m.qk_norm:
        return transformers.Qwen3Config(**common), "Qwen3ForCausalLM"
    if m.attention_bias:  # biases of q, k, v and not of the output projection: Qwen2's
        return transformers.Qwen2Config(**common), "Qwen2ForCausalLM"
    return transformers.LlamaConfig(**common), "LlamaForCausalLM"


def _experts_config(m: ModelEntry, experts: ExpertsShape, common: dict[str, Any]) -> tuple[Any, str]:
    transformers = _transformers()
    common.update(num_experts_per_tok=experts.per_token)
    if m.latent is not None:
        common.update(
            q_lora_rank=m.latent.q_rank,
            kv_lora_rank=m.latent.kv_rank,
            qk_rope_head_dim=m.latent.rotary,
            qk_nope_head_dim=m.latent.plain,
            v_head_dim=m.latent.value,
            n_routed_experts=experts.count,
            n_shared_experts=experts.shared,
            moe_intermediate_size=experts.ffn,
            first_k_dense_replace=experts.dense_layers,
        )
        return transformers.DeepseekV3Config(**common), "DeepseekV3ForCausalLM"
    if m.sinks:
        common.update(num_local_experts=experts.count, intermediate_size=experts.ffn)
        return transformers.GptOssConfig(**common), "GptOssForCausalLM"
    if m.qk_norm:
        common.update(num_experts=experts.count, moe_intermediate_size=experts.ffn)
        return transformers.Qwen3MoeConfig(**common), "Qwen3MoeForCausalLM"
    common.update(num_local_experts=experts.count, intermediate_size=experts.ffn)
    return transformers.MixtralConfig(**common), "MixtralForCausalLM"


def _from_config(
    spec: str,
    config: Any,
    architecture: str | None,
    batch: int,
    sequence: int,
    axes: Axes,
    device: str,
    seed: int,
) -> BuiltModel:
    assert axes.dtype is not None
    dtype = TORCH_DTYPES[axes.dtype]
    cls = _model_class(spec, config, architecture)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with contextlib.ExitStack() as stack:
        if device == "meta":
            stack.enter_context(torch.device("meta"))
        try:
            # transformers before 4.56 knows only the word torch_dtype
            word = "dtype" if hasattr(config, "dtype") else "torch_dtype"
            model = cls._from_config(config, **{word: dtype})
        except (ValueError, TypeError, ImportError) as error:
            raise ModelError(f"{spec}: transformers cannot build {cls.__name__}: {_one_line(error)}") from error
    if cls.__name__.endswith("LMHeadModel") and model.loss_type is None:
        model.loss_type = "ForCausalLM"  # the default to which transformers falls back, with a warning
    if axes.checkpointing:
        enable_checkpointing(spec, model)
    model.train()
    torch.manual_seed(seed)  # the batch is the same whether the parameters were initialised or are on meta
    names = inspect.signature(model.forward).parameters
    vocabulary: int | None = None
    if cls.main_input_name == "pixel_values" and "labels" in names:
        example, sequence = _images(config, batch, dtype, device)
    elif cls.main_input_name == "input_ids" and "labels" in names:
        per_sequence = cls.__name__.endswith("ForSequenceClassification")
        example, vocabulary = _tokens(spec, config, batch, sequence, device, per_sequence=per_sequence)
    else:
        raise ModelError(
            f"{spec}: no batch is known for {cls.__name__} (inputs {', '.join(list(names)[:4])} ...); write a factory "
            "that returns it with an example batch and give py:package.module:factory"
        )
    return BuiltModel(
        module=model,
        example_batch=example,
        name=spec,
        batch=batch,
        sequence=sequence,
        vocabulary=vocabulary,
        **axes.given,
    )


def _images(config: Any, batch: int, dtype: torch.dtype, device: str) -> tuple[dict[str, torch.Tensor], int]:
    vision = getattr(config, "vision_config", config)
    height, width = _pair(getattr(vision, "image_size", None) or IMAGE_SIZE)
    patch = getattr(vision, "patch_size", None)
    down, across = _pair(patch) if patch else (height, width)
    sequence = (height // down) * (width // across) + 1 if patch else 1
    channels = int(getattr(vision, "num_channels", 3))
    pixels = torch.randn(batch, channels, height, width, dtype=dtype, device=device)
    labels = torch.randint(0, _classes(config), (batch,), device=device)
    return {"pixel_values": pixels, "labels": labels}, sequence


def _tokens(
    spec: str, config: Any, batch: int, sequence: int, device: str, *, per_sequence: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """With labels, and the vocabulary. Raises ModelError for too long sequences.

    per_sequence: one label per sequence, not per token.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(text.vocab_size)
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and 0 < longest < sequence and not _rotary(text):
        raise ModelError(
            f"{spec}: a sequence of {sequence} tokens is longer than the model's {longest} positions; "
            f"give at most {longest}"
        )
    tokens = torch.randint(0, vocabulary, (batch, sequence), device=device)
    labels = torch.randint(0, _classes(config), (batch,), device=device) if per_sequence else tokens.clone()
    return {"input_ids": tokens, "labels": labels}, vocabulary


def _classes(config: Any) -> int:
    return int(getattr(config, "num_labels", 2) or 2)


def _model_class(spec: str, config: Any, architecture: str | None) -> Any:
    transformers = _transformers()
    named = getattr(transformers, architecture, None) if architecture else None
    if named is not None and "labels" in inspect.signature(named.forward).parameters:
        return named
    auto = transformers.models.auto.modeling_auto
    if getattr(config, "is_encoder_decoder", False):
        order: tuple[Any, ...] = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,)
    else:
        order = (
            auto.MODEL_FOR_MASKED_LM_MAPPING,
            auto.MODEL_FOR_CAUSAL_LM_MAPPING,
            auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
            auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        )
    for mapping in order:
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModelError(
        f"{spec}: model type {config.model_type!r} has no class in transformers that reads text or images and computes "
        "a loss; write a factory that returns the model with an example batch and give py:package.module:factory"
    )


def enable_checkpointing(spec: str, model: nn.Module, *, reentrant: bool = False) -> None:
    """By the name that this version of transformers has for it. Raises ModelError without one."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    options = "activation_checkpointing_kwargs"
    if enable is None:  # the older name
        enable = getattr(model, "gradient_checkpointing_enable", None)
        options = "gradient_checkpointing_kwargs"
    if enable is None:
        raise ModelError(
            f"{spec}: {type(model).__name__} cannot switch activation checkpointing on; give --no-checkpointing, or a "
            "factory that takes checkpointing= and calls torch.utils.checkpoint itself"
        )
    try:
        enable(**{options: {"use_reentrant": reentrant}})
    except ValueError as error:
        raise ModelError(f"{spec}: {_one_line(error)}; give --no-checkpointing") from error


@contextlib.contextmanager
def quiet(logger: str) -> Iterator[None]:
    import logging

    named = logging.getLogger(logger)
    before = named.level
    named.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        named.setLevel(before)


def _rotary(config: Any) -> bool:
    return bool(getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None))


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (int(size), int(size))


def _loss_of(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if _scalar(output) else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if _scalar(loss):
        assert isinstance(loss, torch.Tensor)
        return loss
    if isinstance(output, (tuple, list)):
        return next((item for item in output if _scalar(item)), None)
    return None


def _scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def map_batch(value: Any, change: Any) -> Any:
    """value: mappings, tuples and lists of tensors, nested."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_batch(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_batch(item, change) for item in value)
    return value


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "transformers is not installed; install pstar-sim with the extra 'hf', or give py:package.module:factory"
        ) from error
    return transformers
