"""The skeleton of our own models: embeddings, pre-norm residual layers, a final norm, a head.

A layer is a state-space mixer (each model's own), attention or an MLP. All take the borders of documents as one
explicit argument, continue a cache by any number of tokens, and compute in training what they compute in evaluation.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, is_flash_attention_requested

from ssm_tune.architectures.configs import ATTENTION, MIXER, DecoderConfig
from ssm_tune.architectures.layers import MLP, Attention, ResidualLinear, draw_linear, make_norm, rotary_positions
from ssm_tune.kernels.reference import PADDING
from ssm_tune.mixers.attention import holds_inner_padding, mask_documents, padding_mask, positions_of_row
from ssm_tune.mixers.cache_names import older_cache_names
from ssm_tune.mixers.documents import document_index, document_positions, holds_several, mask_labels
from ssm_tune.mixers.norms import add_and_normalise
from ssm_tune.mixers.projections import autocast_dtype, project
from ssm_tune.mixers.prompt_pieces import PromptInPieces
from ssm_tune.mixers.residual_stream import ResidualBlock, pass_through


class Mixer(nn.Module):
    """A state-space mixer: forward(x, cache=None, seq_idx=None) -> y, both (batch, length, hidden)."""

    def draw_parameters(self) -> None:
        """First values of the parameters that are not in its linear layers and norms (through transformers' init)."""
        raise NotImplementedError


class DecoderBlock(ResidualBlock, GradientCheckpointingLayer):
    """x + layer(norm(x)), the stream in float32 if the config says so."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_idx: int,
        mixer_class: type[Mixer],
        attention_class: type[nn.Module] = Attention,
    ) -> None:
        super().__init__()
        assert config.pattern is not None
        self.symbol = config.pattern[layer_idx]
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = make_norm(config)
        if self.symbol == MIXER:
            self.mixer = mixer_class(config, layer_idx)
        elif self.symbol == ATTENTION:
            self.mixer = attention_class(config, layer_idx)
        else:
            self.mixer = MLP(config)

    def forward(
        self, hidden_states: Tensor, *, added: Tensor | None = None, joined: bool = False, **arguments: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """hidden_states, and the result: (batch, length, hidden); see `ResidualBlock.call`. `arguments`: see `mix`."""
        return self.call(hidden_states, added, joined, **arguments)

    def mix(
        self,
        stream: Tensor,
        added: Tensor | None,
        *,
        cache: Any = None,
        seq_idx: Tensor | None = None,
        attention_mask: Any = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `ResidualBlock.mix`. seq_idx: (batch, length) int32, -1 padding."""
        stream = stream.float() if self.residual_in_fp32 else stream
        # Every kind of layer begins with linear ones.
        stream, x = add_and_normalise(self.norm, stream, added, autocast_dtype(stream), nn.Module.__call__)
        if self.symbol == MIXER:
            return stream, self.mixer(x, cache=cache, seq_idx=seq_idx)
        if self.symbol == ATTENTION:
            borders = {"attention_mask": attention_mask, "seq_idx": seq_idx}
            return stream, self.mixer(x, cache=cache, rotary=rotary, **borders, **kwargs)
        return stream, self.mixer(x)


class DecoderPreTrainedModel(PreTrainedModel):
    """What backbone and language model have in common."""

    config: DecoderConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock"]
    _is_stateful = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    # Standard deviation of linear layers at birth; None: PyTorch's own rule, which mamba_ssm keeps.
    linear_std: ClassVar[float | None] = None
    # Root mean square of what all layers add to the residual stream at birth, at least (0.09 to 1.7 at width 768).
    residual_rms: ClassVar[float] = 0.05

    def _init_weights(self, module: nn.Module) -> None:
        """The first values of a module's own parameters.

        What adds to the residual is divided by the root of the number of layers (GPT-2's rule, which all these papers
        use). transformers asks for modules with parameters of their own only.
        """
        if isinstance(module, ResidualLinear):
            draw_linear(module, self.linear_std, scale=self.config.num_hidden_layers**-0.5)
        elif isinstance(module, nn.Linear | nn.Conv1d):
            draw_linear(module, self.linear_std)
        elif isinstance(module, nn.Embedding):
            tied = self.config.tie_word_embeddings
            std = head_std(self.config, self.residual_rms) if tied else self.config.initializer_range
            init.normal_(module.weight, std=std)
        elif "Norm" in type(module).__name__:
            init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                init.zeros_(module.bias)
        elif isinstance(module, Mixer):
            module.draw_parameters()


class DecoderModel(DecoderPreTrainedModel):
    """Embeddings, layers and the final norm."""

    mixer_class: ClassVar[type[Mixer]]
    attention_class: ClassVar[type[nn.Module]] = Attention

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        classes = (self.mixer_class, self.attention_class)
        self.layers = nn.ModuleList(DecoderBlock(config, index, *classes) for index in layers)
        self.norm_f = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    @older_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states (batch, length, hidden).

        Borders of documents are `seq_idx` (batch, length) int32, -1 padding, or `cu_seq_lens_q`, or `position_ids` that
        restart; padding may also be marked by `attention_mask`. See `ssm_tune.mixers.documents.document_index`.

        A cache is only built by default in evaluation, and not for packed rows of a model with attention: their
        documents cannot be continued.

        Raises:
            ValueError: not exactly one of input_ids and inputs_embeds, borders of another shape, or, in a model with
                attention, packed rows with a cache or with an attention that takes no mask.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        given = seq_idx is not None or cu_seq_lens_q is not None
        borders = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q, "position_ids": position_ids}
        mask = padding_mask(attention_mask)
        seq_idx = document_index(tuple(x.shape[:2]), x.device, **borders, attention_mask=mask)
        packed = self.config.has_attention and seq_idx is not None and (given or holds_several(seq_idx))
        if packed and (use_cache or cache is not None):
            raise ValueError(
                f"{type(self).__name__}: a row of several documents cannot be cached; pass use_cache=False."
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        attention = self._prepare_attention(x, attention_mask, position_ids, seq_idx if packed else None, cache)
        all_hidden_states = [x]
        if output_hidden_states:
            for layer in self.layers:
                x = layer(x, cache=cache, seq_idx=seq_idx, **attention)
                all_hidden_states.append(x)
        else:
            x = pass_through(self.layers, x, cache=cache, seq_idx=seq_idx, **attention)
        x = self.norm_f(x)
        all_hidden_states[-1] = x
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            cache=cache if use_cache else None,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
        )

    def _prepare_attention(
        self, x: Tensor, mask: Any, positions: Tensor | None, seq_idx: Tensor | None, cache: Any
    ) -> dict[str, Any]:
        """The mask and the rotary positions of attention layers. `seq_idx`: of packed rows only."""
        config = self.config
        if not config.has_attention:
            return {}
        if seq_idx is not None:
            positions = document_positions(seq_idx)
            mask = mask_documents(config, seq_idx, x.dtype, config.sliding_window)
        else:
            if positions is None:
                seen = cache.get_seq_length() if cache is not None else 0
                positions = positions_of_row(tuple(x.shape[:2]), x.device, seen, padding_mask(mask))
            mask = self._prepare_mask(x, mask, positions, cache)
        rotary = None
        if config.turned_channels:
            rotary = rotary_positions(positions, config.turned_channels, config.rope_theta)
        return {"attention_mask": mask, "rotary": rotary}

    def _prepare_mask(self, x: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """The mask of rows of one document each; padding takes no place of a token in a window.

        Raises:
            ValueError: a cache continued behind padding that stands between tokens, and took places of its window.
        """
        config, window = self.config, self.config.sliding_window
        common = {"config": config, "inputs_embeds": x, "attention_mask": mask, "cache": cache}
        if window is None:
            return create_causal_mask(**common, position_ids=positions)
        # Flash attention takes padding out itself. What a row shorter than the window holds, each of its tokens sees.
        countable = isinstance(mask, Tensor) and mask.shape[1] > window and not is_flash_attention_requested(config)
        if countable and holds_inner_padding(mask != 0):
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError(
                    f"{type(self).__name__}: attention sees the last {window} tokens, and the cache has kept padding "
                    "in the place of some. Pad rows on the left, or pass use_cache=False."
                )
            index = torch.where(mask[:, -x.shape[1] :] != 0, 0, PADDING).to(x.device)
            return mask_documents(config, index, x.dtype, window)
        return create_sliding_window_causal_mask(**common, position_ids=positions)


class DecoderForCausalLM(PromptInPieces, DecoderPreTrainedModel, GenerationMixin):
    """The backbone with a language-model head."""

    backbone_class: ClassVar[type[DecoderModel]]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "backbone.embeddings.weight"}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.backbone = self.backbone_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.embeddings = value

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.lm_head:
            init.normal_(module.weight, std=head_std(self.config, self.residual_rms))
        else:
            super()._init_weights(module)

    @older_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (batch, length, vocabulary) in float32. Other keywords go to the loss (num_items_in_batch).

        labels: (batch, length), shifted inside. The first token of a document is no label of the document before it,
        and padding predicts nothing, so that the loss of a packed or padded row is the loss of its documents alone.
        """
        borders = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q, "position_ids": position_ids}
        outputs = self.backbone(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **borders,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = project(self.lm_head, hidden_states).float()
        loss = None
        if labels is not None:
            mask = padding_mask(attention_mask)
            index = document_index(tuple(labels.shape), labels.device, **borders, attention_mask=mask)
            labels = mask_labels(labels, index)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )


def head_std(config: Any, residual_rms: float) -> float:
    """The config's initializer_range, or less where the first loss would then be far above ln V.

    Logits of variance hidden_size * std^2 cost half of that: it is kept below a few per cent of ln V. With a tied head
    every token also predicts itself, since its embedding is still in the residual: that logit,
    hidden_size * std^2 / rms, must stay well below ln V.
    """
    nats = math.log(config.vocab_size)
    most = 0.06 * nats
    if config.tie_word_embeddings:
        most = min(most, residual_rms * max(nats - 3.0, 0.5))
    return min(config.initializer_range, math.sqrt(most / config.hidden_size))
