"""Publishing a run: one repository, one commit, nothing but what a reader of the model needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects, get_token, validate_repo_id

from ssm_tune.recipe import RecipeError

# Checkpoints, logs and absolute paths (recipe.resolved.yaml, environment.json) stay at home.
PUBLISHED = (
    "README.md",
    "recipe.yaml",
    "loss.png",
    "eval.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "ssm_parameters.safetensors",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)

_TEXT = (".md", ".yaml", ".json", ".jinja", ".txt")


def check_repo_name(repo: str) -> None:
    """Raises RecipeError if this cannot be the name of a repository."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RecipeError(f"hub.repo: {repo!r} is not a repository's name (owner/name): {error}") from error


def push_folder(
    folder: Path, repo: str, *, private: bool = False, message: str, patterns: Sequence[str] = PUBLISHED
) -> str:
    """Upload the published files of a folder in one commit; returns the commit's address.

    A push that breaks off leaves the repository as it was: files are sent first, and the one commit that shows them
    comes last (upload_folder of newer clients makes several). Published files of an earlier push that this one has not
    are taken away in the same commit: an adapter's configuration beside a merged model would be loaded on top of it.
    The token is huggingface_hub's own (`hf auth login`, or HF_TOKEN); it is written nowhere.

    Raises:
        RecipeError: a name that cannot be, no token, no permission, no network; a file that holds the token.
    """
    check_repo_name(repo)
    files = {path.name: path for path in _published(sorted(folder.iterdir()), patterns)}
    _refuse_secrets(files.values())
    api = HfApi()
    try:
        full_name = api.create_repo(repo, private=private, repo_type="model", exist_ok=True).repo_id
        old = [Path(name) for name in api.list_repo_files(full_name) if "/" not in name and name not in files]
        commit = api.create_commit(
            full_name,
            [
                *(CommitOperationAdd(name, str(path)) for name, path in files.items()),
                *(CommitOperationDelete(path.name) for path in _published(old, patterns)),
            ],
            commit_message=message,
            repo_type="model",
        )
    except LocalTokenNotFoundError as error:
        raise RecipeError("hub: no token was found. Log in with `hf auth login`, or set HF_TOKEN.") from error
    except OfflineModeIsEnabled as error:
        raise RecipeError("hub: HF_HUB_OFFLINE is set, so nothing can be pushed.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reason = {
            401: "the token is not valid; log in with `hf auth login`, or set HF_TOKEN",
            403: "the token may not write there",
            404: "there is no such place, or the token may not see it",
        }.get(status, str(error).splitlines()[0])
        raise RecipeError(f"hub.repo: {repo}: {reason}.") from error
    except httpx2.TransportError as error:
        raise RecipeError(f"hub: {api.endpoint} cannot be reached ({error}).") from error
    except (OSError, RuntimeError) as error:  # of hf_xet, which sends the weights, and has no errors of its own
        raise RecipeError(f"hub.repo: {repo}: the upload broke off, and changed nothing there ({error}).") from error
    return commit.commit_url


def _published(paths: Iterable[Path], patterns: Sequence[str]) -> Iterable[Path]:
    return filter_repo_objects(paths, allow_patterns=list(patterns), key=lambda path: path.name)


def _refuse_secrets(files: Iterable[Path]) -> None:
    """A recipe's comment or a command may hold the token that it is pushed with: then nothing is sent."""
    token = get_token()
    for file in files if token else ():
        if file.suffix in _TEXT and token in file.read_text(encoding="utf-8", errors="replace"):
            raise RecipeError(f"hub: {file} holds your token, so nothing was pushed. Take it out, and revoke it.")
