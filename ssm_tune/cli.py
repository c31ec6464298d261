"""The command line. Registering a command imports nothing; running it imports what it needs.

Exit codes: 0 done; 2 the user's mistake; 3 stopped but resumable; 130 and 143 ended by a signal, resumable.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_EPILOG = """\
A RECIPE is a file, or the name of a shipped one (ssm-tune recipes ls). Settings are overridden by key:
  ssm-tune sft demo training.max_steps=50 data.train.0.path=rows.jsonl
exit codes: 0 done, 2 a mistake of yours (nothing is left behind), 3 stopped and resumable, 130/143 ended by a signal
"""


# What the user typed, for the processes that the launcher starts.
_COMMAND = "SSM_TUNE_COMMAND"


class _Parser(argparse.ArgumentParser):
    """argparse, with a mistake told in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n(see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give back its exit code. A mistake of ours keeps its traceback."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    from ssm_tune.recipe import RecipeError
    from ssm_tune.run_folder import Stopped

    # It warns, whenever peft is imported, of a missing CPU kernel that nothing here calls.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code or 0
    except RecipeError as error:
        return _end(str(error), 2)
    except Stopped as stopped:
        return _end(f"{stopped}\nContinue with: {_resuming(arguments)}", stopped.exit_code, silent=stopped.told)
    except KeyboardInterrupt:
        return _end("interrupted", 130, silent=_rank() > 0)  # a signal comes to all
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if _peers() is None:
            raise
        return _end("".join(traceback.format_exception(error)), 1)


def _resuming(arguments: argparse.Namespace) -> str:
    """The command that was given, and --resume. A launched process knows its own; the launcher leaves the whole."""
    command = os.environ.get(_COMMAND) or shlex.join(["ssm-tune", *arguments.given])
    return command if "--resume" in arguments.given else f"{command} --resume"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _end(message: str, code: int, *, silent: bool = False) -> int:
    """Tell why the command ended, once: among processes that work together, one of them speaks for all."""
    others = _peers()
    if _rank() > 0 and not silent:  # it mostly meets the mistake that rank 0 tells; it speaks if that has not ended it
        time.sleep(10 if others is None else 2)
    if others is None:
        if not silent:
            _say(message)
        return code
    if not silent and others.claim(message):
        _say(message)
    # Not by way of Python's end, where a device may wait for a message that never comes.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _peers() -> Any:
    """The other processes of this run, if there are any; without torch there are none."""
    module = sys.modules.get("ssm_tune.peers")
    return None if module is None else module.current()


def _say(message: str) -> None:
    print(f"rank {_rank()}: {message}" if _rank() > 0 else message, file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments; `key=value` may stand before and after options."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        overrides = getattr(arguments, "overrides", None)
        stray = [item for item in rest if overrides is None or item.startswith("-")]
        if stray:
            parser.error(f"{arguments.command}: unrecognized: {' '.join(stray)}")
        arguments.overrides = [*arguments.overrides, *rest]
    arguments.given = list(argv)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    from ssm_tune import __version__

    parser = _Parser(
        prog="ssm-tune",
        description="Fine-tune and pretrain state-space language models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ssm-tune {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    for name, text in (("sft", "fine-tune as a recipe says"), ("pretrain", "train on plain text as a recipe says")):
        _add_training(command(name, run_training, text))
    prepare = command("prepare", run_prepare, "write a recipe's text as tokens to data.prepared, once, for pretrain")
    _add_recipe(prepare)
    validate = command("validate", run_validate, "check a recipe and the files that it names; no network, no weights")
    _add_recipe(validate)
    validate.add_argument("--task", choices=("sft", "pretrain"), help="default: what the recipe's first comment says")
    doctor = command("doctor", run_doctor, "say what works here, which kernels a model would use, and what to repair")
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="a model's or run's folder, a recipe, or a Hub name")
    doctor.add_argument("--json", action="store_true", help="for programs; exit code 0: all well, 1: see advice")
    _add_recipes(command("recipes", run_recipes, "list, print or copy the shipped recipes"))
    _add_generate(command("generate", run_generate, "continue a prompt with a finished run or a model"))
    merge = command("merge", run_merge, "fold a run's adapter into its base model")
    merge.add_argument("source", metavar="RUN", help="a run folder")
    merge.add_argument("--output", type=Path, help="folder of the merged model (default: RUN/merged)")
    merge.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the merged weights")
    _add_evaluate(command("eval", run_evaluate, "measure a finished run or a model with lm-eval"))
    push = command("push", run_push, "upload a finished run to the Hub; private unless --public")
    push.add_argument("source", metavar="RUN")
    push.add_argument("repo", metavar="REPO", help="owner/name")
    push.add_argument("--merged", action="store_true", help="the merged model instead of the adapter")
    push.add_argument("--public", action="store_true")
    _add_serve(command("serve", run_serve, "answer OpenAI's and Megatron's requests over HTTP, with a chat page"))
    _add_chat(command("chat", run_chat, "talk to a server in the terminal"))
    convert = command("convert", run_convert, "write a checkpoint in another layout, its numbers untouched")
    convert.add_argument("source", metavar="SRC", help="a folder or a Hub name, in any layout")
    convert.add_argument("target", metavar="DST", type=Path, help="a new folder")
    convert.add_argument("--to", required=True, metavar="LAYOUT", help="hf, state-spaces, mistral or megatron")
    convert.add_argument("--dtype", help="of the weights (default: as they are)")
    convert.add_argument("--revision", help="of a Hub repository")
    convert.add_argument("--tp", type=int, metavar="N", help="megatron: over so many tensor-parallel ranks (1)")
    convert.add_argument("--pp", type=int, metavar="N", help="megatron: over so many pipeline stages (1)")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a .yaml file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the recipe's")


def _add_training(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run in training.output_dir")
    parser.add_argument("--processes", type=int, metavar="N", help="so many processes, one a GPU (or on the CPU)")
    parser.add_argument("--accelerate", metavar="NAME|FILE", help="an accelerate config: ddp, fsdp2, ... or a file")


def _add_recipes(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|show|cp", parser_class=_Parser)
    actions.add_parser("ls", help="list them")
    actions.add_parser("show", help="print one").add_argument("name")
    copy = actions.add_parser("cp", help="copy one, to change it")
    copy.add_argument("name")
    copy.add_argument("to", nargs="?", type=Path, help="a file or a folder (default: NAME.yaml here)")


_SAMPLING = {
    "max_new_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|MODEL", help="a run folder, a model folder or a Hub name")
    parser.add_argument("--prompt", metavar="TEXT")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="lines of a .txt file, or rows with a prompt column"
    )
    parser.add_argument("--stream", action="store_true", help="print the answer while it is written")
    parser.add_argument("--batch-size", type=int, metavar="N", help="prompts of a file that are answered together")
    for name, kind in _SAMPLING.items():
        text = "0: always the likeliest token (the default)" if name == "temperature" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text, metavar="N")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends the answer; may be repeated")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put the prompt as a user's turn, or as it is (default: as the run's training rows were put)",
    )


_MEASURED = (
    *("tasks", "limit", "batch_size", "num_fewshot", "include_path", "allow_code_execution"),
    *("perplexity", "split", "window", "stride", "max_length", "output"),
)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|MODEL", help="a run folder, a model folder or a Hub name")
    parser.add_argument("--tasks", help="names of lm-eval tasks or of our own (mqar, passkey_4k, ...), with commas")
    parser.add_argument(
        "--perplexity", metavar="FILE|DATASET", help="predict these texts; by position up to 128K tokens"
    )
    parser.add_argument("--split", help="of the data set")
    parser.add_argument("--window", type=int, metavar="N", help="tokens seen at most (default: all from the beginning)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens by which the window moves")
    parser.add_argument("--max-length", type=int, metavar="N", help="longest context, or text that is read as one")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the results go (default: into the run)")
    parser.add_argument("--limit", type=float, metavar="N", help="rows of each task, or below 1 a share; texts")
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--num-fewshot", type=int, metavar="N")
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help="further lm-eval task files")
    parser.add_argument("--allow-code-execution", action="store_true", help="let tasks run the code a model writes")


