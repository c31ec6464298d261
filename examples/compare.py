"""Several architectures on one recipe's data and settings: a table and a plot.

    python examples/compare.py compare-130m                       (a recipe's file, or a shipped one's name)
    python examples/compare.py compare-130m --models transformer mamba2 training.max_steps=200 data.prepared=tokens

Each is `ssm-tune pretrain RECIPE` with another model section, in a process and a run folder of its own, so that memory
and kernels of one do not weigh on the next. What is complete is not run again; what was interrupted goes on. The loss
is on the same held-out rows for all, since tokenizer, data and seed are the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ssm_tune.recipe import load_recipe

# What stands in the place of the recipe's model section; each has about 85 million parameters beside its embedding.
MODELS = {
    "transformer": ["model.architecture=transformer"],
    "mamba": ["model.architecture=mamba"],
    "mamba2": ["model.architecture=mamba2"],
    "mamba3": ["model.architecture=mamba3"],
    "hybrid": ["model.architecture=hybrid", "model.mixer=mamba2"],
    "samba": ["model.architecture=samba"],
    "h3": ["model.architecture=h3"],
}
COLUMNS = ("model", "parameters", "loss", "held-out loss", "perplexity", "tokens/s", "MFU", "peak GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--timeout", type=float, help="seconds for each model; one that takes longer is left out")
    arguments, rest = parser.parse_known_args()
    # `--models a b key=value`: argparse gives all that follows an option to it.
    arguments.overrides += [item for item in rest if "=" in item]
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    folder = Path(recipe.training.get("output_dir") or f"runs/{recipe.name}")
    failed = []
    for name in arguments.models:
        run = folder / name
        if not is_complete(run) and not train(arguments, name, run):
            failed.append(name)
    rows = {name: summarise(folder / name) for name in arguments.models if is_complete(folder / name)}
    if rows:
        table = draw_table(rows)
        (folder / "compare.md").write_text(table)
        draw_plot(folder, list(rows))
        print(f"\n{table}\n{folder / 'compare.png'}")
    if failed:
        print(f"not complete: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def is_complete(run: Path) -> bool:
    state = run / "run.json"
    return state.is_file() and json.loads(state.read_text())["status"] == "complete"


def train(arguments: argparse.Namespace, name: str, run: Path) -> bool:
    command = [sys.executable, "-m", "ssm_tune", "pretrain", arguments.recipe, *arguments.overrides, *MODELS[name]]
    command.append(f"training.output_dir={run}")
    if (run / "checkpoints").is_dir():
        command.append("--resume")
    print(f"== {name}", file=sys.stderr, flush=True)
    try:
        return subprocess.run(command, timeout=arguments.timeout, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: longer than {arguments.timeout:.0f} seconds", file=sys.stderr)
        return False


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summarise(run: Path) -> dict[str, Any]:
    """The figures of a run: last losses; speed as the median of the logs behind the first, which has the warming up."""
    lines = [line for line in read_metrics(run) if "loss" in line]
    evaluated = [line for line in read_metrics(run) if "eval_loss" in line]

    def median(key: str) -> float | None:
        values = sorted(line[key] for line in lines[1:] or lines if key in line)
        return values[len(values) // 2] if values else None

    return {
        "parameters": count_parameters(run),
        "loss": lines[-1]["loss"],
        "held-out loss": evaluated[-1]["eval_loss"] if evaluated else None,
        "perplexity": evaluated[-1].get("eval_perplexity") if evaluated else None,
        "tokens/s": median("tokens_per_second"),
        "MFU": median("mfu"),
        "peak GiB": lines[-1].get("peak_memory_gib"),
    }


def count_parameters(run: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in run.glob("model*.safetensors"):
        with safe_open(str(file), "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def draw_table(rows: dict[str, dict[str, Any]]) -> str:
    shown = {"parameters": "{:,}", "tokens/s": "{:,.0f}", "MFU": "{:.1%}", "perplexity": "{:.2f}", "peak GiB": "{:.1f}"}
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for name, figures in rows.items():
        cells = ["-" if figures[key] is None else shown.get(key, "{:.4f}").format(figures[key]) for key in COLUMNS[1:]]
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw_plot(folder: Path, names: list[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name in names:
        lines = [line for line in read_metrics(folder / name) if "loss" in line]
        axes.plot([line["num_tokens"] for line in lines], [line["loss"] for line in lines], label=name, linewidth=1)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "compare.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
