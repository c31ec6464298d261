"""What a user installs: the wheel works in an empty folder, and its metadata says what the tests ran with."""

from __future__ import annotations

import ast
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]
    return [Requirement(line) for line in lines]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_dependency_is_bounded_on_both_sides() -> None:
    for requirement in requirements():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, requirement


def test_constraints_are_within_the_bounds_and_are_what_runs_here() -> None:
    pinned = constraints()
    for name in [requirement.name for requirement in map(Requirement, PROJECT["dependencies"])]:
        assert any(name.lower() == known.lower() for known in pinned), f"{name} is not in constraints.txt"
    folded = {name.lower(): pin for name, pin in pinned.items()}
    for requirement in requirements():
        pin = folded.get(requirement.name.lower())
        if pin is not None:
            assert requirement.specifier.contains(pin), f"{requirement.name}=={pin} is outside {requirement.specifier}"
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "omegaconf"):
        assert version(name).partition("+")[0] == folded[name]


def imported_packages() -> dict[str, str]:
    """Every package that ours imports anywhere, with a file that does."""
    used: dict[str, str] = {}
    for path in (ROOT / "ssm_tune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            used |= {name.partition(".")[0]: path.name for name in names}
    return {name: file for name, file in used.items() if name not in sys.stdlib_module_names | {"ssm_tune"}}


def test_what_the_package_imports_is_declared() -> None:
    names = {requirement.name.lower().replace("-", "_") for requirement in requirements()}
    declared = names | ({"yaml"} if "pyyaml" in names else set()) | ({"pynvml"} if "nvidia_ml_py" in names else set())
    used = imported_packages()
    assert {"torch", "yaml"} <= set(used), "the search finds nothing"
    assert {name: file for name, file in used.items() if name not in declared} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name for name in names if not name.startswith(f"ssm_tune-{PROJECT.get('version', '')}")]
    assert all(name.startswith("ssm_tune") for name in names)
    assert "ssm_tune/recipes/demo.yaml" in inside
    assert "ssm_tune/accelerate_configs/ddp.yaml" in inside
    shipped = {path.name for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    assert shipped <= {Path(name).name for name in inside}
    assert not [name for name in inside if "__pycache__" in name or name.startswith("tests")]


@pytest.mark.slow
def test_an_installed_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True, capture_output=True)
    # The dependencies, which weigh gigabytes, are those of the environment that runs the tests.
    [packages] = (home / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*arguments: str) -> str:
        command = [home / "bin" / "ssm-tune", *arguments]
        result = subprocess.run(command, cwd=empty, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    where = "import ssm_tune; print(ssm_tune.__file__)"
    found = subprocess.run([python, "-c", where], cwd=empty, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(packages)), "the tests would look at the checkout, not at the wheel"
    assert "demo" in run("recipes", "ls")
    run("recipes", "cp", "demo")
    assert (empty / "demo.yaml").exists()
    assert "will be made" in run("validate", "demo.yaml")
    run("recipes", "cp", "codestral-lora")
    assert "codestral.jinja: renders" in run("validate", "codestral-lora.yaml", "data.train.0.path=python-docs")
    code = "from ssm_tune.launch import find_config; print(find_config('ddp'), find_config('fsdp2'))"
    output = subprocess.run([python, "-c", code], cwd=empty, capture_output=True, text=True, check=True).stdout
    assert output.count(str(packages)) == 2
    short = ["training.max_steps=2", "training.max_length=64", "training.eval_strategy=no", "data.eval=null"]
    run("sft", "demo", *short, "data.train.0.split=train[:32]", "training.eval_on_start=false")
    assert (empty / "runs" / "demo" / "model.safetensors").exists()