_LIMITS = {
    "name": str,
    "max_batch": int,
    "max_queue": int,
    "max_body_bytes": int,
    "max_prompt_tokens": int,
    "max_new_tokens": int,
    "timeout": float,
    "body_timeout": float,
    "drain": float,
}


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|MODEL", help="a run folder, a model folder or a Hub name")
    parser.add_argument("--host", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=int, help="default: 6000")
    parser.add_argument("--token", help="what clients must send; also taken from the environment: SSM_TUNE_TOKEN")
    for name, kind in _LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="TEXT" if kind is str else "N")


_REQUEST = {"max_tokens": int, **{name: kind for name, kind in _SAMPLING.items() if name != "max_new_tokens"}}


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:6000")
    parser.add_argument("--token", help="also taken from the environment: SSM_TUNE_TOKEN")
    parser.add_argument("--system", metavar="TEXT", help="what the assistant is told first")
    parser.add_argument("--plain", action="store_true", help="continue texts, for models without a chat template")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends an answer; may be repeated")
    for name, kind in _REQUEST.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")


def run_training(arguments: argparse.Namespace) -> int | None:
    from ssm_tune.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():  # started by torchrun or accelerate
        from ssm_tune.launch import adopt

        # Else torch shows its stack when the process that keeps the store ends, be it last of all.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        adopt(arguments.accelerate, arguments.processes)
        if _rank() > 0:  # rank 0 says it
            logging.disable(logging.WARNING)
            warnings.simplefilter("ignore")
    elif arguments.accelerate is not None or (arguments.processes or 1) != 1:
        from ssm_tune.launch import launch

        os.environ[_COMMAND] = shlex.join(["ssm-tune", *arguments.given])
        passed = [arguments.recipe, *arguments.overrides, *(["--resume"] if arguments.resume else [])]
        return launch(arguments.command, passed, accelerate=arguments.accelerate, processes=arguments.processes)
    from ssm_tune.workflow import run

    run(recipe, arguments.command, resume=arguments.resume)
    return 0


