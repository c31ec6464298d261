"""`doctor` on machines made of stand-ins, on models of every family, and at the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from machines import BROKEN, MACHINES
from tiny import KINDS, tiny_config

from ssm_tune.cli import main
from ssm_tune.doctor import Advice, PackageReport, PathReport, Report, examination, examine
from ssm_tune.doctor.packages import KNOWN_FAULTS, judge_packages
from ssm_tune.doctor.report import ModelReport
from ssm_tune.kernels import backends, packages, reference
from ssm_tune.recipe import RecipeError

Machine = Callable[[str], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Becomes one of MACHINES, without the library `kernels`; its CPU stands in for a GPU."""
    devices = {("cuda",): ("cpu",), ("cpu",): ("none",)}
    table = [dataclasses.replace(b, devices=devices.get(b.devices, b.devices)) for b in backends.BACKENDS]
    # Our own kernels for a GPU need one, and have tests of their own.
    monkeypatch.setattr(backends, "BACKENDS", tuple(b for b in table if b.source != "ours"))
    monkeypatch.setattr(backends, "_settings", backends._Settings())
    monkeypatch.setattr(packages, "_loaded", {})
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.setitem(sys.modules, stand_ins.OUR_NORM, stand_ins.modules()[stand_ins.OUR_NORM])

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("mamba_ssm", "causal_conv1d")]:
            del sys.modules[name]

    def become(name: str) -> None:
        folder = tmp_path / "site-packages"
        folder.mkdir()
        MACHINES[name](folder)
        monkeypatch.syspath_prepend(folder)

    forget()
    yield become
    forget()


def packages_of(report: Report) -> dict[str, PackageReport]:
    return {package.name: package for package in report.packages}


def failures_of(report: Report) -> dict[tuple[str, str], str | None]:
    return {(trial.operation, trial.backend): trial.failure for trial in report.kernels}


def problems_of(report: Report) -> list[Advice]:
    return [advice for advice in report.advice if advice.level == "problem"]


# -- the five machines ---------------------------------------------------------------------------------------------


def test_a_machine_with_none(machine: Machine) -> None:
    machine("none")
    report = examine(device="cpu")
    found = packages_of(report)
    assert (found["mamba-ssm"].status, found["causal-conv1d"].status) == ("absent", "absent")
    assert failures_of(report)["ssd_scan", "mamba_ssm"] == "mamba_ssm is not installed"
    assert failures_of(report)["ssd_scan", "hub"] == "kernels is not installed"
    assert report.ok  # it is a choice
    assert "mamba-ssm        -           not installed" in report.to_text()


def test_a_machine_with_both(machine: Machine) -> None:
    machine("both")
    report = examine(device="cpu")
    found = packages_of(report)
    assert found["mamba-ssm"] == PackageReport("mamba-ssm", "2.3.2.post1", "works", "", found["mamba-ssm"].required)
    ours = {key: failure for key, failure in failures_of(report).items() if key[1] in ("mamba_ssm", "causal_conv1d")}
    assert {key for key, failure in ours.items() if failure} <= {("mamba3_scan", "mamba_ssm")}  # no stand-in for it
    assert len(ours) >= 8


def test_a_machine_with_a_broken_abi(machine: Machine) -> None:
    machine("broken ABI")
    report = examine(device="cpu")
    found = packages_of(report)["mamba-ssm"]
    assert (found.status, found.version, found.error) == ("broken", "2.3.2.post1", f"ImportError: {BROKEN}")
    assert f"BROKEN: ImportError: {BROKEN}" in " ".join(report.to_text().split())
    assert not any("mamba_ssm is not installed" in (failure or "") for failure in failures_of(report).values())
    assert failures_of(report)["causal_conv1d", "causal_conv1d"] == ""
    (problem,) = problems_of(report)  # told once, not for every kernel
    assert BROKEN in problem.what
    assert problem.fix.startswith("pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation 'mamba")
    assert not report.ok


