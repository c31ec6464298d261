"""Recipes: what is accepted, and one clear message for each mistake, all of them at once, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ssm_tune.recipe import COLUMN_NAMES, AdapterSection, RecipeError, load_recipe

GOOD = """\
model: {name: org/model}
data:
  train: [{path: rows.jsonl}]
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a recipe beside a rows.jsonl, in the working directory, and gives its relative name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def write(text: str | bytes, name: str = "x.yaml") -> str:
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    return write


def mistakes_of(name: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        load_recipe(name, overrides)
    return error.value.mistakes


# One mistake each, added to GOOD: what the message must say after "x.yaml: ".
ONE_MISTAKE = {
    "evalution: {}": "evalution is not a setting. Did you mean evaluation?",
    "learning_rate: 1e-4": "learning_rate is not a setting. It belongs to training: write training.learning_rate",
    "training: {learning_rat: 1e-4}": "training.learning_rat is not a setting. Did you mean learning_rate?",
    "training: {zzz: 1}": "training.zzz is not a setting.",
    "training: {r: 4}": "training.r is not a setting. It belongs to adapter: write adapter.r",
    "training: {warmup_ratio: 0.1}": "training.warmup_ratio is not a setting: write warmup_steps",
    "training: {push_to_hub: true}": "training.push_to_hub is not a setting of a recipe: write hub.push",
    "training: {hub_token: abc}": "training.hub_token is not a setting of a recipe: log in",
    "training: {model_init_kwargs: {}}": "training.model_init_kwargs is not a setting of a recipe: write model.dtype",
    "training: {chat_template_path: x}": "training.chat_template_path is not a setting of a recipe: write tokenizer",
    "training: {fsdp: full_shard}": "training.fsdp is not a setting of a recipe: use the command line: --accelerate",
    "training: {deepspeed: x.json}": "training.deepspeed is not a setting of a recipe: use the command line",
    "training: {dataset_text_field: t}": "training.dataset_text_field is not a setting of a recipe: name the column",
    "training: {resume_from_checkpoint: x}": "use the command line: --resume",
    "training: {learning_rate: 1e-3x}": 'training.learning_rate must be a number, not "1e-3x"',
    'training: {learning_rate: "1e-3"}': "training.learning_rate must be a number, not the text",
    "training: {learning_rate: [1]}": "training.learning_rate must be a number, not a list: [1]",
    "training: {learning_rate: null}": "training.learning_rate must be a number, not null",
    "training: {learning_rate: true}": "training.learning_rate must be a number, not true or false: true",
    "training: {learning_rate: -1e-4}": "training.learning_rate must be greater than 0, not -0.0001",
    "training: {learning_rate: .nan}": "training.learning_rate must be a finite number, not nan",
    "training: {max_steps: 1e3}": "training.max_steps must be a whole number, not 1000.0. Write 1000",
    "training: {max_steps: -5}": "training.max_steps must be at least 1, not -5",
    "training: {max_steps: 0}": "training.max_steps must be at least 1; leave it out",
    "training: {seed: 010}": 'training.seed must be a whole number, not the text "010"',
    "training: {packing: 1}": "training.packing must be true or false, not a number: 1",
    "training: {optim: adamw_torh}": 'training.optim cannot be "adamw_torh". Did you mean adamw_torch?',
    "training: {lr_scheduler_type: cosin}": 'training.lr_scheduler_type cannot be "cosin". Did you mean cosine?',
    "training: {save_strategy: yes}": "training.save_strategy must be text, not true (YAML reads yes, no, on and",
    "training: {report_to: [tensorboard, 3]}": "training.report_to has 3 at 1, which must be text",
    "training: {adam_beta1: 1}": "training.adam_beta1 must be at least 0 and less than 1, not 1",
    "training: {fp16: true}": "training.fp16 overflows in the state-space recurrence. Use bf16",
    "training: {packing: true, max_length: null}": "training.max_length is the length of a packed row",
    "training: {eval_strategy: steps}": "training.eval_strategy needs held-out rows: data.eval or data.eval_fraction",
    "training: {load_best_model_at_end: true}": "training.load_best_model_at_end needs eval_strategy and save_strategy",
    "training: 5": "training must be a mapping (key: value), not a number: 5",
    "adapter: {method: lorra}": 'adapter.method cannot be "lorra". Did you mean lora?',
    "adapter: {r: 0}": "adapter.r must be at least 1, not 0",
    "adapter: {r: 1.5}": "adapter.r must be a whole number, not a number: 1.5",
    "adapter: {rank: 8}": "adapter.rank is not a setting. adapter takes: method, r,",
    "adapter: {lora_alpha: 0}": "adapter.lora_alpha must be greater than 0, not 0",
    "adapter: {lora_dropout: 1.5}": "adapter.lora_dropout must be at least 0 and less than 1, not 1.5",
    "adapter: {targets: al}": 'adapter.targets cannot be "al". Did you mean all?',
    "adapter: {targets: in_proj}": 'adapter.targets cannot be "in_proj". A name stands in a list: [in_proj]',
    "adapter: {targets: []}": "adapter.targets names nothing to adapt",
    "adapter: {targets: [5]}": "adapter.targets has 5 at 0, which must be text",
    "adapter: {train_also: [A_lg]}": 'adapter.train_also cannot be "A_lg". Did you mean A_log?',
    "adapter: {modules_to_save: lm_head}": "adapter.modules_to_save must be a list of text, not the text",
    "adapter: {modules_to_save: [A_log]}": "adapter.modules_to_save cannot hold A_log, a parameter: write adapter",
    "adapter: {method: full, r: 8}": "adapter.r belongs to method: lora",
    "kernels: {required: maybe}": 'kernels.required must be true or false, not "maybe"',
    "hub: {push: adaptor, repo: me/x}": 'hub.push cannot be "adaptor". Did you mean adapter?',
    "hub: {push: merged}": "hub.push needs hub.repo: owner/name",
    "hub: {repo: me/x}": "hub.repo is not used without hub.push",
    "hub: {push: adapter, repo: me/x}": "hub.push cannot be adapter: a full fine-tune has none",
    "hub: {push: merged, repo: a/b/c}": 'hub.repo must be owner/name, not "a/b/c"',
    "tokenizer: {vocab_size: 1000}": "tokenizer.vocab_size needs tokenizer.train: bpe",
    "tokenizer: {chat_template: gone.jinja}": "tokenizer.chat_template gone.jinja does not exist",
    "tokenizer: {train: true}": "tokenizer.train makes a new vocabulary, which a checkpoint (model.name) has no",
    "evaluation: {tasks: hellaswag}": "evaluation.tasks must be a list of text, not the text",
    "evaluation: {limit: 0}": "evaluation.limit must be at least 1, not 0",
    "1: 2": "has a key that is a number, not text: 1. Put it in quotes",
    "kernels: ${nothing.there}": "kernels cannot be read: Interpolation key 'nothing.there' not found",
    "hub: {push: merged, repo: '${'}": "hub.repo cannot be read: no viable alternative",
    "training: {packing: !!bool maybe}": "line 4, column 21: not valid YAML: tags",
    "hub: {push: merged, repo: '???'}": "hub.repo still needs a value (???)",
    'hub: {push: merged, repo: "a\\ud800"}': "hub.repo holds characters that cannot be written as text",
}


@pytest.mark.parametrize("line", ONE_MISTAKE)
def test_one_mistake_one_message(write, line: str) -> None:
    mistakes = mistakes_of(write(f"{GOOD}{line}\n"))
    assert len(mistakes) == 1, mistakes
    assert mistakes[0].startswith("x.yaml: ")
    assert ONE_MISTAKE[line] in mistakes[0]


# Whole texts that cannot be GOOD with a line more.
WHOLE = {
    "": "x.yaml: is empty",
    "# nothing\n": "x.yaml: is empty",
    "- a\n": "x.yaml: holds a list where a recipe is sections",
    "just words\n": "x.yaml: holds text where a recipe is sections",
    "model:\n\tname: a\n": "x.yaml: line 2, column 1: not valid YAML: ",
    "model: {name: a\n": "x.yaml: line 2, column 1: not valid YAML: ",
    "model: {name: !!python/object:os.system a}\n": "x.yaml: line 1, column 15: not valid YAML: tags",
    "model: {name: a}\n---\nmodel: {}\n": "x.yaml: line 2, column 1: not valid YAML: a second document",
    "model: &a [*a]\n": "x.yaml: line 1, column 8: not valid YAML: ",
    "model: *gone\n": "x.yaml: line 1, column 8: not valid YAML: ",
    "model: {name: a\x00b}\n": "x.yaml: is not YAML: ",
    "model: {name: a}\n": "x.yaml: data needs train, a list such as",
    "data: {train: [{path: rows.jsonl}]}\n": "x.yaml: model needs a name (a Hub name or a folder) or an architecture",
    "model: {}\ndata: {train: [{path: rows.jsonl}]}\n": "x.yaml: model needs a name",
    "model: {name: a}\ndata: {train: []}\n": "x.yaml: data.train is empty",
    "model: {name: a}\ndata: {train: rows.jsonl}\n": "x.yaml: data.train must be a list of entries, not the text",
    "model: {name: a}\ndata: {train: [rows.jsonl]}\n": "x.yaml: data.train.0 must be a mapping such as {path:",
    "model: {name: a}\ndata: {train: [{split: train}]}\n": "x.yaml: data.train.0 needs a path",
    "model: {name: a}\ndata: {train: [{path: rws.jsonl}]}\n": "data.train.0.path rws.jsonl does not exist",
    "model: {name: ./gone}\ndata: {train: [{path: rows.jsonl}]}\n": "x.yaml: model.name ./gone does not exist",
}


@pytest.mark.parametrize("text", WHOLE)
def test_broken_texts(write, text: str) -> None:
    mistakes = mistakes_of(write(text))
    assert len(mistakes) == 1, mistakes
    assert WHOLE[text] in mistakes[0]


MODEL = {
    "architecture: mamba": "model has both name (a checkpoint) and architecture (random weights)",
    "load_in_4bit: true": "model.load_in_4bit freezes the weights: it needs an adapter section",
    "layers: 4": "model.layers belongs to model.architecture",
    "dtype: bf16": 'model.dtype cannot be "bf16". Did you mean bfloat16?',
    "revision: 1234": "model.revision must be text, not the number 1234. Put it in quotes",
    "revision: on": "model.revision must be text, not true (YAML reads yes, no, on and off so). Put it in quotes",
    "nmae: x": "model.nmae is not a setting. Did you mean name?",
}


@pytest.mark.parametrize("key", MODEL)
def test_mistakes_in_the_model_section(write, key: str) -> None:
    mistakes = mistakes_of(write(GOOD.replace("org/model", f"org/model, {key}")))
    assert len(mistakes) == 1, mistakes
    assert MODEL[key] in mistakes[0]


def test_both_quantisations_at_once(write) -> None:
    text = GOOD.replace("org/model", "org/model, load_in_4bit: true, load_in_8bit: true")
    assert "both load_in_4bit and load_in_8bit" in mistakes_of(write(text + "adapter: {r: 8}\n"))[0]


def test_keys_of_one_architecture_that_exclude_each_other(write) -> None:
    keys = "{architecture: mamba, pattern: MMA, mlp_ratio: 0.4, revision: main}"
    text = f"model: {keys}\ndata: {{train: [{{path: rows.jsonl}}]}}\n"
    mistakes = mistakes_of(write(text))
    assert len(mistakes) == 2
    assert "model.revision belongs to a checkpoint" in mistakes[0]
    assert "model.mlp_ratio says again what model.pattern says" in mistakes[1]


DATA = {
    "eval_fraction: 1.5": "data.eval_fraction must be greater than 0 and less than 1, not 1.5",
    "eval_fraction: 0": "data.eval_fraction must be greater than 0 and less than 1, not 0",
    "eval: [{path: rows.jsonl}]\n  eval_fraction: 0.1": "data has both eval and eval_fraction. Keep one",
    "eval: []": "data.eval is empty; leave it out",
    "too_long: cutt": 'data.too_long cannot be "cutt". Did you mean cut?',
    "seed: 3": "data.seed is not a setting. It belongs to training: write training.seed",
    "batch_tokens: 0": "data.batch_tokens must be at least 1, not 0",
    "batch_tokens: 4096\ntraining: {gradient_accumulation_steps: 2}": "data.batch_tokens sets training.gradient_accum",
    "isolate: false\ntraining: {packing: false}": "data.isolate false has no effect with training.packing: false",
    "train: [{path: rows.jsonl}]": "line 4: train is given twice, first on line 3",
}


@pytest.mark.parametrize("line", DATA)
def test_mistakes_in_the_data_section(write, line: str) -> None:
    mistakes = mistakes_of(write(f"{GOOD}  {line}\n"))
    assert len(mistakes) == 1, mistakes
    assert DATA[line] in mistakes[0]


SOURCE = {
    "wieght: 1": "data.train.0.wieght is not a setting. Did you mean weight?",
    "weight: 0": "data.train.0.weight must be greater than 0, not 0",
    "columns: [a, b]": "data.train.0.columns must be a mapping, not a list",
    "columns: {promt: question}": "data.train.0.columns.promt is not a setting. Did you mean prompt?",
    "columns: {prompt: 3}": "data.train.0.columns has 3 at prompt, which must be text",
    "split: no": "data.train.0.split must be text, not false (YAML reads yes, no, on and off so). Put it in quotes",
}


@pytest.mark.parametrize("key", SOURCE)
def test_mistakes_in_a_data_source(write, key: str) -> None:
    mistakes = mistakes_of(write(GOOD.replace("rows.jsonl", f"rows.jsonl, {key}")))
    assert len(mistakes) == 1, mistakes
    assert SOURCE[key] in mistakes[0]


def test_column_names_are_those_that_the_data_package_reads() -> None:
    from ssm_tune.data.formatting import NAMES

    assert sorted(COLUMN_NAMES) == sorted(NAMES)


def test_every_mistake_at_once_under_a_second_and_without_torch(write, tmp_path: Path) -> None:
    name = write(f"{GOOD}adapter: {{r: 0, rr: 1}}\ntraining: {{learning_rat: 1, seed: x}}\nhub: {{push: maybe}}\n")
    code = (
        "import sys, time; start = time.time()\n"
        "from ssm_tune import load_recipe, RecipeError\n"
        f"try: load_recipe({name!r}, ['data.train.0.pth=x'])\n"
        "except RecipeError as error: print(len(error.mistakes)); print(time.time() - start)\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'peft', 'datasets', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    count, seconds, imported = result.stdout.splitlines()
    assert count == "7"
    assert float(seconds) < 1
    assert imported == "[]"


def test_an_environment_variable_that_is_not_text(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", "a\udc80")
    mistakes = mistakes_of(write(GOOD + "training: {run_name: '${oc.env:RUN}'}\n"))
    assert mistakes == ["x.yaml: training.run_name holds characters that cannot be written as text: 'a\\udc80'"]


def test_what_yaml_1_1_reads_strangely_means_what_it_says(write) -> None:
    recipe = load_recipe(
        write(
            GOOD.replace("org/model", "org/model, revision: 2024-01-01")
            + "training: {learning_rate: 1e-4, weight_decay: 1, save_strategy: no, packing: on, run_name: 12:30,"
            + " warmup_steps: .05, max_grad_norm: 1_0.5}\n"
        )
    )
    assert recipe.model.revision == "2024-01-01"
    assert recipe.training == {
        "learning_rate": 1e-4,
        "weight_decay": 1,
        "save_strategy": "no",
        "packing": True,
        "run_name": "12:30",
        "warmup_steps": 0.05,
        "max_grad_norm": 10.5,
    }


def test_a_byte_order_mark_is_not_part_of_the_text(write) -> None:
    recipe = load_recipe(write(b"\xef\xbb\xbf" + GOOD.encode()))
    assert recipe.model.name == "org/model"
    assert recipe.text == GOOD


def test_files_that_are_not_utf8(write) -> None:
    assert mistakes_of(write(b"model: {}\nname: caf\xe9\n")) == [
        "x.yaml: line 2: the file is not UTF-8; save it as UTF-8"
    ]
    assert "the file is UTF-16" in mistakes_of(write(GOOD.encode("utf-16")))[0]


def test_recipes_that_are_not_there(write, tmp_path: Path) -> None:
    write(GOOD, "mine.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert mistakes_of("mne.yaml") == ["mne.yaml: does not exist. Did you mean mine.yaml?"]
    assert mistakes_of("folder.yaml") == ["folder.yaml: is a folder; name the .yaml file in it"]
    assert mistakes_of("dmo") == ["dmo: is neither a file nor a shipped recipe. Did you mean demo?"]
    assert "There is no folder" in mistakes_of("nowhere/x.yaml")[0]


def test_full_fine_tuning_is_no_adapter(write) -> None:
    assert load_recipe(write(GOOD)).adapter is None
    assert load_recipe(write(GOOD + "adapter: null\n")).adapter is None
    assert load_recipe(write(GOOD + "adapter: {method: full}\n")).adapter is None
    assert load_recipe(write(GOOD + "adapter: {method: lora}\n")).adapter == AdapterSection()
    assert load_recipe(write(GOOD + "adapter: {r: 4}\n"), ["adapter=null"]).adapter is None


# --- overrides -----------------------------------------------------------------------------------------------------


def test_overrides(write) -> None:
    recipe = load_recipe(
        write(GOOD),
        [
            "training.learning_rate=5e-5",
            "training.run_name=a=b # c",
            "training.report_to=[tensorboard, wandb]",
            "training.lr_scheduler_kwargs={num_cycles: 2}",
            "training.project='5'",
            "training.max_length=null",
            "data.train.0.split=train[:10%]",
            "data.train.1.path=other/set",
            "data.train.1.columns={prompt: q, completion: a}",
            "data.eval.0.path=held/out",
            "adapter.r=4",
        ],
    )
    assert recipe.training == {
        "learning_rate": 5e-5,
        "run_name": "a=b # c",
        "report_to": ["tensorboard", "wandb"],
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "project": "5",
        "max_length": None,
    }
    assert recipe.data.train[0].split == "train[:10%]"
    assert recipe.data.train[1].path == "other/set"
    assert recipe.data.train[1].columns == {"prompt": "q", "completion": "a"}
    assert recipe.data.eval is not None and recipe.data.eval[0].path == "held/out"
    assert recipe.adapter == AdapterSection(r=4)
    assert recipe.overrides[0] == "training.learning_rate=5e-5"


BAD_OVERRIDES = {
    "training.seed": "override training.seed: is not key=value",
    "=5": "override =5: is not key=value",
    "training..seed=5": "override training..seed=5: is not key=value",
    "training.sead=5": "override training.sead=5: training.sead is not a setting. Did you mean seed?",
    "training.seed=x": 'override training.seed=x: training.seed must be a whole number, not "x"',
    "training.report_to=[a": "override training.report_to=[a: training.report_to has a value that is not valid YAML",
    "training.lr_scheduler_kwargs={a: 1, a: 2}": "a is given twice",
    "data.train.path=x.jsonl": "data.train.path cannot be set: data.train is a list; name an entry, data.train.0",
    "data.train.2.path=a/b": "data.train.2.path cannot be set: data.train has 1 entries; the next one is data.train.1",
    "model.name.x=1": "override model.name.x=1: model.name.x cannot be set: model.name holds text",
    "data.train.0.path=x.jsonl": "override data.train.0.path=x.jsonl: data.train.0.path x.jsonl does not exist",
    "trainin.seed=1": "override trainin.seed=1: trainin is not a setting. Did you mean training?",
    "model=null": "override model=null: model needs a name",
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_a_bad_override_is_named(write, override: str) -> None:
    mistakes = mistakes_of(write(GOOD), override)
    assert len(mistakes) == 1, mistakes
    assert BAD_OVERRIDES[override] in mistakes[0]


def test_data_that_has_gone_is_no_mistake_for_who_does_not_read_it(write, tmp_path: Path) -> None:
    name = write(GOOD)
    (tmp_path / "rows.jsonl").unlink()
    assert load_recipe(name, check_files=False).data.train[0].path == "rows.jsonl"


# --- round trip ----------------------------------------------------------------------------------------------------


def test_the_resolved_recipe_reads_back_equal(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", "tonight ${not_a_key}")
    recipe = load_recipe(
        write(
            GOOD
            + "adapter: {targets: [in_proj], train_also: [A_log]}\nhub: {push: adapter, repo: me/x}\n"
            + "training: {seed: 7, data_seed: '${training.seed}', run_name: '${oc.env:RUN}', project: '5',"
            + " learning_rate: 1e-5, max_length: null, save_strategy: no, lr_scheduler_kwargs: {a: {b: [1, x]}}}\n"
        ),
        ["data.eval_fraction=0.5", "model.dtype=bfloat16"],
    )
    assert recipe.training["data_seed"] == 7
    assert recipe.training["run_name"] == "tonight ${not_a_key}"
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml") == recipe
