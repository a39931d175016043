"""Models of a library that everybody trains with, tiny ones from their configurations; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.samples import CLASSES, IGNORED, LENGTH, TOKENS, ZooRecipe, images, sentences, sounds

_DEPTH: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
_LANGUAGE: dict[str, Any] = {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = {**_DEPTH, **_LANGUAGE, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
_MOE: dict[str, Any] = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
_SWITCH: dict[str, Any] = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 3}
_T5: dict[str, Any] = {**_LANGUAGE, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "decoder_start_token_id": 0}
_BART: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {**_LANGUAGE, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_DEPTH, **_LANGUAGE}),
    "Mamba": ("MambaConfig", "MambaForCausalLM", {**_LANGUAGE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", _MOE),
    "BERT": ("BertConfig", "BertForMaskedLM", {**_DEPTH, **_LANGUAGE, "max_position_embeddings": LENGTH}),
    "T5": ("T5Config", "T5ForConditionalGeneration", {**_T5, "num_layers": 2}),
    "BART": ("BartConfig", "BartForConditionalGeneration", {**_LANGUAGE, **_BART, "decoder_attention_heads": 2,
             "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": LENGTH}),
    "Switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", {**_T5, **_SWITCH}),
    "ViT": ("ViTConfig", "ViTForImageClassification", {**_DEPTH, "image_size": 32, "patch_size": 8}),
    "ResNet": ("ResNetConfig", "ResNetForImageClassification",
               {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
    "ConvNeXt": ("ConvNextConfig", "ConvNextForImageClassification",
                 {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "drop_path_rate": 0.3}),
    "Swin": ("SwinConfig", "SwinForImageClassification",
             {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    "wav2vec": ("Wav2Vec2Config", "Wav2Vec2ForCTC", {**_DEPTH, "vocab_size": 8, "pad_token_id": 0, "conv_dim": (8, 8),
                "conv_stride": (5, 4), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4, "apply_spec_augment": False,
                "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "layerdrop": 0.0}),
    "CLIP": ("CLIPConfig", "CLIPModel", {"projection_dim": 16, "text_config": {**_DEPTH, **_LANGUAGE,
             "max_position_embeddings": LENGTH}, "vision_config": {**_DEPTH, "image_size": 32, "patch_size": 8}}),
}  # fmt: skip


def build(name: str, settings: dict[str, Any]) -> Any:
    """Return the model of that name with settings of its configuration in place of those above."""
    import transformers

    config, model, defaults = CONFIGS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**{**defaults, **settings}))


class Pretrained(ZooRecipe):
    """A model by its name.

    Args:
        name: One of CONFIGS.
        checkpointing: Whether activations are computed again in backward.
        settings: Of its configuration.
    """

    def __init__(self, name: str, optimizer: str = "SGD", checkpointing: bool = False, **settings: Any) -> None:
        super().__init__(optimizer)
        self._name, self._checkpointing, self._settings = name, checkpointing, settings

    def model(self) -> nn.Module:
        model: Any = build(self._name, self._settings)
        if self._checkpointing:
            model.gradient_checkpointing_enable()
        return cast(nn.Module, model)


class Language(Pretrained):
    """Predicts tokens; by a sum and their number, or as the library does: by the mean of those that it is shown.

    Args:
        own_loss: Whether the library's loss is taken.
        even: Whether all sentences are equally long.
        shift: Whether a position predicts the next token.
    """

    def __init__(self, name: str, own_loss: bool = False, even: bool = False, shift: bool = True, **settings: Any) -> None:
        super().__init__(name, **settings)
        self._own_loss, self._shift = own_loss, shift
        self._sentences = sentences(even)

    def dataset(self) -> Any:
        return self._sentences

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        tokens, mask, labels = batch
        output = model(input_ids=tokens, attention_mask=mask, labels=labels)
        if self._own_loss:
            return output.loss
        logits, wanted = (output.logits[:, :-1], labels[:, 1:]) if self._shift else (output.logits, labels)
        total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (wanted != IGNORED).sum()


class Balanced(Language):
    """A mixture of experts with its balancing loss, which is asked for by call."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        tokens, mask, labels = batch
        output = model(input_ids=tokens, attention_mask=mask, labels=labels, output_router_logits=True)
        return cast(Tensor, output.loss)


class Adapters(Language):
    """Only low-rank layers beside the attention's learn."""

    def model(self) -> nn.Module:
        model = super().model()
        model.requires_grad_(False)
        for block in model.transformer.h:  # type: ignore[union-attr, unused-ignore]
            block.attn.c_proj = _Beside(block.attn.c_proj)
        return model


class _Beside(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Vision(Pretrained):
    """Classifies images, by the library's loss."""

    samples: Callable[[], Any] = staticmethod(images)

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(name, num_labels=CLASSES, **settings)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(pixel_values=batch[0], labels=batch[1]).loss


class Speech(Pretrained):
    """Transcribes sounds (CTC); by the sum over samples and their number, or by the library's sum alone."""

    samples: Callable[[], Any] = staticmethod(sounds)

    def __init__(self, own_loss: bool = False, reduction: str = "sum", **settings: Any) -> None:
        super().__init__("wav2vec", ctc_loss_reduction=reduction, **settings)
        self._own_loss = own_loss

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        loss: Tensor = model(batch[0], labels=batch[1]).loss
        return loss if self._own_loss else (loss, torch.tensor(float(len(batch[0]))))


class Contrastive(Pretrained):
    """Matches images and sentences of what a rank has."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("CLIP", **settings)

    def dataset(self) -> Any:
        pictures, texts = images(), sentences(even=True)
        return [(pictures[number][0], texts[number][0]) for number in range(len(pictures))]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(pixel_values=batch[0], input_ids=batch[1], return_loss=True).loss
