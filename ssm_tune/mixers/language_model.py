"""Block, backbone and causal language model of the families that are state-space layers only (mamba, falcon_mamba,
mamba2).

Stock drops the borders of documents on the way down: the causal language model does not pass them to the backbone, the
backbone not to its blocks, the blocks not to their mixers. These do, as one explicit argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import slice_logits_to_keep

from ssm_tune.kernels.recompute import recomputed
from ssm_tune.mixers.cache_names import older_cache_names
from ssm_tune.mixers.classes import Patched
from ssm_tune.mixers.documents import document_index, mask_labels
from ssm_tune.mixers.layer_graphs import run_blocks
from ssm_tune.mixers.norms import add_and_normalise, last_norm
from ssm_tune.mixers.projections import input_dtype, project
from ssm_tune.mixers.prompt_pieces import PromptInPieces
from ssm_tune.mixers.residual_stream import ResidualBlock, pass_through


class Block(ResidualBlock, Patched):
    """Pre-norm and residual round a mixer."""

    @older_cache_names
    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        added: Tensor | None = None,
        joined: bool = False,
        instead: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """hidden_states, and the result: (batch, length, hidden), the residual stream; see `ResidualBlock.call`.

        instead: computes the result in this block's place.
        """
        if instead is not None:
            return instead(hidden_states)
        given = {"cache": cache, "attention_mask": attention_mask, "seq_idx": seq_idx}
        return self.call(hidden_states, added, joined, **given)

    def mix(self, stream: Tensor, added: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """See `ResidualBlock.mix`; `arguments` are the mixer's.

        The stream goes into the norm as it is, float32 if `residual_in_fp32`; stock rounds it to the norm's dtype
        before.
        """
        stream = stream.float() if self.residual_in_fp32 else stream
        mixer = self.mixer
        dtype = input_dtype(mixer.in_proj, stream, mixer.conv1d.weight.dtype)
        with recomputed(stream):
            stream, normed = add_and_normalise(self.norm, stream, added, dtype)
            return stream, mixer(normed, **arguments)


class Backbone(Patched):
    """Embeddings, blocks and the final norm."""

    @older_cache_names
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As stock, and `seq_idx` (batch, length) int32, -1 padding, or `cu_seq_lens_q`, or `position_ids` that
        restart.

        Which of them counts is said in `documents.document_index`. Other keywords (cu_seq_lens_k, max_length_q, ...)
        say what these have said already.

        Raises:
            ValueError: not exactly one of input_ids and inputs_embeds, or borders of another shape.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:
            use_cache = False
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        seq_idx = document_index(
            tuple(hidden_states.shape[:2]),
            hidden_states.device,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            position_ids=position_ids,
            attention_mask=attention_mask,
        )
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        all_hidden_states = []
        recorded = None
        if cache is None and not output_hidden_states:
            recorded = run_blocks(self, hidden_states, seq_idx)
        if recorded is not None:
            hidden_states = recorded
        elif not output_hidden_states:
            hidden_states = pass_through(self.layers, hidden_states, cache=cache, seq_idx=seq_idx)
        else:
            for block in self.layers:
                hidden_states = block(hidden_states, cache=cache, seq_idx=seq_idx)
                all_hidden_states.append(hidden_states)
        hidden_states = last_norm(self.norm_f, hidden_states)
        all_hidden_states.append(hidden_states)
        output = _output_class(self, "Model", "Output")(
            last_hidden_state=hidden_states,
            cache=cache if use_cache else None,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


class CausalLM(PromptInPieces, Patched):
    """The backbone with a language-model head."""

    @older_cache_names
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As stock, with the borders that `Backbone.forward` takes. Other keywords go to the loss (num_items_in_batch).

        labels: (batch, length), shifted inside. The first token of a document is no label of the document before it,
        and padding predicts nothing, so that the loss of a packed or padded row is the loss of its documents alone.
        """
        source = input_ids if inputs_embeds is None else inputs_embeds
        if source is not None:
            seq_idx = document_index(
                tuple(source.shape[:2]),
                source.device,
                seq_idx=seq_idx,
                cu_seq_lens_q=cu_seq_lens_q,
                position_ids=position_ids,
                attention_mask=attention_mask,
            )
        outputs = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            use_cache=use_cache,
            seq_idx=seq_idx,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = project(self.lm_head, hidden_states).float()
        loss = None
        if labels is not None:
            labels = mask_labels(labels, seq_idx)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = _output_class(self, "ForCausalLM", "CausalLMOutput")(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


def _output_class(model: Patched, ending: str, output_ending: str) -> type:
    """The stock output class beside the stock model class: MambaModel -> MambaOutput."""
    stock = type(model).stock
    return getattr(sys.modules[stock.__module__], stock.__name__.removesuffix(ending) + output_ending)
