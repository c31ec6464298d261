"""Package data: found in a wheel and in a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssm_tune import shipped as module
from ssm_tune.shipped import shipped, shipped_names


def test_a_checkout_has_its_data_beside_the_package() -> None:
    root = Path(module.__file__).parent.parent
    assert shipped("recipes") == root / "recipes"
    assert shipped("recipes", "demo.yaml").read_text().startswith("#")
    assert "demo" in shipped_names("recipes")
    assert {"ddp", "fsdp2", "single_gpu"} <= set(shipped_names("accelerate_configs"))


def test_a_wheel_has_them_inside_and_they_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "ssm_tune"
    for folder in (package / "recipes", tmp_path / "site" / "recipes"):
        folder.mkdir(parents=True)
        (folder / "only.yaml").write_text(str(folder))
    monkeypatch.setattr(module, "_PACKAGE", package)
    assert shipped("recipes") == package / "recipes"
    assert shipped_names("recipes") == ["only"]
    with pytest.raises(FileNotFoundError, match="lacks its accelerate_configs folder; install it again"):
        shipped("accelerate_configs")


def test_files_that_are_not_shipped() -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.yaml is not among the shipped recipes"):
        shipped("recipes", "gone.yaml")
