"""Settings that are right alone and wrong together, and what a recipe cannot do without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssm_tune.recipe_checks import nearest, show
from ssm_tune.recipe_text import Mistakes

_FROM_SCRATCH = ("size", "dimensions", "pattern", "attention_ratio", "mlp_ratio", "layers", "attention_every", "mixer")
_OF_A_CHECKPOINT = ("revision", "load_in_4bit", "load_in_8bit")
_SSM_PARAMETERS = ("A_log", "D", "dt_bias")


def check_combinations(
    values: Mapping[str, Any], sections: Mapping[str, dict[str, Any]], mistakes: Mistakes, complete: bool
) -> None:
    """complete: model and data must be there (they may be objects in Python)."""
    _check_model(sections["model"], mistakes, complete)
    _check_tokenizer(sections["tokenizer"], sections["model"], mistakes)
    _check_data(sections["data"], sections["training"], mistakes, complete)
    _check_adapter(sections["adapter"], sections["model"], mistakes)
    _check_training(sections["training"], sections["data"], mistakes, complete)
    _check_hub(sections["hub"], sections["adapter"], mistakes)


def _given(section: Mapping[str, Any], *keys: str) -> list[str]:
    """Those of the keys that say something: neither absent nor null, false or empty."""
    return [key for key in keys if section.get(key) not in (None, False, {}, [], "")]


def _check_model(model: Mapping[str, Any], mistakes: Mistakes, complete: bool) -> None:
    if _given(model, "name", "architecture") == ["name", "architecture"]:
        mistakes.add("model", "has both name (a checkpoint) and architecture (random weights). Keep one")
    elif _given(model, "name"):
        for key in _given(model, *_FROM_SCRATCH):
            mistakes.add(f"model.{key}", "belongs to model.architecture; a checkpoint (model.name) has its own")
    elif _given(model, "architecture"):
        for key in _given(model, *_OF_A_CHECKPOINT):
            mistakes.add(f"model.{key}", "belongs to a checkpoint (model.name), not to model.architecture")
    elif complete:
        mistakes.add("model", "needs a name (a Hub name or a folder) or an architecture")
    if _given(model, "load_in_4bit", "load_in_8bit") == ["load_in_4bit", "load_in_8bit"]:
        mistakes.add("model", "has both load_in_4bit and load_in_8bit. Keep one")
    if _given(model, "pattern"):
        for key in _given(model, "attention_ratio", "mlp_ratio", "attention_every"):
            mistakes.add(f"model.{key}", "says again what model.pattern says layer by layer. Keep one")
    if _given(model, "attention_ratio", "attention_every") == ["attention_ratio", "attention_every"]:
        mistakes.add("model", "has both attention_ratio and attention_every. Keep one")


def _check_tokenizer(tokenizer: Mapping[str, Any], model: Mapping[str, Any], mistakes: Mistakes) -> None:
    if _given(tokenizer, "train"):
        if _given(tokenizer, "name"):
            mistakes.add("tokenizer", "has both name and train. Keep one")
        if _given(model, "name"):
            mistakes.add(
                "tokenizer.train", "makes a new vocabulary, which a checkpoint (model.name) has no embeddings for"
            )
    elif _given(tokenizer, "vocab_size"):
        mistakes.add("tokenizer.vocab_size", "needs tokenizer.train: bpe; a ready tokenizer has its own size")


def _check_data(data: Mapping[str, Any], training: Mapping[str, Any], mistakes: Mistakes, complete: bool) -> None:
    if complete and "train" not in data:
        mistakes.add("data", "needs train, a list such as [{path: rows.jsonl}]")
    elif complete and data.get("train") in (None, []):
        mistakes.add("data.train", "is empty; it needs at least one entry such as {path: rows.jsonl}")
    if data.get("eval") == []:
        mistakes.add("data.eval", "is empty; leave it out, or name held-out rows")
    if _given(data, "eval", "eval_fraction") == ["eval", "eval_fraction"]:
        mistakes.add("data", "has both eval and eval_fraction. Keep one (data.eval_fraction=null takes it away)")
    if data.get("batch_tokens") is not None and training.get("gradient_accumulation_steps") is not None:
        mistakes.add("data.batch_tokens", "sets training.gradient_accumulation_steps. Give one of them")
    _check_stream(data, training, mistakes)
    if data.get("isolate") is False and training.get("packing") is False:
        mistakes.add("data.isolate", "false has no effect with training.packing: false; rows never meet unpacked")


def _check_stream(data: Mapping[str, Any], training: Mapping[str, Any], mistakes: Mistakes) -> None:
    streamed = _given(data, "streaming", "prepared")
    if not streamed:
        return
    if training.get("max_steps") in (None, -1):
        mistakes.add("training.max_steps", f"is missing: with data.{streamed[0]} an epoch has no length")
    if training.get("packing") is False:
        mistakes.add("training.packing", f"cannot be false with data.{streamed[0]}: a stream is packed into rows")
    sources = [source for source in data.get("train") or [] if isinstance(source, dict)]
    if len(sources) > 1 and not any(source.get("weight") for source in sources):
        mistakes.add("data.train", "has several sources in a stream, whose lengths are not known: give them a weight")
    for index, source in enumerate(sources):
        if "[" in str(source.get("split", "")):
            mistakes.add(
                f"data.train.{index}.split",
                "cannot be a part of a stream, which is read whole; data.eval_fraction sets some of it aside",
            )


def _check_adapter(adapter: Mapping[str, Any], model: Mapping[str, Any], mistakes: Mistakes) -> None:
    full = adapter.get("method") == "full" or not adapter
    if adapter.get("method") == "full":
        for key in adapter:
            if key != "method":
                mistakes.add(f"adapter.{key}", "belongs to method: lora; with method: full every weight is trained")
    if full:
        for key in _given(model, "load_in_4bit", "load_in_8bit"):
            mistakes.add(f"model.{key}", "freezes the weights: it needs an adapter section (adapter.method: lora)")
    targets = adapter.get("targets", "all")
    if isinstance(targets, str) and targets not in ("all", "portable"):
        otherwise = f" A name stands in a list: [{targets}]"
        mistakes.add("adapter.targets", f"cannot be {show(targets)}.{nearest(targets, ('all', 'portable'), otherwise)}")
    if targets == [] or (isinstance(targets, list) and "" in targets):
        mistakes.add("adapter.targets", "names nothing to adapt; write all, portable or names of projections")
    saved = adapter.get("modules_to_save")
    for name in saved if isinstance(saved, list) else ():
        if name in _SSM_PARAMETERS:
            mistakes.add(
                "adapter.modules_to_save", f"cannot hold {name}, a parameter: write adapter.train_also: [{name}]"
            )


def _check_training(training: Mapping[str, Any], data: Mapping[str, Any], mistakes: Mistakes, complete: bool) -> None:
    if training.get("fp16") is True:
        mistakes.add("training.fp16", "overflows in the state-space recurrence. Use bf16, or float32")
    if training.get("packing") is True and "max_length" in training and training["max_length"] is None:
        mistakes.add("training.max_length", "is the length of a packed row; with packing: true it cannot be null")
    if training.get("completion_only_loss") is True and training.get("assistant_only_loss") is True:
        mistakes.add("training", "has both completion_only_loss and assistant_only_loss. Keep one")
    has_eval = not complete or bool(_given(data, "eval", "eval_fraction"))
    strategy = training.get("eval_strategy", default_eval_strategy(training) if has_eval else "no")
    if not has_eval:
        if strategy != "no":
            mistakes.add("training.eval_strategy", "needs held-out rows: data.eval or data.eval_fraction")
        elif training.get("eval_on_start") is True:
            mistakes.add("training.eval_on_start", "needs held-out rows: data.eval or data.eval_fraction")
    saving = training.get("save_strategy", "steps")
    if training.get("load_best_model_at_end") is True and strategy != saving and (saving != "best" or strategy == "no"):
        problem = f"needs eval_strategy and save_strategy to be equal, not {strategy} and {saving}"
        mistakes.add("training.load_best_model_at_end", problem)


def default_eval_strategy(training: Mapping[str, Any]) -> str:
    """When a run with held-out rows is evaluated if its recipe does not say: every eval_steps, or after each epoch."""
    return "steps" if "eval_steps" in training else "epoch"


def _check_hub(hub: Mapping[str, Any], adapter: Mapping[str, Any], mistakes: Mistakes) -> None:
    if _given(hub, "push") and not _given(hub, "repo"):
        mistakes.add("hub.push", "needs hub.repo: owner/name")
    if _given(hub, "repo") and not _given(hub, "push"):
        mistakes.add("hub.repo", "is not used without hub.push: adapter or merged")
    if hub.get("push") == "adapter" and (not adapter or adapter.get("method") == "full"):
        mistakes.add("hub.push", "cannot be adapter: a full fine-tune has none. Write merged, the model itself")
    repo = hub.get("repo")
    if isinstance(repo, str) and repo.count("/") > 1:
        mistakes.add("hub.repo", f"must be owner/name, not {show(repo)}")
