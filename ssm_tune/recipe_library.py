"""The shipped recipes: what there is, what one says, a copy to change."""

from __future__ import annotations

from pathlib import Path

from ssm_tune.recipe import RecipeError
from ssm_tune.recipe_checks import nearest
from ssm_tune.shipped import shipped, shipped_names


def list_recipes() -> dict[str, str]:
    """Every shipped recipe by name, with its one-line summary: the first line of its header comment."""
    return {name: read_recipe(name).partition("\n")[0].lstrip("# ") for name in shipped_names("recipes")}


def read_recipe(name: str) -> str:
    """The text of a shipped recipe. Raises RecipeError, with the nearest name, if there is none of this name."""
    return _path_of(name).read_text(encoding="utf-8")


def copy_recipe(name: str, to: Path | None = None) -> Path:
    """Copy a shipped recipe to a file, or into a folder; None: the working directory. Templates stay in the package.

    Raises:
        RecipeError: no such recipe, the file exists already, or it cannot be written.
    """
    text = read_recipe(name)
    target = Path(f"{_path_of(name).stem}.yaml") if to is None else to.expanduser()
    if target.is_dir():
        target = target / f"{_path_of(name).stem}.yaml"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise RecipeError(f"{target}: exists already; give another name: ssm-tune recipes cp {name} FILE") from error
    except OSError as error:
        raise RecipeError(f"{target}: cannot be written: {error.strerror}") from error
    return target


def _path_of(name: str) -> Path:
    stem = name.removesuffix(".yaml")
    names = shipped_names("recipes")
    if stem not in names:
        listed = f" There are: {', '.join(names)}"
        raise RecipeError(f"recipes: {name} is not a shipped recipe.{nearest(stem, names, listed)}")
    return shipped("recipes", f"{stem}.yaml")
