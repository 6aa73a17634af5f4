"""Streams an answer with the official client, and asks the gateway where the time went.

python examples/openai_streaming.py [URL] [MODEL]
"""

from __future__ import annotations

import sys

import httpx
import openai


def main(url: str = "http://127.0.0.1:8000", model: str | None = None) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = model or client.models.list().data[0].id
    question = "Tell me a story about a fox."
    with client.chat.completions.with_streaming_response.create(
        model=model, stream=True, max_tokens=40, messages=[{"role": "user", "content": question}]
    ) as response:
        for chunk in response.parse():
            print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
        request_id = response.headers["x-request-id"]
    print()
    for stage in httpx.get(f"{url}/omni/requests/{request_id}").raise_for_status().json()["stages"]:
        print(stage)


if __name__ == "__main__":
    main(*sys.argv[1:])
