"""Is what is trained what is evaluated? Every family, on the kernels really used; prints one table in Markdown.

    python benchmarks/equivalence.py                                  # on a GPU, about 4 minutes
    python benchmarks/equivalence.py --device cpu --families mamba bamba

The truth is the stock model in evaluation mode, in float32 on the CPU, with each document alone. Against it, ours in
training mode: the logits and gradients of a packed row, rows padded on the left and on the right; and ours in
evaluation mode. Largest difference over largest value; of gradients, the norm of a parameter's difference over the
norm of its own, or over a hundredth of the model's largest where its own is smaller (sums over tokens that nearly
cancel, as A_log's, move by roundings anywhere); the worst over its own norm is named below the table. In bfloat16
(SSM parameters in float32, as ssm-tune loads them) each is printed over stock's own: what stock in bfloat16 makes of
each document alone in evaluation mode. The models are tiny and random, with real heads, and carry state: steps
in [1e-3, 0.1], biases, rows of several chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
CHECKS = ("train - eval", "packed", "gradients", "left pads", "right pads")
LENGTHS = (150, 1, 64, 200, 1, 97)  # tokens of the documents
_WIDE = {"hidden_size": 128, "num_hidden_layers": 2}
_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_chunk_size": 64, "hidden_size": 128}
# The family's tiny model of the tests, with heads and states that real ones have.
DIMENSIONS: dict[str, dict[str, Any]] = {
    "mamba": {**_WIDE, "state_size": 16},
    "falcon_mamba": {**_WIDE, "state_size": 16},
    "mamba2": {**_WIDE, "num_heads": 8, "head_dim": 32, "state_size": 64, "chunk_size": 64},
    "codestral": {**_WIDE, "num_heads": 8, "head_dim": 32, "state_size": 64, "chunk_size": 64},
    "jamba": {"hidden_size": 128, "mamba_d_state": 16},
    "zamba": {"hidden_size": 128, "mamba_d_state": 16, "attention_hidden_size": 256, "attention_head_dim": 64},
    "zamba2": {"hidden_size": 128, "n_mamba_heads": 8, "mamba_d_state": 64, "chunk_size": 64},
    "bamba": _HEADS,
    "falcon_h1": {**_HEADS, "mamba_d_ssm": 256},
    "nemotron_h": {
        **{"hidden_size": 128, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 64, "chunk_size": 64},
        "head_dim": 32,
    },
    "granitemoehybrid": _HEADS,
    "lfm2": {"hidden_size": 128},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--families", nargs="+", default=list(DIMENSIONS), choices=list(DIMENSIONS), metavar="FAMILY")
    parser.add_argument("--jobs", type=int, help="families at a time (default: as many as there are cores)")
    parser.add_argument("--timeout", type=float, default=220, help="seconds for one family (default 220)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # measure here, print JSON
    arguments = parser.parse_args()
    if arguments.one:
        for found in measure(arguments.families[0], arguments.device):
            print("RESULT " + json.dumps(found), flush=True)
        return 0
    return run_all(arguments)


def run_all(arguments: argparse.Namespace) -> int:
    """A process for each family, several at a time."""
    environment = {"TRITON_F32_DEFAULT": "ieee", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(os.environ)
    found: dict[str, Any] = {}
    begin = time.monotonic()

    def run_one(family: str) -> None:
        command = [sys.executable, __file__, "--one", "--families", family, "--device", arguments.device]
        started = time.monotonic()
        try:
            settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
            output = subprocess.run(command, timeout=arguments.timeout, check=False, **settings).stdout
        except subprocess.TimeoutExpired as late:
            output = late.stdout if isinstance(late.stdout, str) else (late.stdout or b"").decode(errors="replace")
        results = [line for line in output.splitlines() if line.startswith("RESULT ")]
        if results:
            found[family] = json.loads(results[-1].removeprefix("RESULT "))
        whole = bool(results) and "bfloat16" in found[family]
        spent = "; ".join(line for line in output.splitlines() if line.startswith("trials "))
        print(f"{family}: {'done' if whole else 'FAILED'}, {time.monotonic() - started:.0f} s. {spent}", flush=True)
        if not whole:
            print(output[-3000:], flush=True)

    jobs = arguments.jobs or min(len(arguments.families), os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one, arguments.families))
    done = {family: found[family] for family in arguments.families if family in found}
    print_table(done, arguments.device)
    wrong = [family for family, result in done.items() if not right(result)]
    failed = [family for family in arguments.families if "bfloat16" not in done.get(family, {})]
    seconds = time.monotonic() - begin
    print(f"\n{seconds:.0f} s. Not right: {', '.join(wrong) or 'none'}. Failed: {', '.join(failed) or 'none'}.")
    return 1 if wrong or failed else 0


def right(result: dict[str, Any]) -> bool:
    """1e-5 in float32; in bfloat16 twice stock's own noise."""
    return max(result["float32"].values()) <= 1e-5 and max(result.get("bfloat16", {"": 0.0}).values()) <= 2


def print_table(found: dict[str, Any], device: str) -> None:
    print(f"\nfloat32, relative difference ({device}: {next(iter(found.values()))['where'] if found else ''})\n")
    print(f"| family | {' | '.join(CHECKS)} |\n|---|{'---|' * len(CHECKS)}")
    for family, result in found.items():
        print(f"| {family} | " + " | ".join(f"{result['float32'][check]:.0e}" for check in CHECKS) + " |")
    worst = [f"{family} {result['own'][0]:.0e} ({result['own'][1]})" for family, result in found.items()]
    print(f"\nThe gradient that is worst over its own norm: {', '.join(worst)}.")
    print("\nbfloat16, difference over stock's own, and stock's own\n")
    print(f"| family | {' | '.join(CHECKS)} | stock: logits | gradients |\n|---|{'---|' * (len(CHECKS) + 2)}")
    for family, result in found.items():
        if "bfloat16" not in result:
            continue
        ratios = " | ".join(f"{result['bfloat16'][check]:.2f}" for check in CHECKS)
        print(f"| {family} | {ratios} | {result['noise']['logits']:.1e} | {result['noise']['gradients']:.1e} |")


