"""FSDP2 by families, in two processes with gloo that serve all cases (`sharded_cases.py`): gradients, precision, what
is wrapped, checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import KINDS

SCRIPT = Path(__file__).with_name("sharded_cases.py")
KINDS_AND_SWITCHES = (*KINDS, "zamba2, two shared blocks", "granitemoehybrid, experts", "mamba3", "h3", "samba")


# What the default run tries; the rest is slow only because there is so much of it.
QUICK = ("full mamba", "full zamba2", "bf16 mamba2", "precision", "clipping", "moving lora", "dead", "tied")
QUICK += ("stepping fused", "recorded full", "units", "wrapping one", "wrapping pairs", "wrapping one by one")


def run_cases(folder: Path, cases: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """What each case (of none: every one) came to, on rank 0 and on rank 1."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    environment["CASES"] = ";".join(cases)
    result = subprocess.run(
        [*command, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_cases(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_cases(tmp_path_factory.mktemp("every"))


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return request.getfixturevalue("every" if request.node.get_closest_marker("slow") else "quick")


def cases(*names: str) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "case",
    cases(
        *(f"full {name}" for name in KINDS_AND_SWITCHES),
        *(f"lora {name}" for name in ("mamba", "zamba2", "jamba")),
        *(f"checkpointing {name}" for name in ("mamba", "zamba2", "bamba")),
        *("units", "units, one by one", "units, lora", "units, checkpointing"),
        *("offload", "kept whole", "replicas", "train_also"),
    ),
)
def test_loss_and_gradients_are_those_of_one_process(found: dict[str, list[Any]], case: str) -> None:
    for rank in found[case]:
        assert rank["loss"] < 1e-6
        assert rank["gradients"] < 1e-5


@pytest.mark.parametrize("case", cases("bf16 mamba", "bf16 mamba2", "bf16 bamba"))
def test_bfloat16_rounds_no_more_than_autocast_does(found: dict[str, list[Any]], case: str) -> None:
    for rank in found[case]:
        assert rank["sharded"] < 1.5 * rank["autocast"]
        assert rank["sharded, recurrence"] < 1.5 * rank["autocast, recurrence"]


@pytest.mark.slow
def test_adapters_on_a_bfloat16_base(found: dict[str, list[Any]]) -> None:
    for rank in found["bf16 lora"]:
        assert rank["loss"] < 1e-4
        assert rank["gradients"] < 2e-2


@pytest.mark.parametrize(
    ("case", "sizes"),
    [("wrapping one", [5]), ("wrapping pairs", [2, 3]), ("wrapping one by one", [1, 1, 1, 1, 1])],
)
def test_blocks_are_put_together_by_size(found: dict[str, list[Any]], case: str, sizes: list[int]) -> None:
    units = [["MambaBlock"] * size for size in sizes]
    kept = ["A_log", "D", "bias"]  # the bias of dt_proj
    assert found[case][0] == {"units": [*units, ["MambaForCausalLM"]], "kept": kept}


@pytest.mark.slow
def test_what_is_wrapped_and_what_stays_whole(found: dict[str, list[Any]]) -> None:
    # Blocks that are inside others go with them; a shared one is a unit of its own.
    blocks = ["ZambaMambaDecoderLayer", "ZambaHybridLayer"] * 2
    units = sorted([blocks, ["ZambaForCausalLM"], ["ZambaAttentionDecoderLayer"] * 2])
    assert found["wrapping zamba"][0]["units"] == units
    layers = [["JambaMambaDecoderLayer"]] * 3 + [["JambaAttentionDecoderLayer"]]
    assert found["wrapping jamba"][0]["units"] == sorted([["JambaForCausalLM"], ["Embedding"], *layers])


def test_precision_of_a_step_in_bfloat16(found: dict[str, list[Any]]) -> None:
    assert found["precision"][0] == {
        "stream": "torch.float32",
        "projection": "torch.bfloat16",
        "out": "torch.bfloat16",
        "A_log": "torch.float32",
        "masters": ["torch.float32"],
    }


def test_clipping_knows_sharded_and_whole_parameters(found: dict[str, list[Any]]) -> None:
    for rank in found["clipping"]:
        assert rank["clipped"]
        assert rank["norm"] < 1e-6
        assert rank["gradients"] < 1e-5


@pytest.mark.parametrize(
    "case", cases(*(f"stepping {kind}" for kind in ("fused", "adamw", "rmsprop", "adagrad", "sgd")))
)
def test_an_optimizer_steps_on_shards_as_on_what_they_are_of(found: dict[str, list[Any]], case: str) -> None:
    for rank in found[case]:
        assert rank["differing"] == []
        assert rank["same names"]
        assert rank["sharded"] > 10


@pytest.mark.parametrize("case", cases("recorded full", "recorded lora"))
def test_recorded_blocks_are_gathered_and_their_gradients_averaged(found: dict[str, list[Any]], case: str) -> None:
    for rank in found[case]:
        assert rank["played"] == 3
        assert not rank["moved"]
        assert rank["loss"] < 1e-6
        assert rank["gradients"] < 1e-5


@pytest.mark.parametrize("case", cases("moving full", "moving lora"))
def test_checkpoints_go_between_shards_and_one_process(found: dict[str, list[Any]], case: str) -> None:
    for rank in found[case]:
        assert rank["gathered"] is True
        assert max(rank[way] for way in ("shards", "alone", "whole to shards")) < 1e-6


@pytest.mark.slow
def test_adapters_on_a_quantised_base(found: dict[str, list[Any]]) -> None:
    for case in ("qlora floats", "qlora bytes"):
        for rank in found[case]:
            assert rank["packed"] > 0
            assert rank["sharded"] == (rank["packed"] if case == "qlora floats" else 0)
            assert rank["loss"] < 1e-6
            assert rank["gradients"] < 1e-5


def test_parameters_without_gradient_are_found(found: dict[str, list[Any]]) -> None:
    expected = ["backbone.layers.0.unused: no gradient: the forward pass does not use it"]
    assert found["dead"] == [expected, expected]


def test_weights_with_several_names_are_gathered_once(found: dict[str, list[Any]]) -> None:
    before, gathered = found["tied"][0]
    assert gathered == before
    assert len(before) > 5  # the embeddings, and all of the block that two layers share
    assert found["tied"][1][1] == []  # the other rank holds nothing


@pytest.mark.slow
def test_processes_that_do_not_divide(found: dict[str, list[Any]]) -> None:
    assert "2 processes are not 3 equal groups" in found["uneven replicas"][0]
