"""The benchmarks run: with sizes at which they measure nothing, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_the_table_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from train_speed import table

    common = {"row": "mamba-130m-full", "mfu": None, "peak_gib": 9.0, "first_step_seconds": 1.0, "steps": 9, "ms": 10.0}
    results = [
        {**common, "variant": "stock", "tokens_per_second": 100.0, "activations_gib": 5.0},
        {**common, "variant": "ours", "tokens_per_second": 1.0, "activations_gib": 1.0},
        {**common, "variant": "ours", "tokens_per_second": 230.0, "activations_gib": 2.0},
        {"row": "mamba-130m-full", "variant": "mamba_ssm", "problem": "ImportError: no such thing"},
    ]
    lines = table(results).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["stock", "mamba_ssm", "ours"]
    assert "| 2.30 (target 2.0) | 0.40 |" in lines[-1]
    assert "no such thing" in lines[-2]


def test_a_run_without_a_loss_is_left_out_of_the_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from pretrain_table import last_losses

    for name, lines in {"h3": ['{"step": 0}'], "samba": ['{"loss": 9.5}', '{"loss": 7.5}', '{"eval_loss": 8}']}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    assert last_losses(tmp_path) == {"samba": 7.5}
    assert "h3: no loss" in capsys.readouterr().out


def test_the_profile_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap counts once in what is busy, and names fall into their groups."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from speed_profile import Kernel, group_of, profile_text, summary

    kernels = [
        Kernel("forward_kernel", 0.0, 1000.0),
        Kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", 500.0, 2000.0),
        Kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", 600.0, 900.0),
        Kernel("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl>" + "x" * 80, 3000.0, 3500.0),
    ]
    found = summary(kernels, launch_calls=3, wall_ms=5.0)
    assert (found["busy_ms"], found["kernels"], found["launch_calls"]) == (2.5, 4, 3)
    assert [(entry["name"], entry["count"], entry["ms"]) for entry in found["groups"]] == [
        ("matrix products", 2, 1.8),
        ("selective scan", 1, 1.0),
        ("other elementwise", 1, 0.5),
    ]
    assert len(found["longest"][-1]["name"]) == 80
    assert "GPU busy 2.5 ms of a step of 4.0 ms" in profile_text(found, timed_ms=4.0)
    for name, group in {
        "void selective_scan_bwd_kernel<Selective_Scan_bwd_kernel_traits<128> >": "selective scan",
        "reverse_ends_kernel": "selective scan",
        "_chunk_scan_chunk_state_bwd_dx_kernel": "SSD",
        "_state_passing_fwd_kernel": "SSD",
        "_bmm_chunk_bwd_kernel": "SSD",
        "output_kernel": "SSD",
        "copied_output_kernel": "SSD",
        "state_gradients_kernel": "SSD",
        "last_gradients_kernel": "SSD",
        "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<128> >": "convolution",
        "conv_slope_kernel": "convolution",
        "_layer_norm_bwd_kernel": "norms",
        "_add_norm": "norms",
        "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>": "optimizer and clipping",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "matrix products",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>": "attention",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>": "copies and casts",
        "Memcpy DtoD (Device -> Device)": "copies and casts",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "reductions",
        "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float>": "softmax and loss",
        "void at::native::indexSelectLargeIndex<float>": "rest",
    }.items():
        assert group_of(name) == group, name


def test_a_profiler_that_fails_costs_no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "1")
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    import speed_profile
    from speed_meter import Meter

    def no_profiler(**settings: object) -> None:
        raise RuntimeError("CUPTI is taken")

    monkeypatch.setattr(speed_profile, "profile", no_profiler)
    meter = Meter(0.0, warm=2, step_profile=speed_profile.StepProfile(on_gpu=False))
    meter.on_gpu = False
    assert [meter.step_ended() for _ in range(4)] == [False, False, False, True]
    assert meter.timed > 0 and meter.step_profile is not None
    assert "CUPTI is taken" in speed_profile.profile_text(meter.step_profile.found, meter.timed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_speed_in_small(tmp_path: Path) -> None:
    file, rows = tmp_path / "results.json", ["mamba-130m-full", "codestral-7b-lora", "mamba2-130m-gsm8k"]
    run("train_speed.py", "--tiny", "--device", "cpu", "--profile", "--rows", *rows, "--results", str(file))
    found = {(entry["row"], entry["variant"]): entry for entry in json.loads(file.read_text(encoding="utf-8"))}
    assert set(found) == {
        (row, variant) for row in rows for variant in ("stock", "stock, made right", "ours, launched", "ours")
    }
    for key, entry in found.items():
        assert "problem" not in entry, (key, entry)
        assert entry["tokens_per_second"] > 0 and entry["steps"] == 2
        assert entry["profile"]["kernels"] == 0  # on a CPU, but the profiler ran


@pytest.mark.slow
def test_norm_speed_in_small() -> None:
    lines = run("norm_speed.py", "--tokens", "4", TRITON_INTERPRET="1").splitlines()
    assert [line[:25].split()[0] for line in lines[1:]] == ["mamba-130m"] * 2 + ["mamba-1.4b"] * 2
    assert all(float(line.split()[-2]) > 0 for line in lines[1:])
    lines = run("norm_speed.py", "--gated", "--tokens", "4", TRITON_INTERPRET="1").splitlines()
    assert [line.split()[:2] for line in lines[2::2]] == [["mamba2-130m", "ours"], ["mamba2-1.3b", "ours"]]
    assert all(float(line.split()[-2]) > 0 for line in lines[2::2])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scan_speed_in_small() -> None:
    sizes = ("--batch", "1", "--length", "16", "--channels", "4", "--states", "2")
    lines = run("scan_speed.py", "--sweep", *sizes, TRITON_INTERPRET="1").splitlines()
    errors = [float(error.split()[-1]) for error in lines[0].removeprefix("errors of triton: ").split(", ")]
    assert len(errors) == 9 and max(errors) < 1e-2
    assert any(line.startswith("sweep backward") for line in lines)
    assert any(
        line.startswith("triton_conv, documents")
        for line in run("scan_speed.py", "--conv", *sizes, TRITON_INTERPRET="1").splitlines()
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ssd_speed_in_small() -> None:
    lines = run("ssd_speed.py", "--ways", "ours", "--tiny", TRITON_INTERPRET="1").splitlines()
    errors = [float(error.split()[-1]) for error in lines[0].removeprefix("tiny ours errors: ").split(", ")]
    assert len(errors) == 8 and max(errors) < 1e-3
    assert [line.split(", ms")[0] for line in lines[1:]] == ["tiny ours documents", "tiny ours no documents"]
