"""Documents laid out in batches: packed in one form or another, padded on one side, or each alone.

A layout knows where its documents lie, so that a test can compare what a model gives for them with what it gives for
each alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tiny import tiny_model
from torch import Tensor

PAD = 0
# Borders at 15, 16, 32, 52 and 53: on and off the borders of chunks of 16 tokens, and two documents of one token.
LENGTHS = (15, 1, 16, 20, 1, 11)


@dataclass(frozen=True)
class Layout:
    """A batch and where its documents lie in it: (row, first token, number of tokens) each."""

    inputs: dict[str, Tensor]
    labels: Tensor
    places: list[tuple[int, int, int]]

    def cut(self, values: Tensor) -> list[Tensor]:
        """A tensor (rows, length, ...) cut into documents."""
        return [values[row, begin : begin + length] for row, begin, length in self.places]

    def to(self, device: str) -> Layout:
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Layout(inputs, self.labels.to(device), self.places)


def make_documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, 260, (length,), generator=generator) for length in lengths]


def alone(documents: list[Tensor]) -> Iterator[Layout]:
    """Each document in a batch of its own, without any mask or border."""
    for document in documents:
        yield Layout({"input_ids": document[None]}, document[None], [(0, 0, len(document))])


def _rows(documents: list[list[Tensor]], side: str) -> tuple[Tensor, Tensor, list[tuple[int, int, int]]]:
    """Input ids and document index of rows of documents, padded to the longest on one side."""
    length = max(sum(map(len, row)) for row in documents)
    ids = torch.full((len(documents), length), PAD)
    index = torch.full((len(documents), length), -1, dtype=torch.int32)
    places = []
    for number, row in enumerate(documents):
        begin = 0 if side == "right" else length - sum(map(len, row))
        for which, document in enumerate(row):
            ids[number, begin : begin + len(document)] = document
            index[number, begin : begin + len(document)] = which
            places.append((number, begin, len(document)))
            begin += len(document)
    return ids, index, places


def _positions(index: Tensor, places: list[tuple[int, int, int]]) -> Tensor:
    positions = torch.zeros_like(index, dtype=torch.long)
    for row, begin, length in places:
        positions[row, begin : begin + length] = torch.arange(length)
    return positions


def packed(documents: list[Tensor], borders: tuple[str, ...] = ("seq_idx", "position_ids")) -> Layout:
    """All documents in one row, with the borders in these forms."""
    ids, index, places = _rows([documents], "right")
    lengths = torch.tensor([0, *(len(document) for document in documents)])
    forms = {
        "seq_idx": index,
        "position_ids": _positions(index, places),
        "cu_seq_lens_q": lengths.cumsum(0).to(torch.int32),
    }
    return Layout({"input_ids": ids, **{name: forms[name] for name in borders}}, ids.clone(), places)


def packed_rows(documents: list[Tensor], side: str = "right") -> Layout:
    """The documents in two rows of different lengths, the shorter one padded."""
    ids, index, places = _rows([documents[::2], documents[1::2]], side)
    inputs = {"input_ids": ids, "seq_idx": index, "position_ids": _positions(index, places)}
    return Layout(inputs, ids.clone(), places)


def padded(documents: list[Tensor], side: str) -> Layout:
    """A row for each document, padded on one side, with an attention mask."""
    ids, index, places = _rows([[document] for document in documents], side)
    return Layout({"input_ids": ids, "attention_mask": (index >= 0).long()}, ids.clone(), places)


LAYOUTS: dict[str, Callable[[list[Tensor]], Layout]] = {
    "packed": packed,
    "packed, position_ids": lambda documents: packed(documents, ("position_ids",)),
    "packed, cu_seq_lens_q": lambda documents: packed(documents, ("cu_seq_lens_q", "position_ids")),
    "packed rows": packed_rows,
    "packed rows, left": lambda documents: packed_rows(documents, "left"),
    "left pads": lambda documents: padded(documents, "left"),
    "right pads": lambda documents: padded(documents, "right"),
}


@contextmanager
def stockin_pytorch() -> Iterator[None]:
    """Within, transformers' blocks compute with the PyTorch code that they carry, whatever packages are installed.

    A modeling file binds mamba_ssm's and causal_conv1d's functions by decorators when it is imported, and calls them
    for tensors on the CPU too, where they fail.
    """
    changed = []
    for file, module in list(sys.modules.items()):
        if file.startswith("transformers.models.") and ".modeling_" in file:
            changed += [(module, name, bound) for name, bound in vars(module).items() if _from_a_package(name, bound)]
    try:
        for module, name, bound in changed:
            setattr(module, name, in_pytorch(bound))
        yield
    finally:
        for module, name, bound in changed:
            setattr(module, name, bound)


def _from_a_package(name: str, bound: Any) -> bool:
    """Whether a modeling file's name is bound to what such a decorator made; where kernels is installed, a module."""
    decorated = isinstance(bound, torch.nn.Module) or hasattr(bound, "__wrapped__")
    return name.startswith(("causal_conv1d", "mamba")) and decorated


def in_pytorch(bound: Any) -> Callable[..., Any]:
    """The function below transformers' decorator."""
    if isinstance(bound, torch.nn.Module):
        bound = inspect.getclosurevars(type(bound).forward).nonlocals["func"]
    return inspect.unwrap(bound)


def run(model: Any, layout: Layout, tokens: int | None = None, **inputs: Any) -> Any:
    """The model's output for a layout; with `tokens`, its loss is a sum over labels divided by that number.

    On a CPU stock computes in PyTorch, see `stock_in_pytorch`; on a GPU with the packages that are installed.
    """
    loss = {} if tokens is None else {"labels": layout.labels, "num_items_in_batch": torch.tensor(tokens)}
    on_cpu = layout.labels.device.type == "cpu"
    with stockin_pytorch() if on_cpu else nullcontext():
        return model(**layout.inputs, **loss, use_cache=False, **inputs)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


@cache
def alone_logits(kind: str, device: str = "cpu", **changes: Any) -> list[Tensor]:
    """What the stock model of this kind gives, in evaluation, for each of `make_documents()` alone: the truth,
    computed once, on the CPU, where it does not depend on the kernels that are tested.
    """
    if device != "cpu":
        return [logits.to(device) for logits in alone_logits(kind, **changes)]
    model = tiny_model(kind, **changes)
    with torch.no_grad():
        return [run(model, layout).logits[0] for layout in alone(make_documents())]


def order_of(layout: Layout) -> list[int]:
    """Which of `make_documents()` each place of a layout of them holds."""
    documents = make_documents()
    found = []
    for piece in layout.cut(layout.inputs["input_ids"]):
        found += [n for n, document in enumerate(documents) if torch.equal(document, piece.cpu())]
    assert sorted(found) == list(range(len(documents)))
    return found


def worst(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative error over documents."""
    return max(relative_error(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))


def worst_gradient(got: dict[str, Tensor], wanted: dict[str, Tensor], floor: float = 0.01) -> tuple[float, str]:
    """The largest relative error of a parameter's gradient, as norms, and the parameter's name.

    Gradients smaller than `floor`, a part of the model's largest, are measured against that: sums over tokens that
    nearly cancel (A_log of a head, say) move by more than 1e-5 of themselves when weights move by one rounding.
    """
    assert got.keys() == wanted.keys()
    smallest = max(gradient.norm().item() for gradient in wanted.values()) * floor
    return max(
        ((got[name] - wanted[name]).norm().item() / max(wanted[name].norm().item(), smallest), name) for name in wanted
    )
