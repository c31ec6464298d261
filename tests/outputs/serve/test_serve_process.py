"""The server as a process of its own: two hundred streams at once, what they cost, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EOS, tiny_model, tiny_tokenizer

from ssm_tune.mixers import patch_model

SERVE = "import sys; from ssm_tune.outputs.serve import start_server; sys.exit(start_server(sys.argv[1], port=0, {}))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny-mamba"
    tiny_model("mamba").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served_by_a_process(folder: Path, settings: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVE.format(settings), str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder.parent
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line + process.stderr.read()
        yield process, int(found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def resident(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that the process holds."""
    fields = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@torch.no_grad()
def greedy_alone(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """The answer of one prompt alone, and by how much each token was likelier than the next likeliest."""
    output = model(torch.tensor([ids]), use_cache=True)
    tokens, leads = [], []
    for _ in range(count):
        best = output.logits[0, -1, :262].topk(2)
        tokens.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
        if tokens[-1] == EOS:
            break
        output = model(torch.tensor([tokens[-1:]]), cache=output.cache, use_cache=True)
    return tokens, leads


def prompt(number: int) -> str:
    return f"{number}: " + "the state of the art " * (number % 9)


@pytest.mark.slow
def test_two_hundred_streams_at_once(folder: Path) -> None:
    """No error; each answer is what its prompt gives alone; and memory does not grow with the number of requests."""
    from openai import AsyncOpenAI

    count, length = 200, 40
    memory: dict[int, int] = {}

    async def ask_all(process: subprocess.Popen[str], port: int) -> list[str]:
        done = 0

        async def ask(number: int) -> str:
            nonlocal done
            text = ""
            stream = await client.completions.create(
                model="tiny", prompt=prompt(number), max_tokens=length, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text
            done += 1
            memory[done] = resident(process)
            return text

        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(number) for number in range(count)))

    with served_by_a_process(folder) as (process, port):
        answers = asyncio.run(ask_all(process, port))
    assert memory[count] < 1.05 * memory[50], memory
    model, tokenizer = patch_model(tiny_model("mamba")), tiny_tokenizer()
    for number, answer in enumerate(answers):
        tokens, leads = greedy_alone(model, tokenizer(prompt(number))["input_ids"], length)
        clear = next((place for place, lead in enumerate(leads) if lead < 1e-4), len(tokens))
        wanted = tokenizer.decode(tokens[:clear], skip_special_tokens=True).rstrip("\ufffd")
        assert answer.startswith(wanted), number
        if clear == len(tokens):
            assert answer.rstrip("\ufffd") == wanted, number


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_when_answers_have_ended(folder: Path, number: signal.Signals) -> None:
    from openai import OpenAI

    with served_by_a_process(folder) as (process, port):
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        stream = client.completions.create(
            model="", prompt="a", max_tokens=3000, temperature=0, stream=True, logit_bias={str(EOS): -100}
        )
        chunks = [next(iter(stream))]
        process.send_signal(number)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.slow
def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(folder: Path) -> None:
    from ssm_tune.outputs.serve import start_server
    from ssm_tune.recipe import RecipeError

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RecipeError, match="--port"):
        start_server(folder / "nothing", port=taken.getsockname()[1])
