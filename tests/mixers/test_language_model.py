"""The patched causal language model and backbone answer as stock's do, and take document borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import alone, alone_logits, make_documents, packed, packed_rows, relative_error, run, worst
from tiny import PURE, tiny_model
from torch.nn import functional as F
from trl.trainer.utils import add_fused_lm_head

from ssm_tune.mixers import patch_model


def both(kind: str) -> tuple[Any, Any]:
    return tiny_model(kind), patch_model(tiny_model(kind))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(6, 260, (2, 9))


@pytest.mark.parametrize("kind", PURE)
def test_outputs_are_those_of_stock(kind: str, ids: torch.Tensor) -> None:
    stock, model = both(kind)
    embeds = stock.get_input_embeddings()(ids).detach()
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "return_dict": False},
        {"input_ids": ids, "output_hidden_states": True, "use_cache": False},
        {"input_ids": ids, "logits_to_keep": 2, "use_cache": False},
        {"inputs_embeds": embeds, "use_cache": False},
        {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(5), "use_cache": False},
        {"input_ids": ids, "labels": ids, "return_dict": False, "use_cache": False},
    ]
    for call in calls:
        wanted, got = stock(**call), model(**call)
        assert type(got) is type(wanted)
        pairs = zip(wanted, got, strict=True) if isinstance(got, tuple) else [(wanted[key], got[key]) for key in wanted]
        for a, b in pairs:
            for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
                if isinstance(x, torch.Tensor):
                    assert x.shape == y.shape and relative_error(y, x) < 1e-5, call
        assert list(got) == list(wanted) if not isinstance(got, tuple) else len(got) == len(wanted)
        wanted, got = stock.backbone(**call_of_backbone(call)), model.backbone(**call_of_backbone(call))
        assert relative_error(got[0], wanted[0]) < 1e-5


def call_of_backbone(call: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key not in ("labels", "num_items_in_batch", "logits_to_keep")}


@pytest.mark.parametrize("kind", PURE)
def test_a_cache_is_made_when_stock_makes_one(kind: str, ids: torch.Tensor) -> None:
    model = patch_model(tiny_model(kind))
    assert model(ids).cache is not None and model(ids, use_cache=False).cache is None
    assert model.train()(ids).cache is None
    model.gradient_checkpointing_enable()
    assert model(ids, use_cache=True).cache is None
    with pytest.warns(FutureWarning, match="cache_params"):
        cache = model.eval()(ids[:, :5]).cache
        continued = model(ids[:, 5:], cache_params=cache)
    assert relative_error(continued.logits, model(ids).logits[:, 5:]) < 1e-5


def test_not_exactly_one_input_is_refused(ids: torch.Tensor) -> None:
    model = patch_model(tiny_model("mamba"))
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=torch.zeros(2, 9, 32))
    with pytest.raises(ValueError, match="exactly one"):
        model.backbone()


@pytest.mark.parametrize("kind", PURE)
def test_backbone_takes_borders(kind: str) -> None:
    """TRL's trainer calls the backbone itself, with what its collator makes."""
    stock, model = both(kind)
    layout = packed(make_documents(), ("seq_idx", "position_ids", "cu_seq_lens_q"))
    extras = {"cu_seq_lens_k": layout.inputs["cu_seq_lens_q"], "max_length_q": 20, "max_length_k": 20}
    got = model.train().base_model(**layout.inputs, **extras, use_cache=False).last_hidden_state
    wanted = [stock.base_model(**single.inputs).last_hidden_state[0] for single in alone(make_documents())]
    assert worst(layout.cut(got), wanted) < 1e-5


@pytest.mark.parametrize("kind", PURE)
def test_loss_of_a_packed_row_is_that_of_its_documents(kind: str) -> None:
    model = patch_model(tiny_model(kind))
    documents = make_documents()
    tokens = sum(len(document) - 1 for document in documents)
    wanted = sum(
        F.cross_entropy(logits[:-1], document[1:], reduction="sum").item()
        for logits, document in zip(alone_logits(kind), documents, strict=True)
        if len(document) > 1
    )
    for lay_out in (packed, packed_rows):
        layout = lay_out(documents)
        assert run(model, layout, tokens).loss.item() == pytest.approx(wanted / tokens, rel=1e-5)
        mean = model(**layout.inputs, labels=layout.labels, use_cache=False).loss
        assert mean.item() == pytest.approx(wanted / tokens, rel=1e-5)


@pytest.mark.parametrize("kind", PURE)
def test_fused_head_of_the_trainer(kind: str) -> None:
    model = patch_model(tiny_model(kind))
    documents = make_documents()
    add_fused_lm_head(model)
    layout = packed(documents, ("seq_idx", "position_ids", "cu_seq_lens_q"))
    extras = {"cu_seq_lens_k": layout.inputs["cu_seq_lens_q"], "max_length_q": 20, "max_length_k": 20}
    labels = layout.labels.clone()
    for row, begin, _ in layout.places:
        labels[row, begin] = -100
    wanted = [F.log_softmax(logits[:-1], -1) for logits in alone_logits(kind)]
    wanted = [logs.gather(1, document[1:, None])[:, 0] for logs, document in zip(wanted, documents, strict=True)]
    output = model.train()(**layout.inputs, **extras, labels=labels, fused_lm_head=True)
    assert relative_error(output.log_probs[output.label_mask], torch.cat(wanted)) < 1e-5
