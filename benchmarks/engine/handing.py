"""Two worker processes: how long one takes to be ready, and how much of a handoff lies behind the prefill."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import httpx

from benchmarks.engine.models import Subject
from benchmarks.engine.report import Line

LENGTH = 2000
_ASK = {"do_remote_decode": True, "do_remote_prefill": False}


@contextmanager
def worker(subject: Subject, role: str) -> Iterator[tuple[dict[str, Any], float]]:
    """What a worker said when it was ready, and after how many seconds."""
    read, write = os.pipe()
    begun = time.perf_counter()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "omni_proxy",
            "worker",
            f"--role={role}",
            f"--model={subject.folder}",
            f"--ready-fd={write}",
        ],
        pass_fds=(write,),
    )
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            line = pipe.readline()
        yield json.loads(line), time.perf_counter() - begun
    finally:
        process.terminate()
        process.wait(30)


def measure(subject: Subject, turns: int) -> list[Line]:
    with ExitStack() as stack:
        starts, ready = [], []
        for role in ("prefill", "decode", "mixed"):
            said, seconds = stack.enter_context(worker(subject, role))
            ready.append(said)
            starts.append(seconds)
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=120))
        rig = _Rig(client, *ready)
        start = Line("a worker from its start to ready", "s", min(starts), want=4.0)
        return [start, *rig.lines(subject, turns)]


class _Rig:
    def __init__(self, client: httpx.Client, p: dict[str, Any], d: dict[str, Any], mixed: dict[str, Any]) -> None:
        self._client = client
        self._p, self._d, self._mixed = p, d, mixed
        self._threads = ThreadPoolExecutor(1)
        self._chance = random.Random(1)

    def lines(self, subject: Subject, turns: int) -> list[Line]:
        alone, pulled, pushed = [], [], []
        self._pushed(subject), self._pulled(subject), self._alone(subject)
        before = self._push_seconds()
        for _ in range(3 * turns):
            alone.append(self._alone(subject))
            pulled.append(self._pulled(subject))
            pushed.append(self._pushed(subject))
        after = self._push_seconds()
        hidden, exposed = (after[part] - before[part] for part in ("hidden", "exposed"))
        share = hidden / (hidden + exposed)
        times = [1e3 * median(x) for x in (alone, pulled, pushed)]
        what = f"prompts of {LENGTH}: first token"
        return [
            Line(f"push of {LENGTH} tokens' KV: part behind the prefill", "share", share, want=0.7),
            Line(f"{what}, pulled; beside one worker alone", "ms", times[1], times[0], times[0] / times[1]),
            Line(f"{what}, pushed; beside one worker alone", "ms", times[2], times[0], times[0] / times[2]),
        ]

    def _alone(self, subject: Subject) -> float:
        begun = time.perf_counter()
        self._ask(self._mixed, self._prompt(subject), 1)
        return time.perf_counter() - begun

    def _pulled(self, subject: Subject) -> float:
        prompt = self._prompt(subject)
        begun = time.perf_counter()
        params = self._ask(self._p, prompt, 1, kv_transfer_params=_ASK)["kv_transfer_params"]
        self._ask(self._d, prompt, 1, kv_transfer_params=params)
        return time.perf_counter() - begun

    def _pushed(self, subject: Subject) -> float:
        prompt = self._prompt(subject)
        room = {
            "bootstrap_host": self._p["host"],
            "bootstrap_port": self._p["side_channel_port"],
            "bootstrap_room": self._chance.getrandbits(63),
        }
        begun = time.perf_counter()
        leg = self._threads.submit(self._ask, self._p, prompt, 1, kv_transfer_params=_ASK, **room)
        self._ask(self._d, prompt, 1, **room)
        seconds = time.perf_counter() - begun
        leg.result()
        return seconds

    def _prompt(self, subject: Subject) -> list[int]:
        return [self._chance.randrange(2, subject.vocab) for _ in range(LENGTH)]

    def _ask(self, who: dict[str, Any], prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        answer = self._client.post(f"http://{who['host']}:{who['port']}/v1/completions", json=body)
        answer.raise_for_status()
        whole: dict[str, Any] = answer.json()
        return whole

    def _push_seconds(self) -> dict[str, float]:
        text = self._client.get(f"http://{self._p['host']}:{self._p['port']}/metrics").text
        found = re.findall(r'omni_kv_push_seconds_total\{[^}]*part="(\w+)"\} (\S+)', text)
        return {part: float(value) for part, value in found}
