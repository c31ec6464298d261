"""Two hundred streaming requests at once against a small model on the CPU: errors, answers, memory, speed.

    python benchmarks/serve_load.py                      # a random Mamba-2 of two layers, made here
    python benchmarks/serve_load.py RUN --requests 400 --tokens 64

Every prompt is asked alone first; then all at once, each client in a thread of its own, reading the stream as it comes.
Exits with 1 if a request fails, if an answer is not the one that was given alone, or if the server's resident memory
grows by 5 % or more between the end of the 50th request and that of the last. Needs Linux.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """One streamed answer; times in seconds from the request on."""

    text: str
    finish: str
    first: float
    whole: float


def small_model(folder: Path) -> Path:
    """A random Mamba-2 with a tokenizer of bytes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from tune_in_python import small_model as make

    return Path(make(folder))


def start_server(source: str, most: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "ssm_tune", "serve", source, "--port", "0", "--max-queue", str(most)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout or ():
        for word in line.split():
            if word.startswith("http://"):
                return server, word.rstrip("/")
    raise SystemExit(f"the server ended with {server.wait()}")


def ask(address: str, prompt: str, tokens: int) -> Answer:
    """One streaming request. Raises RuntimeError for anything but a whole answer."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=600)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {reply.read()[:200]!r}")
    text, finish, first, ended = "", "", 0.0, False
    for line in reply:
        data = line.decode().strip().removeprefix("data: ")
        if not data:
            continue
        first = first or time.perf_counter() - begin
        if data == "[DONE]":
            ended = True
            break
        choice = json.loads(data)["choices"][0]
        text, finish = text + choice["text"], choice["finish_reason"] or finish
    connection.close()
    if not ended or not finish:
        raise RuntimeError("the stream broke off")
    return Answer(text, finish, first, time.perf_counter() - begin)


def resident(process: int) -> int:
    """Bytes."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024


def run(address: str, process: int, requests: int, tokens: int) -> list[str]:
    """Asks, prints what was measured, and returns what is wrong."""
    prompts = [
        f"Question {number}: what is {number} plus {number * 7}? " * (1 + number % 5) for number in range(requests)
    ]
    alone = [ask(address, prompt, tokens) for prompt in prompts]
    memory, ended, gate = [resident(process)], 0, threading.Lock()
    wrong: list[str] = []
    together: list[Answer | None] = [None] * requests

    def one(number: int) -> None:
        nonlocal ended
        try:
            together[number] = ask(address, prompts[number], tokens)
        except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
            wrong.append(f"request {number}: {error!r}")
        with gate:
            ended += 1
            if ended in (50, requests):
                memory.append(resident(process))

    begin = time.perf_counter()
    with ThreadPoolExecutor(requests) as clients:
        list(clients.map(one, range(requests)))
    seconds = time.perf_counter() - begin
    answers = [answer for answer in together if answer is not None]
    wrong += [
        f"request {number}: {answer.text!r} where alone it was {single.text!r}"
        for number, (answer, single) in enumerate(zip(together, alone, strict=True))
        if answer is not None and (answer.text, answer.finish) != (single.text, single.finish)
    ]
    growth = memory[-1] / memory[1] - 1
    if growth >= 0.05:
        wrong.append(f"memory grew by {growth:.1%} from the 50th request on")
    spoken = sum(len(answer.text) for answer in answers)
    print(f"{len(answers)} of {requests} requests answered, {len(wrong)} mistakes, {seconds:.1f} s in all")
    rate = sum(len(answer.text) for answer in alone) / sum(answer.whole for answer in alone)
    print(f"{spoken / seconds:,.0f} characters a second together, {rate:,.0f} alone")
    if answers:
        firsts = sorted(answer.first for answer in answers)
        print(f"first piece after {statistics.median(firsts):.2f} s (median), {firsts[-1]:.2f} s (last)")
    sizes = ", ".join(f"{size / 2**20:.0f}" for size in memory)
    print(f"resident MiB before, after the 50th and after the last: {sizes} ({growth:+.1%})")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a run or a model (default: a small random one)")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = options.source or str(small_model(Path(scratch) / "small"))
        server, address = start_server(source, 2 * options.requests)
        try:
            wrong = run(address, server.pid, options.requests, options.tokens)
        finally:
            server.terminate()
            code = server.wait(60)
    if code:
        wrong.append(f"the server ended with {code}")
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
