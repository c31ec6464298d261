"""Our own models load with AutoModelForCausalLM once ssm_tune is imported, in any order, and that import is light."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BUILD = (
    "config = AutoConfig.for_model('samba', hidden_size=16, num_hidden_layers=4, vocab_size=8, intermediate_size=8,"
    " num_attention_heads=2)\n"
    "assert type(AutoModelForCausalLM.from_config(config)).__name__ == 'SambaForCausalLM'"
)
# The module stays one like any other, and nothing waits any more.
SOURCE = (
    "\nimport inspect, sys\nimport transformers.models.auto.configuration_auto as table\n"
    "assert 'class AutoConfig' in inspect.getsource(table)\n"
    "assert not [finder for finder in sys.meta_path if type(finder).__name__ == '_Waiting']\n"
)
ORDERS = {
    "ours first": "import ssm_tune\nfrom transformers import AutoConfig, AutoModelForCausalLM\n" + BUILD + SOURCE,
    "transformers first": "from transformers import AutoConfig, AutoModelForCausalLM\nimport ssm_tune\n" + BUILD,
    "a model of transformers first": (
        # modeling_layers imports the Auto classes while it is half imported itself
        "import ssm_tune\nimport transformers.models.llama.modeling_llama\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n" + BUILD
    ),
}
LIGHT = (
    "import sys, ssm_tune, ssm_tune.registration\nssm_tune.registration.register_architectures()\n"
    "heavy = {'torch', 'transformers'} & set(sys.modules)\nassert not heavy, heavy\n"
    "waiting = [finder for finder in sys.meta_path if type(finder).__name__ == '_Waiting']\nassert len(waiting) == 1\n"
)


def run(code: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_know_our_models(order: str) -> None:
    run(ORDERS[order])


def test_waiting_imports_nothing() -> None:
    run(LIGHT)
