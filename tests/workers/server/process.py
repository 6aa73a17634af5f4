"""Worker processes for tests: started as the launcher starts them, over the same two pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
_RUN = """
import json, sys
from omni_proxy.workers.engine.worker import run_worker
from omni_proxy.workers.engine.worker_options import WorkerOptions
sys.exit(run_worker(WorkerOptions(**json.loads(sys.argv[1]))))
"""


@dataclass
class WorkerProcess:
    """One worker; `ready` is what it told its launcher, `parent` the pipe end whose closing it must notice."""

    process: subprocess.Popen[str]
    parent: int
    ready_pipe: int
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://{self.ready['host']}:{self.ready['port']}"

    def wait_ready(self) -> None:
        with os.fdopen(self.ready_pipe) as pipe:
            self.ready = json.loads(pipe.readline())

    def metrics(self) -> dict[str, float]:
        """All samples by name, summed over their labels, and `name{source}` for prompt tokens."""
        text = httpx.get(self.url + "/metrics", trust_env=False).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name
                if source := sample.labels.get("source"):
                    found[source] = sample.value
                found[name] = found.get(name, 0) + sample.value
        return found

    def end(self) -> int:
        """Close the launcher's pipe and wait."""
        if self.parent >= 0:
            os.close(self.parent)
            self.parent = -1
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            if self.process.stderr is not None:
                self.process.stderr.close()


def start_worker(model: Path | str, **options: Any) -> WorkerProcess:
    """Start a worker without waiting for it."""
    ready_read, ready_write = os.pipe()
    parent_read, parent_write = os.pipe()
    fds = {"ready_fd": ready_write, "parent_fd": parent_read}
    arguments = json.dumps({"model": str(model), **fds, **options})
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, arguments],
        pass_fds=(ready_write, parent_read),
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(ready_write)
    os.close(parent_read)
    return WorkerProcess(process, parent_write, ready_read, {})
