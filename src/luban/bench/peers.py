"""Starts workers and talks to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from luban.errors import LubanError

# What keeps glibc from giving memory back between steps; peers gain by it, Luban keeps its memory anyway.
TUNED_MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"
_PATIENCE = 10  # seconds that a worker gets to end by itself


class Peer:
    """A worker process; `first` is what it said about its first step."""

    def __init__(self, asked: Mapping[str, Any], environment: Mapping[str, str]):
        self.name = f"{asked['peer']} on {asked['model']}"
        self.log = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "luban.bench.worker", json.dumps(dict(asked))]
        full = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", **environment}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=full
        )
        self.first: dict[str, Any] = {}

    def wait_for_first(self) -> dict[str, Any]:
        """What the worker says after its first step. Raises LubanError with its last words if it died."""
        self.first = self._answer()
        return self.first

    def steps(self, count: int) -> dict[str, Any]:
        """Makes `count` steps: {"times", "loss_last", "peak_mib"}."""
        assert self.process.stdin is not None
        try:
            print(count, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # its end is reported by the missing answer
        return self._answer()

    def close(self) -> None:
        """Ends the worker."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise LubanError(f"the worker of {self.name} ended early: {answer['error']}")
            return answer
        self.process.wait()
        self.log.seek(0)
        said = [text.strip() for text in self.log.read().splitlines() if text.strip()]
        last = said[-1][:300] if said else f"exit code {self.process.returncode}"
        raise LubanError(f"the worker of {self.name} ended early: {last}")


@contextmanager
def peer(asked: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Iterator[Peer]:
    """A worker that ends with the `with` block."""
    made = Peer(asked, environment or {})
    try:
        yield made
    finally:
        made.close()


def cache_folders(folder: str) -> dict[str, str]:
    """An environment whose compilers keep their caches in a folder of their own."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "LUBAN_CACHE_DIR": os.path.join(folder, "luban"),
    }
