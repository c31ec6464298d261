"""The command line: what is imported when, exit codes, where messages go."""

from __future__ import annotations

import io
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ssm_tune import cli
from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import Stopped

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "numpy", "yaml", "omegaconf")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "x.yaml").write_text("model: {name: org/model}\ndata: {train: [{path: rows.jsonl}]}\n")
    return "x.yaml"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the workflow was called with; a stand-in, as running it is another test's business."""
    made: list[tuple[Any, ...]] = []
    workflow = types.ModuleType("ssm_tune.workflow")
    workflow.run = lambda recipe, task, *, resume: made.append((recipe, task, resume))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ssm_tune.workflow", workflow)
    return made


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["ssm_tune.workflow"], "run", run)


def run_in_a_process(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ssm_tune", *arguments], capture_output=True, text=True, cwd=cwd)


def test_importing_and_help_import_nothing_heavy() -> None:
    code = (
        "import sys, ssm_tune.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "heavy: []"
    assert "sft" in result.stdout and "exit codes" in result.stdout


COMMANDS = "sft pretrain prepare validate recipes generate merge eval push serve chat convert"


@pytest.mark.parametrize("command", COMMANDS.split())
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"ssm-tune {command}" in capsys.readouterr().out


def test_training_is_handed_to_the_workflow(recipe: str, calls: list[tuple[Any, ...]]) -> None:
    overrides = ["training.seed=3", "--resume", "training.run_name=a"]
    assert cli.main(["sft", recipe, *overrides]) == 0
    assert cli.main(["pretrain", "--processes", "1", recipe]) == 0
    (first, task, resume), (second, other_task, other_resume) = calls
    assert (task, resume, other_task, other_resume) == ("sft", True, "pretrain", False)
    assert first.training == {"seed": 3, "run_name": "a"}
    assert first.overrides == ("training.seed=3", "training.run_name=a")
    assert second.training == {}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RecipeError(["one thing", "another"]), 2, "one thing\nanother\n"),
        (
            Stopped("NaN at step 7"),
            3,
            "NaN at step 7\nContinue with: ssm-tune sft x.yaml 'training.run_name=a b' --resume\n",
        ),
        (
            Stopped("stopped by SIGTERM", exit_code=143),
            143,
            "stopped by SIGTERM\nContinue with: ssm-tune sft x.yaml 'training.run_name=a b' --resume\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(
    recipe: str,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    fail_with(monkeypatch, error)
    monkeypatch.delenv("SSM_TUNE_COMMAND", raising=False)
    assert cli.main(["sft", recipe, "training.run_name=a b"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == message


def test_an_interrupt_is_told_by_rank_0_alone(
    recipe: str, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_peers", lambda: None)  # they have not met yet
    monkeypatch.setattr(cli.time, "sleep", lambda _: None)
    fail_with(monkeypatch, KeyboardInterrupt())
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["sft", recipe]) == 130
        told.append(capsys.readouterr().err)
    assert told == ["interrupted\n", ""]


def test_launched_processes_tell_the_command_of_the_launcher(
    recipe: str,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SSM_TUNE_COMMAND", "")
    monkeypatch.setattr("ssm_tune.launch.launch", lambda *_, **__: 3)
    assert cli.main(["sft", recipe, "--processes", "2"]) == 3
    fail_with(monkeypatch, Stopped("the disk is full"))
    assert cli.main(["sft", recipe]) == 3
    assert "Continue with: ssm-tune sft x.yaml --processes 2 --resume\n" in capsys.readouterr().err


def test_a_mistake_of_ours_keeps_its_traceback(
    recipe: str, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["sft", recipe])


def test_other_ranks_wait_for_rank_0_to_speak(
    recipe: str,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_with(monkeypatch, RecipeError("row 3"))
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["sft", recipe]) == 2
    assert capsys.readouterr().err == "rank 1: row 3\n"
    assert waited and waited[0] >= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sfy", "demo"], "invalid choice: 'sfy'"),
        (["sft"], "the following arguments are required: RECIPE"),
        (["sft", "demo", "--resum"], "unrecognized: --resum"),
        (["sft", "demo", "--processes", "two"], "invalid int value: 'two'"),
        (["merge", "run", "a=b"], "unrecognized: a=b"),
        (["recipes"], "the following arguments are required: ls|show|cp"),
    ],
)
def test_mistakes_in_the_command(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--help" in error


def test_mistakes_in_a_recipe_are_told_before_torch_is_imported(recipe: str, tmp_path: Path) -> None:
    code = (
        "import sys, ssm_tune.cli as cli\n"
        f"code = cli.main(['sft', {recipe!r}, 'training.learning_rat=1', '--accelerate', 'ddp'])\n"
        "print(code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout == "2 False\n"
    assert "learning_rat is not a setting. Did you mean learning_rate?" in result.stderr


def test_recipes_are_listed_shown_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", "ls"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("demo ") for line in listed)
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed), "a recipe without a summary"
    assert cli.main(["recipes", "show", "demo"]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["recipes", "cp", "demo"]) == 0
    assert (tmp_path / "demo.yaml").read_text() == shown
    (tmp_path / "folder").mkdir()
    assert cli.main(["recipes", "cp", "demo", "folder"]) == 0
    assert cli.main(["recipes", "cp", "demo", "mine.yaml"]) == 0
    assert (tmp_path / "folder" / "demo.yaml").read_text() == (tmp_path / "mine.yaml").read_text() == shown


def test_copying_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text("mine")
    assert cli.main(["recipes", "cp", "demo"]) == 2
    assert "demo.yaml: exists already" in capsys.readouterr().err
    assert (tmp_path / "demo.yaml").read_text() == "mine"
    assert cli.main(["recipes", "cp", "dmo"]) == 2
    assert "Did you mean demo?" in capsys.readouterr().err
    assert cli.main(["recipes", "cp", "demo", "nowhere/x.yaml"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m ssm_tune recipes show demo | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.strip() in ("0", "141")


def test_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            return self.handle.fileno()

    with Path("/dev/null").open("w") as handle:
        gone = Gone()
        gone.handle = handle  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, "stdout", gone)
        assert cli.main(["recipes", "ls"]) == 141


@pytest.mark.parametrize(
    ("words", "function", "expected"),
    [
        (
            "generate RUN --prompt a=b --max-new-tokens 3 --temperature 0 --seed 1 --no-chat --stop x",
            "ssm_tune.outputs.answers.answer_source",
            (
                ("RUN",),
                {
                    **{"prompt": "a=b", "stream": False, "max_new_tokens": 3, "temperature": 0.0, "seed": 1},
                    **{"chat": False, "stop": ["x"]},
                },
            ),
        ),
        (
            "generate RUN --prompts p.jsonl --batch-size 4 --min-p 0.1 --repetition-penalty 1.2",
            "ssm_tune.outputs.answers.answer_source",
            (
                ("RUN",),
                {
                    **{"prompts": Path("p.jsonl"), "batch_size": 4, "stream": False},
                    **{"min_p": 0.1, "repetition_penalty": 1.2},
                },
            ),
        ),
        (
            "eval RUN --tasks mqar,piqa --limit 0.5 --perplexity text.txt --window 512 --output out",
            "ssm_tune.outputs.measurements.measure_source",
            (
                ("RUN",),
                {
                    **{"tasks": "mqar,piqa", "limit": 0.5, "perplexity": "text.txt", "window": 512},
                    **{"output": Path("out"), "allow_code_execution": False},
                },
            ),
        ),
        (
            "serve RUN --port 7000 --max-batch 4 --timeout 2.5",
            "ssm_tune.outputs.serve.start_server",
            (("RUN",), {"port": 7000, "max_batch": 4, "timeout": 2.5, "token": "secret"}),
        ),
        (
            "chat http://127.0.0.1:6000 --plain --stop a --stop b --max-tokens 5 --temperature 0.5",
            "ssm_tune.outputs.chat.start_chat",
            (
                ("http://127.0.0.1:6000",),
                {"plain": True, "stop": ["a", "b"], "max_tokens": 5, "temperature": 0.5, "token": "secret"},
            ),
        ),
        (
            "convert SRC DST --to state-spaces --dtype bfloat16",
            "ssm_tune.conversion.convert",
            (("SRC", Path("DST")), {"to": "state-spaces", "dtype": "bfloat16"}),
        ),
        ("merge RUN --dtype float32", "ssm_tune.outputs.merge.merge_run", (("RUN", None), {"dtype": "float32"})),
    ],
)
def test_options_reach_the_function_and_only_those_written(
    monkeypatch: pytest.MonkeyPatch, words: str, function: str, expected: tuple[Any, ...]
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setenv("SSM_TUNE_TOKEN", "secret")
    monkeypatch.setattr(function, lambda *given, **named: calls.append((given, named)))
    assert cli.main(words.split()) == 0
    assert calls == [expected]


# --- validate ------------------------------------------------------------------------------------------------------


def test_validate_says_what_it_found_and_what_it_could_not(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", recipe]) == 0
    out = capsys.readouterr().out
    assert "rows.jsonl: 1 rows are usable" in out
    assert "org/model: on the Hub, not looked into" in out
    assert "will be made" in out


def test_validate_finds_mistakes_in_files_all_at_once(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    overrides = ["tokenizer.chat_template=chat.jinja", "model.name=model"]
    assert cli.main(["validate", recipe, *overrides]) == 2
    error = capsys.readouterr().err
    assert "rows.jsonl, line 2" in error
    assert "chat.jinja, line 1: does not render a question and an answer" in error
    assert "'gpt2' is not one that ssm-tune can train" in error


def test_validate_checks_targets_against_the_model(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(recipe).write_text(
        "model: {architecture: mamba, dimensions: {hidden_size: 16, num_hidden_layers: 1}}\n"
        "tokenizer: {train: true}\ndata: {train: [{path: rows.jsonl}]}\nadapter: {targets: [in_prj]}\n"
    )
    assert cli.main(["validate", recipe]) == 2
    assert "in_prj" in capsys.readouterr().err
    assert cli.main(["validate", recipe, "adapter.targets=[in_proj]"]) == 0
    assert "every target is there" in capsys.readouterr().out
