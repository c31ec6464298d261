"""Prebuilt kernels, through Hugging Face's library `kernels`: the real library, with repositories made of stand-ins."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import stand_ins
import torch
from comparison import conv_tensors, scan_tensors

import ssm_tune.kernels as operations
from ssm_tune.kernels import backends, packages, set_kernel_order

pytest.importorskip("kernels", reason="an optional extra: prebuilt")


def write_repository(folder: Path, name: str, package: str, *, first_lines: str = "") -> Path:
    """A kernel repository as the Hub has it, one variant for any PyTorch, whose functions are the stand-ins'."""
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    metadata = {
        "id": f"_{package}_stand_in_{folder.name}",
        "name": name,
        "version": 1,
        "license": "MIT",
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps({**metadata, "python-depends": []}))
    for module_name, module in stand_ins.modules().items():
        root, _, rest = module_name.partition(".")
        if root != package:
            continue
        place = variant.joinpath(*rest.split(".")) if rest else variant
        place.mkdir(exist_ok=True)
        found = [n for n, value in vars(module).items() if callable(value) and not n.startswith("__")]
        lines = [first_lines] if not rest else []
        lines += [f"from stand_ins import {function}" for function in found]
        (place / "__init__.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The two repositories, in the place of the Hub's; and no packages installed, on a CPU that stands in for a GPU."""
    for name in ("mamba_ssm", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, stand_ins.OUR_NORM, stand_ins.modules()[stand_ins.OUR_NORM])
    monkeypatch.setattr(backends, "_settings", backends._Settings())
    monkeypatch.setattr(packages, "_loaded", {})
    devices = {("cuda",): ("cpu",), ("cpu",): ("none",)}
    table = [
        dataclasses.replace(b, devices=devices.get(b.devices, b.devices))
        for b in backends.BACKENDS
        if b.source != "ours"
    ]
    monkeypatch.setattr(backends, "BACKENDS", tuple(table))
    repositories = {
        "kernels-community/mamba-ssm": write_repository(tmp_path / "a", "mamba-ssm", "mamba_ssm"),
        "kernels-community/causal-conv1d": write_repository(tmp_path / "b", "causal-conv1d", "causal_conv1d"),
    }
    monkeypatch.setenv("LOCAL_KERNELS", ":".join(f"{repo}={path}" for repo, path in repositories.items()))
    import kernels

    clear = kernels.load._parse_local_kernel_overrides.cache_clear
    clear()
    yield repositories
    clear()


def test_the_tests_lie_beside_no_folder_of_the_librarys_name() -> None:
    import kernels

    assert "get_kernel" in vars(kernels)
    assert not (Path(__file__).parents[1] / "kernels").exists()


def test_prebuilt_kernels_serve_where_nothing_is_installed(
    hub: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    stand_ins.CALLS.clear()
    found = {choice.operation: choice for choice in operations.kernel_report("cpu")}
    served = {operation for operation, choice in found.items() if choice.backend == "hub"}
    assert served == set(backends.OPERATIONS) - {
        "mamba3_scan",
        "add_rms_norm",
        "residual_rms_norm",
        "low_rank_gradients",
        "low_rank_product",
        "narrow_weight_gradient",
        "rms_norm_parts",
    }  # which are ours alone
    assert found["selective_scan"].reason.startswith("mamba_ssm: mamba_ssm is not installed")
    assert found["causal_conv1d"].cost == ""
    scan = {name: t.float() for name, t in scan_tensors(length=5).items()}
    conv = {name: t.float() for name, t in conv_tensors(length=5, dim=16).items()}
    torch.testing.assert_close(operations.selective_scan(**scan), operations.reference.selective_scan(**scan))
    torch.testing.assert_close(operations.causal_conv1d(**conv), operations.reference.causal_conv1d(**conv))
    assert {"selective_scan_fn", "causal_conv1d_fn", "rmsnorm_fn"} <= set(stand_ins.CALLS)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # nothing is lost by it


def test_required_is_content_with_prebuilt_kernels(hub: dict[str, Path]) -> None:
    set_kernel_order(None, required=True)
    operations.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["hub"], "hub"),
        (["pytorch", "hub"], "chunked"),
        (["reference", "hub"], "reference"),
        (["installed", "pytorch"], "chunked"),
        (["ours"], "hub"),
    ],
)
def test_the_order_may_name_sources(hub: dict[str, Path], order: list[str], expected: str) -> None:
    set_kernel_order(order)
    (choice,) = operations.kernel_report("cpu", ["ssd_scan"])
    assert choice.backend == expected


def test_installed_kernels_come_first_unless_the_order_says_otherwise(
    hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert operations.kernel_report("cpu", ["ssd_scan"])[0].backend == "mamba_ssm"
    set_kernel_order(["hub"])
    assert operations.kernel_report("cpu", ["ssd_scan"])[0].backend == "hub"


def test_a_call_that_the_installed_kernel_refuses_does_not_ask_the_hub(
    hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(packages, "_load", lambda repo, version: pytest.fail("asked the Hub"))
    tensors = scan_tensors(length=3)  # float64
    torch.testing.assert_close(operations.selective_scan(**tensors), operations.reference.selective_scan(**tensors))


@pytest.mark.parametrize(
    ("first_lines", "said"),
    [
        ("raise ImportError('_mamba.abi3.so: undefined symbol: aoti_torch')", "undefined symbol: aoti_torch"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12"),
    ],
)
def test_a_prebuilt_kernel_that_is_broken_keeps_its_words(
    hub: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_lines: str, said: str
) -> None:
    broken = write_repository(tmp_path / "c", "mamba-ssm", "mamba_ssm", first_lines=first_lines)
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/mamba-ssm={broken}")
    (choice,) = operations.kernel_report("cpu", ["ssd_scan"])
    assert choice.backend == "chunked"
    assert said in choice.reason
    assert "hub: does not work here" in choice.reason


def test_what_is_not_in_the_cache_is_said_and_asked_for_once(
    hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_KERNELS")
    loads = []
    load = packages._load
    monkeypatch.setattr(packages, "_load", lambda *of: loads.append(of) or load(*of))
    found = operations.kernel_report("cpu", ["ssd_scan", "ssd_step", "selective_scan"])
    assert all("kernels-community/mamba-ssm version 5" in choice.reason for choice in found)
    assert loads == [("kernels-community/mamba-ssm", 5)]


def test_without_the_library_it_is_not_installed(hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    (choice,) = operations.kernel_report("cpu", ["ssd_scan"])
    assert choice.reason == "mamba_ssm: mamba_ssm is not installed; hub: kernels is not installed"


def test_nothing_is_downloaded_inside_the_scope(hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("LOCAL_KERNELS")
    with packages.without_downloads(), pytest.raises(ImportError, match="not available in the local cache"):
        packages.HUB_MAMBA_SSM.function("ops.triton.layer_norm.rms_norm_fn")
    assert constants.HF_HUB_OFFLINE is False
    assert packages._loaded == {}
