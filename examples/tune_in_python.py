"""Fine-tune a model from Python, look at what came out, merge it.

    python examples/tune_in_python.py [MODEL] [OUTPUT_DIR]

MODEL is a Hub name or a folder in any layout; without one, a small random Mamba-2 is made, so that this runs anywhere
in a minute (and answers nonsense).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ssm_tune import Run, load_model, tune

ROWS = [
    {"question": f"What is {a} plus {b}?", "answer": f"{a} plus {b} is {a + b}."} for a in range(12) for b in range(12)
]


def small_model(folder: Path) -> str:
    """A random Mamba-2 with a byte tokenizer, saved as any checkpoint is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    Mamba2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def main(model: str | None = None, output_dir: str = "runs/python-example") -> Run:
    model = model or small_model(Path(output_dir).with_name("small-mamba2"))
    run = tune(
        model,
        ROWS[:128],
        eval_dataset=ROWS[128:],
        method="lora",
        output_dir=output_dir,
        r=8,
        targets="all",
        learning_rate=5e-3,
        max_steps=20,
        per_device_train_batch_size=8,
        max_length=96,
        logging_steps=5,
    )
    print("held-out loss:", run.metrics["eval_loss"])
    print("answer:", run.generate("What is 2 plus 3?", max_new_tokens=16))

    merged = load_model(run.merge())  # a plain model again, without an adapter
    tokens = run.tokenizer("What is 2 plus 3?", return_tensors="pt").to(merged.device)
    with torch.no_grad():
        difference = (merged(**tokens).logits - run.model.eval()(**tokens).logits).abs().max()
    print(f"merged and adapted logits differ by {difference:.1e}")
    return run


if __name__ == "__main__":
    main(*sys.argv[1:3])
