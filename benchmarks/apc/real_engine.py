"""`python -m benchmarks.apc.real_engine`: does the gateway predict what a real engine reports?

Runs a gateway in front of a worker that already runs (vLLM with KV events and --enable-prompt-tokens-details), plays a
few conversations whose turns grow, and prints predicted and reported cached tokens of each request.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

WORDS = (
    *("fox", "hare", "forest", "river", "stone", "moon", "bread", "lantern", "winter", "story"),
    *("old", "little", "quickly", "sang", "found", "home", "under", "over"),
)


def main() -> int:
    options = _options()
    worker = {"name": "real", "url": options.url, "role": "mixed", "connector": "aggregated"}
    config = {
        "listen": {"port": options.port},
        "model": {"path": str(options.model)},
        "workers": [worker],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "omni_proxy", "serve", "-c", file.name, "--log-level", "warning"]
        gateway = subprocess.Popen(command)
        try:
            return asyncio.run(_play(options))
        finally:
            gateway.terminate()
            gateway.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apc.real_engine", description=__doc__)
    parser.add_argument("--url", required=True, help="of the worker")
    parser.add_argument("--model", type=Path, required=True, help="its model folder")
    parser.add_argument("--name", required=True, help="its model's name")
    parser.add_argument("--port", type=int, default=18_437, help="of the gateway (default 18437)")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


async def _play(options: argparse.Namespace) -> int:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{options.port}", timeout=120, trust_env=False) as client:
        await _ready(client)
        await asyncio.sleep(5)  # the subscription and its first replay
        random = Random(1)
        chats: list[list[dict[str, Any]]] = [[] for _ in range(options.conversations)]
        system = _text(Random(0), 80)
        for _ in range(options.turns):
            for chat in chats:
                await _turn(client, options.name, system, chat, random)
                await asyncio.sleep(0.3)  # its events arrive
        listed = (await client.get("/omni/requests")).json()["ended"]
    off = 0
    for record in reversed(listed):
        predicted, reported = record["predicted_tokens"], record["cached_tokens"]
        off += predicted != reported
        print(f"prompt {record['prompt_tokens']:5}  predicted {predicted!s:>5}  reported {reported!s:>5}")
    print(f"{len(listed) - off} of {len(listed)} predictions equal the reports")
    return int(off > 0)


async def _turn(client: httpx.AsyncClient, model: str, system: str, chat: list[dict[str, Any]], random: Random) -> None:
    chat.append({"role": "user", "content": _text(random, 60)})
    messages = [{"role": "system", "content": system}, *chat]
    body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    chat.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})


async def _ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the gateway does not become ready")


def _text(random: Random, words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(words)) + "."


if __name__ == "__main__":
    sys.exit(main())
