"""A Mamba folder that we wrote in the original layout, read and run by johnma2006/mamba-minimal, and by us.

    git clone https://github.com/johnma2006/mamba-minimal
    pip install einops
    python benchmarks/mamba_minimal_oracle.py mamba-minimal

That one readable file has a loader and a forward of its own, and shares no code with ours or with mamba_ssm.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

from ssm_tune.conversion import convert
from ssm_tune.model import init_model, load_model
from ssm_tune.recipe import ModelSection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of mamba-minimal")
    path = parser.parse_args().checkout / "model.py"
    spec = importlib.util.spec_from_file_location("mamba_minimal", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"{path} is not there.")
    minimal = importlib.util.module_from_spec(spec)
    sys.modules["mamba_minimal"] = minimal  # its dataclasses look for their module
    spec.loader.exec_module(minimal)
    for width, layers, vocabulary in ((64, 2, 301), (256, 8, 5003)):
        section = ModelSection(architecture="mamba", dimensions={"hidden_size": width, "num_hidden_layers": layers})
        model = init_model(section, vocabulary)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith((".D", "A_log")):
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.3))
        with tempfile.TemporaryDirectory() as name:
            model.save_pretrained(Path(name) / "hf")
            folder = convert(Path(name) / "hf", Path(name) / "original", to="state-spaces")
            theirs = minimal.Mamba.from_pretrained(str(folder)).eval()
            ours = load_model(folder, dtype="float32", trainable="none").eval()
            tokens = torch.randint(0, vocabulary, (2, 100))
            with torch.no_grad():
                expected, logits = theirs(tokens), ours(tokens, use_cache=False).logits
        error = ((logits - expected).abs().max() / expected.abs().max()).item()
        print(f"width {width}, {layers} layers: logits differ by {error:.1e} of the largest")
        assert error < 1e-4


if __name__ == "__main__":
    main()
