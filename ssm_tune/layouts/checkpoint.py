"""A checkpoint of any layout, seen as transformers sees it: its config, and its tensors under transformers' names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssm_tune.layouts import huggingface, megatron, mistral, state_spaces
from ssm_tune.layouts.layout import Layout
from ssm_tune.layouts.source import Source
from ssm_tune.layouts.tensors import StoredTensor
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# In this order: a repository that holds two (Codestral's) is read as Hugging Face's.
LAYOUTS: tuple[Layout, ...] = (huggingface.LAYOUT, state_spaces.LAYOUT, mistral.LAYOUT, megatron.LAYOUT)


@dataclass
class Checkpoint:
    """A checkpoint whose layout and config are known and whose weights are read when asked for."""

    source: Source
    layout: Layout
    config: PreTrainedConfig

    @property
    def default_tokenizer(self) -> str | None:
        """The tokenizer of its layout's published models, for a checkpoint that carries none."""
        return self.layout.default_tokenizer

    def weights(self) -> dict[str, StoredTensor]:
        """Its tensors by transformers' names, in the order of the files; a Hub checkpoint's are fetched now.

        Raises:
            RecipeError: no weight files, a file that is missing, truncated or corrupt, two tensors of one name.
        """
        files = self.layout.weight_files(self.source)
        if not files:
            raise RecipeError(
                f"{self.source.label}: its {self.layout.name} config is there and its weights are not "
                f"({self.source.listing()}). Fetch them too."
            )
        return self.layout.read_weights(files, self.config)

    def name_in_file(self, name: str) -> str:
        """What its files call a tensor of transformers' model."""
        return self.layout.name_in_file(name, self.config)


def detect(folder: str | Path) -> Layout:
    """The layout of a local folder.

    Raises:
        RecipeError: no layout's config is in it.
    """
    return _detect(Source(str(folder)))


def open_checkpoint(
    name: str, revision: str | None = None, *, local_only: bool = False, key: str = "model.name"
) -> Checkpoint:
    """Find a checkpoint and read its config; of a Hub repository nothing else is fetched yet.

    Args:
        name: a folder or a Hub repository.
        revision: a Hub repository's branch, tag or commit.
        local_only: use the Hub's local cache alone.
        key: what the messages call the name.

    Raises:
        RecipeError: it is not there, cannot be had, is of no known layout, or transformers cannot express its config.
    """
    source = Source(name, revision, local_only, key)
    layout = _detect(source)
    config = layout.read_config(source)
    config.name_or_path = name if source.folder is None else str(source.folder)
    return Checkpoint(source, layout, config)


def _detect(source: Source) -> Layout:
    found = (layout for layout in LAYOUTS if layout.recognise(source))
    first = next(found, None)
    if first is None:
        raise RecipeError(_unknown(source))
    if source.folder is None or first.weight_files(source):
        return first  # on the Hub the config alone decides, so that no file of another layout is fetched
    # Of a folder with two configs only the second layout's weights may have been downloaded.
    return next((layout for layout in found if layout.weight_files(source)), first)


def _unknown(source: Source) -> str:
    if source.folder is None:
        from huggingface_hub import constants

        if source.local_only or constants.is_offline_mode():
            return (
                f"{source.label} is no folder here and not in the local Hub cache, and the Hub is not asked "
                f"(HF_HUB_OFFLINE is set, or this command works without it). Fetch it first with `hf download "
                f"{source.name}`, or name a local folder."
            )
        return f"{source.label}: its files are of no known layout ({_known()})."
    return (
        f"{source.label}: no known checkpoint layout ({source.listing()}). Expected config.json (Hugging Face, or "
        f"state-spaces' original), params.json (Mistral's Codestral) or "
        f"latest_checkpointed_iteration.txt (Megatron-LM), and the weights beside it."
    )


def _known() -> str:
    return ", ".join(layout.name for layout in LAYOUTS)
