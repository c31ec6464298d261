"""More text that is on every machine with ssm-tune on it: the docstrings of the packages that it needs.

`package-docs-text` (`text`, `topic`): one document per Python file, for pretraining the demo's base model beside
`python-docs-text`. There is only a `train` split: what is evaluated is Python's own documentation, of topics held out.
The packages are numpy, torch, transformers and the rest of `PACKAGES`, under their own (BSD, MIT and Apache) licences.
Files are read as text and never imported; a docstring that many files repeat counts once.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ssm_tune.data.demo import file_entries
from ssm_tune.recipe import RecipeError

TEXT = "package-docs-text"
PACKAGES = (
    *(
        "accelerate",
        "datasets",
        "fsspec",
        "huggingface_hub",
        "jinja2",
        "matplotlib",
        "networkx",
        "numba",
        "numpy",
        "omegaconf",
    ),
    *("packaging", "pandas", "peft", "PIL", "requests", "rich", "safetensors", "sympy", "tokenizers", "torch", "tqdm"),
    *("transformers", "trl"),
)
_SHORTEST = 80  # characters of a docstring worth reading
_LEFT_OUT = {"tests", "test", "testing", "_vendor", "vendor", "auto", "deprecated"}


def read_package_docs(split: str = "train") -> list[dict[str, str]]:
    """All documents, in the same order for the same versions. Takes a minute: thousands of files are parsed.

    Raises RecipeError for another split, or if none of the packages is installed.
    """
    if split != "train":
        raise RecipeError(f"data: {TEXT} has no split {split!r}, only train. Evaluate on python-docs-text.")
    seen: set[bytes] = set()
    rows = [row for package in PACKAGES for row in _documents(package, seen)]
    if not rows:
        raise RecipeError(f"data: {TEXT} is made of installed packages' documentation, and none of them is installed.")
    return rows


def _documents(package: str, seen: set[bytes]) -> Iterator[dict[str, str]]:
    spec = importlib.util.find_spec(package)
    for root in map(Path, (spec.submodule_search_locations or []) if spec else []):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            if not _LEFT_OUT.isdisjoint(parts):
                continue
            texts = []
            for entry in file_entries(package, ".".join(part for part in parts if part != "__init__"), path):
                digest = hashlib.sha256(entry.said.encode()).digest()
                if len(entry.said) >= _SHORTEST and digest not in seen:
                    seen.add(digest)
                    texts.append(f"{entry.heading}\n\n{entry.said}")
            if texts:
                yield {"text": "\n\n".join(texts), "topic": package}