def test_a_machine_whose_packages_are_too_old(machine: Machine) -> None:
    machine("too old")
    report = examine(device="cpu")
    failures = failures_of(report)
    assert "No module named 'mamba_ssm.ops.triton.ssd_combined'" in failures["ssd_scan", "mamba_ssm"]
    assert "output differs from the reference" in failures["gated_rms_norm", "mamba_ssm"]
    assert failures["selective_scan", "mamba_ssm"] == ""
    assert packages_of(report)["mamba-ssm"].status == "works"  # it imports
    assert any("mamba-ssm 1.2.0" in problem.what and "2.3" in problem.fix for problem in problems_of(report))


def test_a_machine_with_the_next_version(machine: Machine) -> None:
    machine("next version")
    report = examine(device="cpu")
    failures = failures_of(report)
    assert "RuntimeError: selective_scan_cuda is not installed" in failures["selective_scan", "mamba_ssm"]
    assert failures["ssd_scan", "mamba_ssm"] == failures["selective_scan_step", "mamba_ssm"] == ""
    (problem,) = [problem for problem in problems_of(report) if "selective_scan " in problem.what]
    assert problem.fix.startswith("MAMBA_KEEP_CUDA_BUILD=TRUE pip install")


@pytest.mark.parametrize(
    ("name", "scan", "reason"),
    [
        ("none", "reference", "mamba_ssm is not installed"),
        ("both", "mamba_ssm", ""),
        ("broken ABI", "reference", "undefined symbol"),
        ("too old", "mamba_ssm", ""),
        ("next version", "reference", "selective_scan_cuda is not installed"),
    ],
)
def test_the_paths_of_a_model_on_each_machine(
    name: str, scan: str, reason: str, machine: Machine, tmp_path: Path
) -> None:
    machine(name)
    tiny_config("mamba").save_pretrained(tmp_path / "model")
    report = examine(tmp_path / "model", device="cpu")
    paths = {(path.phase, path.operation): path for path in report.model.paths}
    found = paths["training", "selective_scan"]
    assert found.backend == scan
    assert reason in found.reason
    assert bool(found.cost) == bool(reason)


def test_only_the_kernels_of_a_model_are_called_for_it(machine: Machine, tmp_path: Path) -> None:
    machine("both")
    tiny_config("mamba").save_pretrained(tmp_path / "model")
    said: list[str] = []
    report = examine(tmp_path / "model", device="cpu", say=said.append)
    tried = {trial.operation for trial in report.kernels if trial.backend != "bitsandbytes"}
    assert {"selective_scan", "selective_scan_step", "causal_conv1d", "causal_conv1d_step"} == tried
    assert "selective_scan by mamba_ssm" in said


# -- packages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: f"{fault.package}{fault.versions}")
def test_known_faults_are_told_by_version(fault: Any) -> None:
    bad = {"<5.24": "5.17.0", "<2.3": "2.2.4", "<=2.3.2.post1": "2.3.2.post1", "<1.4": "1.2.0.post2"}[fault.versions]
    package = PackageReport(fault.package, bad, "works")
    assert any(fault.what in advice.what for advice in judge_packages([package], max(fault.capability, (9, 0))))
    good = PackageReport(fault.package, "99.0", "works")
    assert judge_packages([good], (10, 0)) == []


def test_a_fault_of_some_gpus_is_told_on_those() -> None:
    package = PackageReport("mamba-ssm", "2.3.2.post1", "works")
    assert judge_packages([package], (9, 0)) == []
    assert "Blackwell" in judge_packages([package], (10, 0))[0].what


@pytest.mark.parametrize(
    ("package", "what", "fix"),
    [
        (PackageReport("trl", "1.15.0", "works", required=">=1.16,<1.17"), "made for", "pip install 'trl>=1.16,<1.17'"),
        (PackageReport("peft", None, "absent", required=">=0.21"), "peft is not installed", "pip install 'peft>=0.21'"),
        (
            PackageReport("mamba-ssm", "2.3.2", "broken", "ModuleNotFoundError: No module named 'einops'"),
            "No module named 'einops'",
            "pip install einops",
        ),
        (PackageReport("numba", "0.68.1", "broken", "OSError: x.so"), "OSError: x.so", "pip install --force-reinstall"),
    ],
)
def test_what_to_do_about_a_package(package: PackageReport, what: str, fix: str) -> None:
    (advice,) = judge_packages([package], (0, 0))
    assert advice.level == "problem"
    assert what in advice.what
    assert advice.fix.startswith(fix)


