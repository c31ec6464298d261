"""Hybrids take document borders and otherwise answer as stock does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import alone_logits, make_documents, packed, packed_rows, relative_error, run, worst
from tiny import HYBRID, tiny_config, tiny_model
from torch.nn import functional as F
from trl.trainer.utils import add_fused_lm_head

from ssm_tune.mixers import patch_model
from ssm_tune.mixers.documents import document_positions, holds_several


def both(kind: str, **changes: Any) -> tuple[Any, Any]:
    return tiny_model(kind, **changes), patch_model(tiny_model(kind, **changes))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(6, 260, (2, 9))


@pytest.mark.parametrize("kind", HYBRID)
def test_outputs_are_those_of_stock(kind: str, ids: torch.Tensor) -> None:
    stock, model = both(kind)
    embeds = torch.randn(2, 9, stock.config.hidden_size)
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "return_dict": False},
        {"input_ids": ids, "output_hidden_states": True, "use_cache": False},
        {"input_ids": ids, "logits_to_keep": 2, "use_cache": False},
        {"inputs_embeds": embeds, "use_cache": False},
        {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(5), "use_cache": False},
    ]
    if kind == "jamba":
        calls.append({"input_ids": ids, "labels": ids, "output_router_logits": True, "use_cache": False})
    for call in calls:
        wanted, got = stock(**call), model(**call)
        assert type(got) is type(wanted) and len(got) == len(wanted)
        pairs = zip(wanted, got, strict=True) if isinstance(got, tuple) else [(wanted[key], got[key]) for key in wanted]
        for a, b in pairs:
            for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
                if isinstance(x, torch.Tensor):
                    assert x.shape == y.shape and relative_error(y, x) < 1e-5, call


@pytest.mark.parametrize("kind", HYBRID)
def test_a_cache_is_made_in_evaluation_of_plain_rows(kind: str, ids: torch.Tensor) -> None:
    model = patch_model(tiny_model(kind))
    assert model(ids).cache is not None and model(ids, use_cache=False).cache is None
    assert model.train()(ids).cache is None
    assert model(ids, use_cache=True).cache is not None
    layout = packed(make_documents((5, 3)))
    model.eval()
    assert model(**layout.inputs).cache is None
    with pytest.raises(ValueError, match="cannot be cached"):
        model(**layout.inputs, use_cache=True)


@pytest.mark.parametrize("kind", HYBRID)
def test_packed_rows_in_evaluation_need_no_word_about_caches(kind: str) -> None:
    """With a cache, stock takes restarting positions for those of one document."""
    model = patch_model(tiny_model(kind))
    for borders in (("seq_idx",), ("position_ids",)):
        layout = packed(make_documents(), borders)
        with torch.no_grad():
            got = layout.cut(model(**layout.inputs).logits)
        assert worst(got, alone_logits(kind)) < 1e-5, borders


@pytest.mark.parametrize("kind", HYBRID)
def test_eager_attention_keeps_documents_apart(kind: str) -> None:
    model = patch_model(tiny_model(kind))
    model.set_attn_implementation("eager")
    layout = packed(make_documents())
    with torch.no_grad():
        got = layout.cut(run(model, layout).logits)
    assert worst(got, alone_logits(kind)) < 1e-5


@pytest.mark.parametrize("kind", HYBRID)
def test_backbone_and_fused_head_of_the_trainer(kind: str) -> None:
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


@pytest.mark.parametrize("kind", HYBRID)
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
        assert run(model, lay_out(documents), tokens).loss.item() == pytest.approx(wanted / tokens, rel=1e-5)


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = patch_model(tiny_model("bamba"))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        run(model, packed(make_documents()))


def test_no_input_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        patch_model(tiny_model("bamba"))()


def test_a_classifier_over_a_patched_backbone() -> None:
    from transformers import AutoModelForSequenceClassification

    config = tiny_config("jamba", num_labels=2)
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    ids = torch.randint(6, 260, (2, 9))
    wanted = classifier(ids, use_cache=False).logits
    assert relative_error(patch_model(classifier)(ids, use_cache=False).logits, wanted) < 1e-5


def test_positions_of_documents() -> None:
    index = torch.tensor([[-1, -1, 0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 3, 3, -1, -1]])
    assert document_positions(index).tolist() == [[0, 0, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 0, 1, 0, 0]]
    assert holds_several(index) and not holds_several(torch.tensor([[-1, 2, 2, -1]]))
