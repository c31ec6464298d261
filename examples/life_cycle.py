"""A run's whole life: train, measure, ask, serve, merge, publish, load again.

    python examples/life_cycle.py [FOLDER] [--repo OWNER/NAME] [training.max_steps=200 ...]

Trains the demo (a small Mamba on Python's own documentation; a few steps of it, unless told otherwise) and takes the
finished run through everything that follows, on a laptop's CPU and without a download. With --repo the merged model is
pushed to the Hub, for which a token is needed (`hf auth login`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssm_tune import Run, load_model, load_recipe
from ssm_tune.workflow import run as train

QUESTION = "What does os.path.join do?"


def main(folder: Path, repo: str | None, settings: list[str]) -> Run:
    run = train(load_recipe("demo", [f"training.output_dir={folder}", *(settings or ["training.max_steps=10"])]), "sft")
    print("1. trained:", run.output_dir, "held-out loss", run.metrics["eval_loss"])

    results = run.evaluate(["mqar_8", "induction_256", "passkey_1k"], limit=4)  # tasks that need no download
    print("2. tasks:", sorted(results["results"]), "in", run.output_dir / "eval.json")

    texts = [{"text": f"The function os.path.{name} is part of Python." * 8} for name in ("join", "split", "exists")]
    found = run.measure_perplexity(texts)
    print(f"3. perplexity: {found['perplexity']:.4g}, by position in", run.output_dir / "perplexity.png")

    answer = run.generate(QUESTION, max_new_tokens=16)
    print("4. generated:", repr(answer))

    served = ask_server(run.output_dir, QUESTION, 16)
    print("5. served:", repr(served))
    assert served.strip() == answer.strip(), "a server says what the run says"

    merged = run.merge()
    print("6. merged:", merged)

    if repo is not None:
        print("7. pushed:", run.push(repo, private=True, what="merged"))

    again = Run.load(run.output_dir)
    assert again.generate(QUESTION, max_new_tokens=16) == answer, "a run that is loaded again says the same"
    plain = AutoModelForCausalLM.from_pretrained(merged)  # as somebody loads it who has never heard of ssm-tune
    tokens = AutoTokenizer.from_pretrained(merged)(QUESTION, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = [model(tokens).logits.float() for model in (again.model, plain.eval(), load_model(merged).eval())]
    difference = max(float((one - logits[0]).abs().max()) for one in logits[1:])
    print(f"8. loaded again, by three ways: logits differ by {difference:.1e}")
    return again


def ask_server(run: Path, question: str, tokens: int) -> str:
    """`ssm-tune serve`, as a process of its own, and one request of OpenAI's kind; the server is stopped at the end."""
    command = [sys.executable, "-m", "ssm_tune", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            words = (word for line in server.stdout for word in line.split() if word.startswith("http://"))
            address = next(words, None)
            if address is None:
                raise SystemExit("the server did not start; what it said is above")
            asked = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}
            request = urllib.request.Request(
                f"{address.rstrip('/')}/v1/chat/completions",
                json.dumps(asked).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]
        finally:
            server.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/life-cycle"))
    parser.add_argument("--repo", metavar="OWNER/NAME")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the recipe")
    given = parser.parse_intermixed_args()
    main(given.folder, given.repo, given.settings)
