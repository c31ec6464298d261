"""Files that travel with the package: recipes and accelerate configs."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(kind: str, name: str = "") -> Path:
    """The path of shipped data: a folder such as "recipes", or a file in it.

    A wheel holds the folders inside the package; a checkout, and an editable installation, has them beside it.

    Raises:
        FileNotFoundError: the installation lacks the folder, or the folder lacks the file.
    """
    for folder in (_PACKAGE / kind, _PACKAGE.parent / kind):
        if folder.is_dir():
            path = folder / name if name else folder
            if not path.exists():
                raise FileNotFoundError(f"{name} is not among the shipped {kind}")
            return path
    raise FileNotFoundError(f"this installation of ssm-tune lacks its {kind} folder; install it again")


def shipped_names(kind: str) -> list[str]:
    """The names, without .yaml, that a user may write for a file of this kind; sorted."""
    return sorted(path.stem for path in shipped(kind).glob("*.yaml"))
