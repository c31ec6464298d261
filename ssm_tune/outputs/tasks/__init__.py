"""Tasks for lm-eval that need no download: their rows are made by seed.

What state-space models are asked about: how much a state holds, and for how long. Multi-query associative recall
(`mqar`; Arora et al. 2023, "Zoology"), induction and selective copying (`induction`, `selective_copying`; Gu and Dao
2023, "Mamba", section 4.1), and a number hidden in a long text (`passkey`; Mohtashami and Jaggi 2023) at 1K to 128K
tokens. Each is a group of tasks by size, `passkey_4k` and so on; every size can be named alone.

The YAML files are lm-eval's own kind and work with its command line too (--include_path). The texts are English
words, so that any tokenizer will do; lengths are counted in the tokens of the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

FOLDER = Path(__file__).parent

_ANSWER_ROOM = 64  # tokens after the prompt


def task_lengths() -> dict[str, int]:
    """The tasks whose rows have a length of their own, and that length in tokens."""
    import yaml

    lengths = {}
    for file in sorted(FOLDER.glob("*/*.yaml")):
        # lm-eval's tag !function is of no interest here
        text = "\n".join(line for line in file.read_text(encoding="utf-8").splitlines() if "!function" not in line)
        task = yaml.safe_load(text)
        if "task" in task and "length" in task.get("metadata", {}):
            lengths[task["task"]] = task["metadata"]["length"]
    return lengths


def context_needed(names: Sequence[str]) -> int | None:
    """The tokens that a model must be given at once for these tasks (or groups, or patterns); None: no matter.

    lm-eval cuts what is longer than it thinks a model can read, which is 2048 tokens for one that knows no limit.
    """
    lengths = [
        length
        for task, length in task_lengths().items()
        if any(fnmatch(task, name) or fnmatch(task.rpartition("_")[0], name) for name in names)
    ]
    return max(lengths) + _ANSWER_ROOM if lengths else None
