"""One call for several answers or prompts as several calls for one each, and their answers as one. No sockets.

Where P and D are apart and nobody does both, KV of one prompt serves one answer: a bootstrap room or a set of blocks
that several samples share hangs or gives wrong text. Choices are numbered as one worker would: sample by sample, prompt
by prompt. Prompt tokens count once for each prompt, as they do there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from omni_proxy.api.sse import payloads
from omni_proxy.call import Call, Fields, encode_fields
from omni_proxy.errors import ErrorCode, Rejected

MAX_PARTS: Final = 128
_RAW_LIST: Final = msgspec.json.Decoder(list[Raw])
_FIELDS: Final = msgspec.json.Decoder(Fields)
_CHOICES: Final = msgspec.json.Decoder(list[Fields])
_COUNTS: Final = msgspec.json.Decoder(dict[str, int | float | dict[str, int | float | None] | str | bool | None])
_NULL: Final = Raw(b"null")
_OF_ANSWERS: Final = frozenset({"completion_tokens", "completion_tokens_details"})
_DONE: Final = b"[DONE]"
Counts = dict[str, int | float | dict[str, int | float | None] | str | bool | None]


def too_many(call: Call) -> Rejected:
    """Why a call is not divided."""
    what = f"'{call.whole_because}' asks for {call.parts} answers in one request; at most {MAX_PARTS} can be made."
    return Rejected(ErrorCode.INVALID_VALUE, what, call.whole_because)


def divide(call: Call) -> list[Call]:
    """Calls for one answer to one prompt each, sample by sample of each prompt."""
    prompts: list[Raw | None] = [None]
    if call.prompts > 1:
        prompts = list(_RAW_LIST.decode(call.fields["prompt"]))
    seed = call.fields.get("seed")
    return [
        _part(call, prompt, None if seed is None else _moved(seed, sample))
        for prompt in prompts
        for sample in range(call.samples)
    ]


def _part(call: Call, prompt: Raw | None, seed: Raw | None) -> Call:
    fields = {name: raw for name, raw in call.fields.items() if name not in ("n", "best_of")}
    if prompt is not None:
        fields["prompt"] = prompt
    if seed is not None:
        fields["seed"] = seed
    one = call.copy()
    one.put(fields, encode_fields(fields))
    one.prompts = one.samples = one.parts = 1
    one.whole, one.whole_because = False, None
    return one


def _moved(seed: Raw, sample: int) -> Raw:
    """Another seed for each sample, or all would say the same."""
    try:
        return Raw(b"%d" % (msgspec.json.decode(seed, type=int) + sample))
    except msgspec.MsgspecError:  # for the worker to refuse
        return seed


def together(usages: Sequence[bytes], samples: int) -> bytes:
    """Usage of a whole answer from those of its parts; `null` where none told it. Raises msgspec.MsgspecError."""
    told: list[tuple[int, Counts]] = [
        (at, _COUNTS.decode(raw)) for at, raw in enumerate(usages) if raw not in (b"", b"null")
    ]
    if not told:
        return b"null"
    total: Counts = dict(told[0][1])
    for at, counts in told[1:]:
        for name, value in counts.items():
            if name in _OF_ANSWERS or at % samples == 0:
                total[name] = _sum(total.get(name), value)
    prompt, made = total.get("prompt_tokens"), total.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(made, int) and "total_tokens" in total:
        total["total_tokens"] = prompt + made
    return msgspec.json.encode(total)


_Value = int | float | dict[str, int | float | None] | str | bool | None


def _sum(one: _Value, other: _Value) -> _Value:
    if isinstance(one, dict) and isinstance(other, dict):
        names = {**one, **other}
        return {name: (one.get(name) or 0) + (other.get(name) or 0) for name in names}
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return other if one is None else one


def merge(bodies: Sequence[bytes], samples: int) -> bytes:
    """Whole answers as one. Raises msgspec.MsgspecError."""
    answers = [_FIELDS.decode(body) for body in bodies]
    choices: list[bytes] = []
    for at, answer in enumerate(answers):
        choices += [_numbered(choice, at) for choice in _CHOICES.decode(answer.get("choices", b"[]"))]
    merged: dict[str, bytes | Raw] = dict(answers[0])
    merged["choices"] = b"[%b]" % b",".join(choices)
    usage = together([bytes(answer.get("usage", _NULL)) for answer in answers], samples)
    if usage != b"null":
        merged["usage"] = usage
    return encode_fields(merged)


def _numbered(choice: Fields, index: int) -> bytes:
    return encode_fields({**choice, "index": b"%d" % index})


class StreamMerge:
    """The streams of the parts as one: whole events in, whole events out."""

    def __init__(self, parts: int, samples: int) -> None:
        self._samples = samples
        self._usages = [b""] * parts
        self._id: Raw | None = None
        self._last: Fields | None = None
        """The chunk that ends a stream with its usage."""

    def feed(self, part: int, data: bytes) -> bytes:
        """Events of one part, as they go out. Raises msgspec.MsgspecError."""
        found = payloads(data)
        if not found:
            return data  # comments keep connections alive
        return b"".join([self._event(part, payload) for payload in found if payload != _DONE])

    def end(self) -> bytes:
        """What ends the stream when all parts have ended. Raises msgspec.MsgspecError."""
        done = b"data: [DONE]\n\n"
        if self._last is None:
            return done
        last = encode_fields({**self._last, "usage": together(self._usages, self._samples)})
        return b"data: %b\n\n%b" % (last, done)

    def _event(self, part: int, payload: bytes) -> bytes:
        fields = _FIELDS.decode(payload)
        if self._id is None:
            self._id = fields.get("id")
        if self._id is not None and "id" in fields:
            fields["id"] = self._id
        usage = bytes(fields.get("usage", _NULL))
        choices = _CHOICES.decode(fields.get("choices", b"[]"))
        if usage != b"null":
            self._usages[part] = usage
            if not choices:
                self._last = fields
                return b""
        out: dict[str, bytes | Raw] = dict(fields)
        if choices:
            out["choices"] = b"[%b]" % b",".join([_numbered(choice, part) for choice in choices])
        if usage != b"null":
            out["usage"] = together(self._usages, self._samples)
        return b"data: %b\n\n" % encode_fields(out)