def measure(family: str, device: str) -> Iterator[dict[str, Any]]:
    """The differences of one family, by dtype and check; first those in float32 alone."""
    sys.path.insert(0, str(TESTS))
    import torch
    from spared_tuning import spare_tuning
    from tiny import tiny_model

    from ssm_tune.kernels import kernel_report, set_kernel_order

    if device != "cpu":
        spare_tuning()
        set_kernel_order(None, required=True)  # no fallback in silence
    torch.set_num_threads(1)
    wanted = Truth(tiny_model(family, **DIMENSIONS[family]))
    found: dict[str, Any] = {}
    model = ours(tiny_model(family, **DIMENSIONS[family]), torch.float32).to(device)
    wanted.compile_ahead(model, device)
    found["float32"] = wanted.compare(model, device)
    found["own"] = wanted.worst_of_own
    report = {choice.operation: choice.backend for choice in kernel_report(device)} if device == "cpu" else {}
    found["where"] = torch.cuda.get_device_name() if device != "cpu" else f"kernels {report.get('ssd_scan')}"
    yield found
    stock = tiny_model(family, **DIMENSIONS[family]).to(device=device, dtype=torch.bfloat16)
    noise = found["noise"] = wanted.compare_alone(stock, device)
    low = ours(tiny_model(family, **DIMENSIONS[family]), torch.bfloat16).to(device)
    wanted.compile_ahead(low, device)
    found["bfloat16"] = {
        check: difference / noise["gradients" if check == "gradients" else "logits"]
        for check, difference in wanted.compare(low, device).items()
    }
    yield found


def ours(model: Any, dtype: Any) -> Any:
    from ssm_tune.families import family_of
    from ssm_tune.mixers import patch_model

    family = family_of(model.config.model_type)
    for name, parameter in model.named_parameters():
        if not family.is_ssm_parameter(name):
            parameter.data = parameter.data.to(dtype)
    return patch_model(model)


class Truth:
    """What each document gives alone, in stock, in float32; and how far a model is from it."""

    def __init__(self, stock: Any):
        import rows

        self.rows = rows
        self.documents = rows.make_documents(LENGTHS)
        self.tokens = sum(LENGTHS) - len(LENGTHS)
        self.logits, self.gradients = self.alone(stock, "cpu")
        self.worst_of_own = (0.0, "")  # of all gradients compared until now, and the parameter's name

    def alone(self, model: Any, device: str) -> tuple[list[Any], dict[str, Any]]:
        model.zero_grad()
        logits = []
        for layout in self.rows.alone(self.documents):
            output = self.rows.run(model, layout.to(device), self.tokens)
            logits.append(output.logits[0].detach().float().cpu())
            if layout.labels.numel() > 1:
                output.loss.backward()
        return logits, gradients_of(model)

    def compare_alone(self, model: Any, device: str) -> dict[str, float]:
        """Stock's own noise: of logits and of gradients."""
        logits, gradients = self.alone(model, device)
        return {
            "logits": self.rows.worst(logits, self.logits),
            "gradients": self.rows.worst_gradient(gradients, self.gradients)[0],
        }

    def layouts(self, device: str) -> Iterator[tuple[str, Any]]:
        for name in ("packed", "left pads", "right pads"):
            yield name, self.rows.LAYOUTS[name](self.documents).to(device)

    def compile_ahead(self, model: Any, device: str) -> None:
        """Compile on all cores what `compare` calls; one after the other takes minutes on a GPU's slow host."""
        from ssm_tune.families import family_of
        from ssm_tune.kernels import kernel_report
        from ssm_tune.kernels.compile_ahead import compiling_only

        if device == "cpu":
            return
        begin = time.monotonic()
        kernel_report(device, family_of(model.config.model_type).operations)
        tried = time.monotonic()
        with compiling_only():
            for _, layout in self.layouts(device):
                self.rows.run(model.train(), layout, self.tokens).loss.backward()
        print(f"trials {tried - begin:.0f} s, compiling {time.monotonic() - tried:.0f} s", flush=True)

    def compare(self, model: Any, device: str) -> dict[str, float]:
        """Of each check, the largest difference."""
        rows, found = self.rows, {}
        for name, layout in self.layouts(device):
            model.eval()
            evaluated = self.cut(layout, rows.run(model, layout).logits)
            model.train()
            model.zero_grad()
            output = rows.run(model, layout, self.tokens)
            output.loss.backward()
            trained = self.cut(layout, output.logits)
            found[name] = max(rows.worst(trained, self.logits), rows.worst(evaluated, self.logits))
            found["train - eval"] = max(found.get("train - eval", 0), rows.worst(trained, evaluated))
            gradients = gradients_of(model)
            gradient = rows.worst_gradient(gradients, self.gradients)[0]
            found["gradients"] = max(found.get("gradients", 0), gradient)
            self.worst_of_own = max(self.worst_of_own, rows.worst_gradient(gradients, self.gradients, floor=1e-4))
        return found

    def cut(self, layout: Any, logits: Any) -> list[Any]:
        return [part.detach().float().cpu() for part in layout.cut(logits)]


def gradients_of(model: Any) -> dict[str, Any]:
    return {name: parameter.grad.float().cpu().clone() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    sys.exit(main())
