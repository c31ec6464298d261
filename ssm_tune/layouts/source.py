"""Where a checkpoint's files come from: a local folder, or a repository on the Hugging Face Hub.

A Hub repository is read file by file, so that only what the chosen layout needs is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssm_tune.recipe import RecipeError

_LFS_POINTER = b"version https://git-lfs"


@dataclass
class Source:
    """One checkpoint's files. `key` is the recipe key that named it and begins every message.

    Args:
        name: a folder, or a Hub repository ("owner/name").
        revision: branch, tag or commit of a Hub repository. The first file read pins the commit, so that config and
            weights are of one state.
        local_only: never ask the Hub, use what its cache holds (HF_HUB_OFFLINE=1 does the same for everything).
    """

    name: str
    revision: str | None = None
    local_only: bool = False
    key: str = "model.name"
    folder: Path | None = field(init=False, default=None)
    commit: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        path = Path(self.name).expanduser()
        if path.is_dir():
            self.folder = path.resolve()
        elif path.is_file():
            raise RecipeError(f"{self.key}: {self.name} is a file. Name the folder that holds the checkpoint.")
        elif looks_like_path(self.name):
            raise RecipeError(f"{self.key}: there is no folder {self.name}.")

    @property
    def label(self) -> str:
        """What messages call it: the key and the name as the user wrote it."""
        return f"{self.key} {self.name}"

    def get(self, filename: str) -> Path | None:
        """The local path of a file, fetched first if need be; None if the checkpoint has no such file.

        Raises:
            RecipeError: the repository does not exist, is gated, or cannot be reached and is not in the cache.
        """
        if self.folder is not None:
            path = self.folder / filename
            return path if path.is_file() else None
        return self._fetch(filename)

    def require(self, filename: str, *, because: str) -> Path:
        """As `get`, but a missing file is an error; `because` says who asks for it."""
        path = self.get(filename)
        if path is None:
            raise RecipeError(f"{self.label}: {filename} is missing ({because}). Fetch the checkpoint again.")
        return path

    def read_json(self, filename: str) -> dict[str, Any] | None:
        """A JSON object of the checkpoint; None if there is no such file; RecipeError if it is not a JSON object."""
        path = self.get(filename)
        return None if path is None else read_json_object(path)

    def listing(self) -> str:
        """The files of a local folder, for a message."""
        if self.folder is None:
            return "a Hub repository"
        names = sorted(path.name for path in self.folder.iterdir())
        if not names:
            return "the folder is empty"
        return "it holds " + ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def _fetch(self, filename: str) -> Path | None:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RemoteEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        offline = self.local_only or constants.is_offline_mode()
        try:
            path = hf_hub_download(self.name, filename, revision=self.commit or self.revision, local_files_only=offline)
        except RemoteEntryNotFoundError:
            return None
        except LocalEntryNotFoundError as error:
            if offline:
                return None
            raise RecipeError(
                f"{self.label}: the Hub cannot be reached and {filename} is not in its cache. Check the connection, or "
                f"name a local folder."
            ) from error
        except HFValidationError as error:
            raise RecipeError(
                f"{self.label} is neither a folder nor a name on the Hub (owner/name). Check the spelling."
            ) from error
        except GatedRepoError as error:
            raise RecipeError(
                f"{self.label}: access is restricted. Accept its terms on the Hub, then run `hf auth login`."
            ) from error
        except RevisionNotFoundError as error:
            raise RecipeError(f"model.revision: {self.name} has no revision {self.revision!r}.") from error
        except RepositoryNotFoundError as error:
            raise RecipeError(
                f"{self.label} is no folder here and no public repository on the Hub. Check the spelling; for a "
                f"private one run `hf auth login`."
            ) from error
        except HfHubHTTPError as error:
            raise RecipeError(f"{self.label}: the Hub refused {filename} ({error}).") from error
        found = Path(path)
        self.commit = self.commit or _commit_of(found, filename)
        return found


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a path: a Hub name has at most one slash and does not begin with one, . or ~."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or name.count("/") > 1


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a RecipeError that says where it breaks."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path} is not valid JSON: line {error.lineno}: {error.msg}. Fetch it again.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text (byte {error.start}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise RecipeError(f"{path} holds a JSON {type(value).__name__}; an object is expected.")
    return value


def check_files(paths: Iterable[Path]) -> None:
    """Refuse what is no weight file at all: an empty file, or a Git LFS pointer in its place."""
    for path in paths:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
        if not start:
            raise RecipeError(f"{path} is empty. Fetch it again.")
        if start == _LFS_POINTER:
            raise RecipeError(f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder.")


def _commit_of(path: Path, filename: str) -> str | None:
    """The commit in a cache path (.../snapshots/COMMIT/filename)."""
    snapshot = path.parents[filename.count("/")]
    return snapshot.name if snapshot.parent.name == "snapshots" else None