def test_local_versions_and_optional_packages_are_no_problem() -> None:
    local = PackageReport("torch", "2.13.0+cpu", "works", required=">=2.11,<3")
    assert judge_packages([local, PackageReport("mamba-ssm", None, "absent")], (0, 0)) == []


def test_a_folder_of_a_packages_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ssm_tune.doctor.packages import look_at_packages

    (tmp_path / "causal_conv1d").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = {package.name: package for package in look_at_packages()}
    assert found["causal-conv1d"].status == "absent"
    assert found["torch"].status == "works"
    assert found["torch"].required


# -- models --------------------------------------------------------------------------------------------------------


@pytest.fixture
def only_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages and kernels of this machine are looked at in other tests."""
    monkeypatch.setattr(examination, "look_at_packages", lambda: [])
    monkeypatch.setattr(examination, "try_kernels", lambda operations, say: [])
    monkeypatch.setattr(examination, "try_packed_weights", lambda packages, device: [])


SCAN = {"mamba": "selective_scan", "falcon_mamba": "selective_scan", "jamba": "selective_scan"}
SCAN |= {"zamba": "selective_scan", "lfm2": "causal_conv1d"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_by_its_config_alone(kind: str, tmp_path: Path, only_models: None) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    report = examine(tmp_path, device="cpu")
    assert report.model.error == ""
    phases = {path.phase for path in report.model.paths}
    assert {"training", "token"} <= phases
    served = {path.operation: path.backend for path in report.model.paths if path.phase == "training"}
    assert served[SCAN.get(kind, "ssd_scan")] == "numba"
    assert report.ok
    assert json.loads(json.dumps(report.to_json()))["model"]["model_type"] == report.model.model_type


def test_sizes_that_a_kernel_cannot_serve_are_the_reason(tmp_path: Path, machine: Machine, only_models: None) -> None:
    machine("both")
    tiny_config("mamba", intermediate_size=36, conv_kernel=5).save_pretrained(tmp_path / "model")
    report = examine(tmp_path / "model", device="cpu")
    paths = {path.operation: path for path in report.model.paths}
    assert paths["causal_conv1d"].backend == "gathered"
    assert "a width of 5, only 2, 3 and 4" in paths["causal_conv1d"].reason


def test_a_slow_path_on_a_gpu_is_a_problem_and_on_a_cpu_a_note(only_models: None) -> None:
    reason, cost = "mamba_ssm: mamba_ssm is not installed", "100 times slower"
    path = PathReport("training", "selective_scan", "reference", reason, cost)
    for device, level in (("cuda", "problem"), ("cpu", "note")):
        model = ModelReport("m", "mamba", device, "bfloat16", "not quantised", "", [path])
        (advice,) = examination._judge_model(model, packages=[])
        assert advice.level == level
        assert cost in advice.what and reason in advice.what
        assert ("ssm-tune[prebuilt]" in advice.fix) == (device == "cuda")


def test_a_mixer_that_does_not_run_is_a_problem(
    tmp_path: Path, only_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(examination, "find_paths", fail)
    tiny_config("mamba").save_pretrained(tmp_path)
    report = examine(tmp_path, device="cpu")
    assert not report.ok
    assert "no kernel image is available" in report.to_text()


@pytest.mark.parametrize("order", ["[pytorch]", "[reference]"])
def test_a_recipes_order_is_followed(order: str, tmp_path: Path, only_models: None) -> None:
    tiny_config("mamba").save_pretrained(tmp_path / "base")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: base, load_in_4bit: true}}\ndata: {{train: [{{path: rows.jsonl}}]}}\nadapter: {{r: 4}}\n"
        f"kernels: {{order: {order}}}\ntraining: {{output_dir: run}}\n"
    )
    report = examine(recipe, device="cpu")
    assert {path.backend for path in report.model.paths if path.operation == "selective_scan"} == {"reference"}
    assert report.model.weights == "in 4 bits"
    assert any("needs bitsandbytes" in problem.what for problem in problems_of(report))  # it was not looked at
    assert backends._settings.order == ()


def test_a_new_architectures_recipe(tmp_path: Path, only_models: None) -> None:
    report = examine("demo", device="cpu")
    assert report.model.model_type == "mamba"


def test_a_run_folder_is_its_base_and_its_recipe(tmp_path: Path, only_models: None) -> None:
    tiny_config("mamba2").save_pretrained(tmp_path / "base")
    run = tmp_path / "run"
    run.mkdir()
    (run / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")})
    )
    (run / "recipe.resolved.yaml").write_text(
        f"model: {{name: {tmp_path / 'base'}, dtype: bfloat16}}\ndata: {{train: [{{path: gone.jsonl}}]}}\n"
        "adapter: {r: 4}\ntraining: {output_dir: run}\n"
    )
    report = examine(run, device="cpu")
    assert (report.model.model_type, report.model.dtype) == ("mamba2", "bfloat16")
    (run / "adapter_config.json").unlink()  # the run has not ended
    assert examine(run, device="cpu").model.model_type == "mamba2"


def test_a_run_whose_base_is_on_the_hub_does_not_ask_for_it(tmp_path: Path, only_models: None) -> None:
    content = {"peft_type": "LORA", "base_model_name_or_path": "nobody/no-such-mamba"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "recipe.resolved.yaml").write_text(
        "model: {name: nobody/no-such-mamba}\ndata: {train: [{path: gone.jsonl}]}\nadapter: {r: 4}\n"
        "training: {output_dir: run}\n"
    )
    with pytest.raises(RecipeError, match="ssm-tune doctor nobody/no-such-mamba"):
        examine(tmp_path, device="cpu")


# -- the command line ----------------------------------------------------------------------------------------------

KEYS = ["schema", "ok", "machine", "packages", "kernels", "model", "advice"]


def test_the_command_prints_json_and_its_exit_code_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config("mamba").save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == KEYS
    assert found["schema"] == 1 and found["ok"] is True
    assert set(found["model"]["paths"][0]) == {"phase", "operation", "backend", "reason", "cost"}
    broken = PackageReport("mamba-ssm", "2.3.2", "broken", "ImportError: undefined symbol: x")
    monkeypatch.setattr(examination, "look_at_packages", lambda: [broken])
    assert main(["doctor"]) == 1
    assert "1. problem: mamba-ssm is installed and broken" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["no/such/folder.yaml", "."])
def test_a_model_that_is_none_is_the_users_mistake(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], only_models: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", name]) == 2
    assert capsys.readouterr().err.strip()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("none", 0), ("broken ABI", 1)])
def test_in_a_process_of_its_own_without_a_gpu(name: str, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    MACHINES[name](folder)
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (folder, tests / "operations", tests.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "ssm_tune", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    mamba = next(package for package in found["packages"] if package["name"] == "mamba-ssm")
    assert mamba["status"] == ("absent" if name == "none" else "broken")
    tried = {kernel["status"] for kernel in found["kernels"] if kernel["device"] == "cpu"}
    assert tried == {"works"}
    if name != "none":
        assert mamba["error"] == f"ImportError: {BROKEN}"


def test_the_reference_is_what_kernels_are_compared_with() -> None:
    """The doctor's word is worth what the trial's is: a kernel that is off by a fifth is found out."""
    from ssm_tune.kernels.trials import WrongResultError, run_trial

    with pytest.raises(WrongResultError):
        run_trial("rms_norm", lambda *a, **k: reference.rms_norm(*a, **k) * 1.2, torch.device("cpu"))
