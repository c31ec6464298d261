"""Backbone and causal language model of families with attention layers beside the state-space ones.

Everything but the borders of documents is left to transformers: these find the borders, give them to the mixers as
`seq_idx` (which stock passes on as a keyword, where it does not it is passed here) and to the attention layers as
positions and a mask that keeps every document to itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ssm_tune.mixers.attention import mask_documents, padding_mask, positions_of_row
from ssm_tune.mixers.cache_names import older_cache_names
from ssm_tune.mixers.classes import Patched
from ssm_tune.mixers.documents import document_index, document_positions, holds_several, mask_labels


class HybridBackbone(Patched):
    """A stock backbone whose forward takes document borders."""

    @older_cache_names
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As stock, and `seq_idx` (batch, length) int32, -1 padding, or `cu_seq_lens_q`, or `position_ids` that
        restart.

        A cache is only built by default in evaluation, and not for packed rows: their documents cannot be continued.

        Raises:
            ValueError: borders of another shape, packed rows with a cache, or with an attention that takes no mask; a
                mask of attention (batch, heads, length, length), which the mixers cannot go by.
        """
        source = input_ids if inputs_embeds is None else inputs_embeds
        if source is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        shape, device = tuple(source.shape[:2]), source.device
        mask = padding_mask(attention_mask)
        index = document_index(
            shape,
            device,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            position_ids=position_ids,
            attention_mask=mask,
        )
        given = seq_idx is not None or cu_seq_lens_q is not None
        if index is not None and (given or holds_several(index)):
            if use_cache or cache is not None:
                raise ValueError(
                    f"{type(self).__name__}: a row of several documents cannot be cached; pass use_cache=False."
                )
            use_cache = False
            position_ids = document_positions(index)
            full = mask_documents(self.config, index, self.get_input_embeddings().weight.dtype)
            attention_mask = {"full_attention": full, "linear_attention": None, "conv": None}
        else:
            use_cache = self._cache_by_default() if use_cache is None else use_cache
            if position_ids is None:
                seen = 0 if cache is None else cache.get_seq_length()
                position_ids = positions_of_row(shape, device, seen, mask)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            seq_idx=index,
            **kwargs,
        )

    def _cache_by_default(self) -> bool:
        return self.config.use_cache and not self.training


class HybridCausalLM(Patched):
    """A stock causal language model whose forward takes document borders."""

    @older_cache_names
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As stock, with the borders that `HybridBackbone.forward` takes.

        labels: (batch, length), shifted inside. The first token of a document is no label of the document before it,
        and padding predicts nothing, so that the loss of a packed or padded row is the loss of its documents alone.
        """
        if labels is not None:
            index = document_index(
                tuple(labels.shape),
                labels.device,
                seq_idx=seq_idx,
                cu_seq_lens_q=cu_seq_lens_q,
                position_ids=position_ids,
                attention_mask=padding_mask(attention_mask),
            )
            labels = mask_labels(labels, index)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            **kwargs,
        )


class JambaMambaLayer(Patched):
    """Jamba's layer round a Mamba mixer, which keeps keywords from its mixer in stock."""

    @older_cache_names
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states, and the result: (batch, length, hidden)."""
        mixed = self.mamba(
            self.input_layernorm(hidden_states), cache=cache, attention_mask=attention_mask, seq_idx=seq_idx
        )
        hidden_states = hidden_states + mixed
        return hidden_states + self.feed_forward(self.pre_ff_layernorm(hidden_states))
