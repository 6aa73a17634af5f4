"""What becomes of what a client may ask, connector by connector, as tables for `docs/endpoints.md`.

`python -m omni_proxy.workers.connectors.matrix FILE` writes them between the marks in a document. They are worked out
from the code that decides: the parsed call, the modes of the connectors, the table of fields.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_proxy.call import CHAT, COMPLETIONS, MESSAGES, ONE_STEP, RESPONSES, TOKENIZE, parse_call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.base import Connector
from omni_proxy.workers.connectors.fields import ONE_TOKEN, SAME_BODY, LegFields
from omni_proxy.workers.connectors.registry import CONNECTORS

SHARED: Final = "P and D"
ONE_WORKER: Final = "one worker"
DIVIDED: Final = "divided"
REFUSED: Final = "400"

_TOOLS: Final = {"tools": [{"type": "function", "function": {"name": "f"}}]}
ASKED: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "chat, completions": (CHAT, {}),
    "`/v1/responses`": (RESPONSES, {}),
    "`background`, `previous_response_id` (responses)": (RESPONSES, {"background": True}),
    "`/v1/messages`": (MESSAGES, {}),
    "`n` above 1": (CHAT, {"n": 2}),
    "several prompts": (COMPLETIONS, {"prompt": ["a", "b"]}),
    "`best_of` above `n`": (COMPLETIONS, {"n": 1, "best_of": 2}),
    "`echo` (completions)": (COMPLETIONS, {"echo": True}),
    "`logprob_start_len` of 0 or more": (CHAT, {"return_logprob": True, "logprob_start_len": 0}),
    "`prompt_logprobs`": (CHAT, {"prompt_logprobs": 1}),
    "`use_beam_search`": (CHAT, {"use_beam_search": True}),
    "`logprobs`, `top_logprobs`": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "`response_format`, `structured_outputs`, `guided_*`": (CHAT, {"response_format": {"type": "json_object"}}),
    "tools, also `tool_choice: required`": (CHAT, {**_TOOLS, "tool_choice": "required"}),
    "names of LoRA adapters as `model`": (CHAT, {"model": "adapter"}),
    "images and sound in messages": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "embeddings, rerank, score, classify, audio": ("/v1/embeddings", {"input": "x"}),
    "`/tokenize`, `/detokenize`": ("/tokenize", {"prompt": "x"}),
}
"""What is asked, by a request that stands for all of its kind."""

_BODIES: Final[Mapping[str, dict[str, Any]]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
}


def treatment(connector: Connector, path: str, extra: dict[str, Any]) -> str:
    """How workers of a connector serve a request where no others serve its model."""
    call = parse_call(path, msgspec.json.encode({"model": "m", **_BODIES.get(path, {}), **extra}))
    alone = Mode.AGGREGATED in connector.modes
    if not call.whole and not (path == RESPONSES and connector.kv_by_id):
        return ONE_WORKER if connector.modes == (Mode.AGGREGATED,) else SHARED
    if not alone and path in TOKENIZE:
        return "the gateway"
    if alone:
        return ONE_WORKER
    return DIVIDED if call.parts > 1 else REFUSED


def features() -> str:
    """What is asked, by connector."""
    names = list(CONNECTORS)
    rows = [[what, *(treatment(CONNECTORS[name], *asked) for name in names)] for what, asked in ASKED.items()]
    return _table(["", *(f"`{name}`" for name in names)], rows)


def fields() -> str:
    """What P gets of each field, by endpoint and by order of the legs."""
    columns = [(ONE_TOKEN, path) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)] + [(SAME_BODY, CHAT)]
    rules = [table[path] for table, path in columns]
    named = sorted({name for rule in rules for name in (*rule.drop, *rule.cap, *rule.force)})
    heads = ["field", *(f"`{path}`" for _, path in columns[:-1]), "beside D"]
    return _table(heads, [[f"`{name}`", *(_rule(rule, name) for rule in rules)] for name in named])


def _rule(rule: LegFields, name: str) -> str:
    if name in rule.force:
        return f"`{rule.force[name].decode()}`"
    if name in rule.drop:
        return "dropped"
    return f"`{rule.cap[name].decode()}` where sent" if name in rule.cap else "kept"


def endpoints() -> str:
    """The endpoints that one worker answers."""
    return ", ".join(f"`{path}`" for path in sorted(ONE_STEP)) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def written(document: str) -> str:
    """A document with its tables as they are now."""
    for name, table in (("features", features()), ("fields", fields()), ("endpoints", endpoints())):
        before, mark, rest = document.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        if mark and end:
            document = before + mark + table + end + after
    return document


def main(path: Path) -> None:
    """Write a document's tables anew."""
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
