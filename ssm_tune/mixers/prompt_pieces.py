"""Prompts that generate reads in pieces (`prefill_chunk_size`), for models without attention layers.

transformers asks the cache how many tokens it has seen, which attention layers alone count, and refuses. States need no
number: what is passed is what follows them, and each piece continues them exactly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class PromptInPieces:
    """Before `GenerationMixin` in the bases of a causal language model whose forward continues a cache by any number of
    tokens.
    """

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> Any:
        """The output of the last piece; with attention layers, or no size of pieces, as transformers has it.

        input_ids: (batch, length), all of them new; `attention_mask` also covers what the cache has seen.
        """
        size, cache = generation_config.prefill_chunk_size, model_kwargs.get("cache")
        if size is None or cache is None or not all(cache.is_linear) or model_kwargs.get("inputs_embeds") is not None:
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        later, output = input_ids.shape[1], None
        for piece in input_ids.split(size, dim=1):
            later -= piece.shape[1]
            seen = {
                name: model_kwargs[name][..., : model_kwargs[name].shape[-1] - later]
                for name in ("attention_mask", "position_ids")
                if model_kwargs.get(name) is not None
            }
            inputs = self.prepare_inputs_for_generation(
                piece, is_first_iteration=is_first_iteration, **{**model_kwargs, **seen}
            )
            output = self(**inputs, return_dict=True)
        return output
