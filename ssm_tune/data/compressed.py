"""Data files as they are, or compressed as data sets are published: rows.jsonl.gz, rows.jsonl.zst."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ssm_tune.recipe import RecipeError

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_CHUNK = 2**17  # compressed bytes read at once
_LONGEST_WINDOW = 2**31  # what `zstd --long=31` asks a reader to keep


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, in small letters: ".jsonl" of rows.jsonl and of rows.jsonl.gz."""
    inner = Path(path.stem) if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """The bytes of a file, decompressed. One may peek, read lines, and seek forward (which a compressed file reads).

    Raises RecipeError for a compressed file that is damaged or cut off, and for .zst without the package that it
    needs; OSError as `open` does.
    """
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstandard}
    suffix = path.suffix.lower()
    if suffix not in openers:
        with path.open("rb") as file:
            yield file
        return
    with path.open("rb"):  # what is wrong with the file itself is told as of any other
        pass
    try:
        with openers[suffix](path) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, _Damaged, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise RecipeError(f"{path}: not a readable {suffix} file: {error}. Fetch or make it again.") from error


class _Damaged(Exception):
    """What a .zst file holds is not what zstandard wrote."""


def _open_zstandard(path: Path) -> BinaryIO:
    try:
        import zstandard
    except ImportError as error:
        raise RecipeError(f"{path}: reading .zst files needs a package: pip install 'ssm-tune[stream]'.") from error
    return io.BufferedReader(_ZstandardFile(path, zstandard))  # type: ignore[return-value]


class _ZstandardFile(io.RawIOBase):
    """Frames one after the other; unlike zstandard's own reader, one that is cut off is an error."""

    def __init__(self, path: Path, package: Any) -> None:
        self._file, self._package = path.open("rb"), package
        self._frame: Any = None
        self._ready, self._position = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        wanted = offset + (self._position if whence == io.SEEK_CUR else 0)
        while self._position < wanted and self.read(min(wanted - self._position, _CHUNK)):
            pass
        return self._position

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (chunk := self._file.read(_CHUNK)):
            self._ready = memoryview(self._decompress(chunk))
        if not self._ready and self._frame is not None:
            raise EOFError("it ends before the end of its last frame")
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        self._position += size
        return size

    def _decompress(self, chunk: bytes) -> bytes:
        found = []
        while chunk:
            if self._frame is None:
                self._frame = self._package.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()
            try:
                found.append(self._frame.decompress(chunk))
            except self._package.ZstdError as error:
                raise _Damaged(str(error)) from error
            chunk = b""
            if self._frame.eof:
                chunk, self._frame = self._frame.unused_data, None
        return b"".join(found)

    def close(self) -> None:
        self._file.close()
        super().close()
