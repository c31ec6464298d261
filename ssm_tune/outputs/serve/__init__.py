"""An HTTP server for one model: OpenAI's and Megatron's requests, a chat page, all answers decoded together.

`start_server` is what the command line calls. It needs the `serve` extra; nothing here is imported before it is asked
for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ssm_tune.recipe import RecipeError


def start_server(source: str | Path, *, host: str = "127.0.0.1", port: int = 6000, **settings: Any) -> int:
    """Serve a run or a model until a signal comes; returns the exit code.

    Args:
        settings: see `ServeSettings`.

    Raises:
        RecipeError: FastAPI or uvicorn is not installed; a setting that cannot be; an address that cannot be had;
            a source that cannot be loaded.
    """
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(f"serve needs {' and '.join(missing)}: pip install 'ssm-tune[serve]'.")
    from ssm_tune.outputs.serve.server import serve_source
    from ssm_tune.outputs.serve.settings import ServeSettings

    settings.setdefault("name", Path(source).resolve().name if Path(source).exists() else str(source))
    return serve_source(source, host, port, ServeSettings(**settings))