def run_prepare(arguments: argparse.Namespace) -> None:
    from ssm_tune.recipe import load_recipe
    from ssm_tune.shards import prepare_shards

    print(prepare_shards(load_recipe(arguments.recipe, arguments.overrides)))


def run_validate(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the import of some packages asks the Hub
    from ssm_tune.recipe import load_recipe
    from ssm_tune.validation import check_recipe

    for line in check_recipe(load_recipe(arguments.recipe, arguments.overrides), arguments.task):
        print(line)


def run_doctor(arguments: argparse.Namespace) -> int:
    if arguments.model is None or Path(arguments.model).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of the Hub, bitsandbytes' import included
    from ssm_tune.doctor import run_doctor

    return run_doctor(arguments.model, as_json=arguments.json)


def run_recipes(arguments: argparse.Namespace) -> None:
    from ssm_tune import recipe_library

    if arguments.action == "ls":
        summaries = recipe_library.list_recipes()
        width = max(map(len, summaries))
        for name, summary in summaries.items():
            print(f"{name:{width}}  {summary}")
    elif arguments.action == "show":
        print(recipe_library.read_recipe(arguments.name), end="")
    else:
        path = recipe_library.copy_recipe(arguments.name, arguments.to)
        print(f"{path} written. Next: ssm-tune validate {path}")


def run_generate(arguments: argparse.Namespace) -> None:
    from ssm_tune.outputs.answers import answer_source

    settings = _given(arguments, "prompt", "prompts", "stream", "batch_size", *_SAMPLING, "stop", "chat")
    answer_source(arguments.source, **settings)


def run_merge(arguments: argparse.Namespace) -> None:
    from ssm_tune.outputs.merge import merge_run

    print(merge_run(arguments.source, arguments.output, dtype=arguments.dtype))


def run_evaluate(arguments: argparse.Namespace) -> None:
    from ssm_tune.outputs.measurements import measure_source

    measure_source(arguments.source, **_given(arguments, *_MEASURED))


def run_push(arguments: argparse.Namespace) -> None:
    from ssm_tune.outputs.run import Run

    what = "merged" if arguments.merged else "adapter"
    print(Run.load(arguments.source).push(arguments.repo, private=not arguments.public, what=what))


def run_serve(arguments: argparse.Namespace) -> int:
    from ssm_tune.outputs.serve import start_server

    settings = _given(arguments, "host", "port", *_LIMITS)
    return start_server(arguments.source, token=_token(arguments), **settings)


def run_chat(arguments: argparse.Namespace) -> int:
    from ssm_tune.outputs.chat import start_chat

    settings = _given(arguments, "system", "plain", "stop", *_REQUEST)
    return start_chat(arguments.url, token=_token(arguments), **settings)


def run_convert(arguments: argparse.Namespace) -> None:
    from ssm_tune.conversion import convert

    keys = _given(arguments, "to", "dtype", "revision", "tp", "pp")
    print(convert(arguments.source, arguments.target, **keys))


def _token(arguments: argparse.Namespace) -> str | None:
    return arguments.token or os.environ.get("SSM_TUNE_TOKEN")


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those options that were written; the others keep the defaults of whoever takes them."""
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}
