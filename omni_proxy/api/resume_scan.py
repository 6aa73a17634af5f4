"""Scans of streams that can be continued: one notes what passes, the other makes more of it from what comes next.

Both look at every event, which streams without `resume` are spared.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from omni_proxy.api.resumption import Resumption
from omni_proxy.api.shapes import DETAILS, TEXT, TOKEN_EVENT, TokenChoice, TokenEvent
from omni_proxy.api.sse import BOUNDARY, DONE, NOTHING, StreamScan, payloads, status_of
from omni_proxy.call import Call, encode_fields
from omni_proxy.messages import Failure, FailureKind, Usage

_TOKEN_IDS: Final = re.compile(rb'(,\s*)?"(?:prompt_)?token_ids"\s*:\s*(?:\[[^\]]*\]|null)(?(1)|\s*,?)')
_THOUGHTS: Final = ("reasoning", "reasoning_content")
SERVER_FAULT: Final = 500


def scan_of(call: Call, resumption: Resumption | None, strip_usage: bool, cached_tokens: int | None) -> StreamScan:
    """The scan for a worker's stream of chunks."""
    own_stop = b"recomputed" in bytes(call.fields.get("stop", b""))
    if resumption is None:
        return StreamScan(strip_usage, cached_tokens, own_stop)
    if resumption.resumed:
        return ContinuedScan(resumption, False, resumption.cached_tokens, own_stop)
    return RecordingScan(resumption, strip_usage, cached_tokens, own_stop)


class _EventScan(StreamScan):
    """A scan that takes each event apart."""

    __slots__ = ("_resumption",)

    def __init__(
        self, resumption: Resumption, strip_usage: bool, cached_tokens: int | None, own_stop: bool = False
    ) -> None:
        super().__init__(strip_usage, cached_tokens, own_stop)
        self._resumption = resumption

    @property
    def only_tokens(self) -> bool:
        """Every event is looked at."""
        return False

    def feed(self, data: bytes) -> bytes:
        return self._each(super().feed(data))

    def flush(self) -> bytes:
        return self._each(super().flush())

    def _each(self, data: bytes) -> bytes:
        if not data:
            return data
        if self.mid_event:
            self._resumption.hinder("an event is too long")
            return data
        parts = BOUNDARY.split(data)
        known = self.broke  # by what stands behind these events
        out: list[bytes] = []
        for number in range(0, len(parts), 2):
            event = parts[number]
            if not event or self.broke is not known:
                continue
            boundary = parts[number + 1] if number + 1 < len(parts) else b""
            shown = self._event(event)
            if shown:
                out.append(shown + boundary)
        return b"".join(out)

    def _event(self, event: bytes) -> bytes:
        """What the client gets of one event; nothing for one that it is not to see."""
        found = payloads(event)
        if len(found) != 1 or found[0] == DONE:
            if found and found[0] != DONE:
                self._resumption.hinder("an event has several data lines")
            return event
        try:
            read = TOKEN_EVENT.decode(found[0])
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._resumption.hinder("an event is not a chunk")
            return event
        error = bytes(read.error)
        if error != b"null":
            return self._error(event, status_of(error))
        return self._chunk(event, read)

    def _error(self, event: bytes, status: int) -> bytes:
        """A worker that speaks of a fault of its own is as good as lost; what is the client's fault it has to see."""
        if status < SERVER_FAULT:
            self._resumption.hinder("the worker refused it")
            return event
        self.failed = 0
        self.broke = Failure(FailureKind.STATUS, "the worker reported an error in its stream", status, answered=True)
        return b""

    def _chunk(self, event: bytes, read: TokenEvent) -> bytes:
        raise AssertionError("each scan has its own")


class RecordingScan(_EventScan):
    """Notes tokens and text of a stream as its first worker makes it, and takes out what only we have asked for."""

    def _chunk(self, event: bytes, read: TokenEvent) -> bytes:
        resumption = self._resumption
        if resumption.head is None:
            resumption.head = (bytes(read.id), bytes(read.object), bytes(read.created))
        if not read.choices:
            return event
        choice = read.choices[0]
        if resumption.prompt is None:
            resumption.prompt = read.prompt_token_ids or choice.prompt_token_ids
        if len(read.choices) != 1 or choice.index != 0:
            resumption.hinder("it has several choices")
        text, quiet = self._note(choice)
        if choice.finish_reason is not None:
            resumption.finished = True
        if resumption.wants_ids:
            return event
        only_ids = quiet and not text and choice.finish_reason is None and bool(choice.token_ids)
        return b"" if only_ids and bytes(read.usage) == b"null" else _TOKEN_IDS.sub(b"", event)

    def _note(self, choice: TokenChoice) -> tuple[str, bool]:
        """Note tokens and text; returns the text, and whether nothing else is said."""
        resumption, text, quiet = self._resumption, choice.text or "", True
        for name, raw in (choice.delta or {}).items():
            said = bytes(raw)
            if said in NOTHING:
                continue
            if name == "content":
                text = TEXT.decode(said)
                continue
            quiet = False
            if name in _THOUGHTS:
                resumption.reasoned = True
            elif name != "role":
                resumption.hinder(f"it has {name}")
        ids = choice.token_ids or []
        if text and not ids:
            resumption.hinder("the worker does not tell its tokens")
        resumption.add(ids, text)
        resumption.ids_shown = len(resumption.tokens)
        return text, quiet


class ContinuedScan(_EventScan):
    """Turns what a next worker sends (chunks of a completion) into more of the stream that the client reads."""

    def feed(self, data: bytes) -> bytes:
        return self._summed(super().feed(data))

    def flush(self) -> bytes:
        return self._summed(super().flush())

    def _summed(self, data: bytes) -> bytes:
        """The counts of the whole answer, whoever made which part of it."""
        resumption = self._resumption
        prompt = len(resumption.prompt or ())
        self.usage = Usage(prompt, len(resumption.tokens), resumption.cached_tokens)
        return data

    def _chunk(self, event: bytes, read: TokenEvent) -> bytes:
        if not read.choices:
            return self._usage_chunk(read) if self._resumption.wants_usage else b""
        choice, resumption = read.choices[0], self._resumption
        ids = choice.token_ids or []
        if choice.text and not ids:
            resumption.hinder("the worker does not tell its tokens")
        before = len(resumption.tokens)
        text = resumption.add(ids, choice.text or "")
        if text is None or (choice.finish_reason is not None and resumption.skip):
            resumption.hinder("the continuation is another one")
            detail = "the continuation differs from what has been shown"
            self.broke = Failure(FailureKind.GARBAGE, detail, answered=True)
            return b""
        fresh = ids[max(0, resumption.ids_shown - before) :]
        resumption.ids_shown = max(resumption.ids_shown, len(resumption.tokens))
        if choice.finish_reason is not None:
            resumption.finished = True
        elif not text and not (fresh and resumption.wants_ids):
            return b""
        return self._rewritten(choice, text, fresh, bytes(read.model))

    def _rewritten(self, choice: TokenChoice, text: str, fresh: list[int], model: bytes) -> bytes:
        content = msgspec.json.encode(text)
        piece = b'"delta":{"content":%b}' % content if self._resumption.chat else b'"text":%b' % content
        reason = b"null" if choice.finish_reason is None else msgspec.json.encode(choice.finish_reason)
        stop = b"" if choice.finish_reason is None else b',"stop_reason":' + bytes(choice.stop_reason)
        ids = b',"token_ids":' + msgspec.json.encode(fresh) if self._resumption.wants_ids else b""
        return b'%b"choices":[{"index":0,%b,"logprobs":null,"finish_reason":%b%b%b}]}' % (
            self._opening(model),
            piece,
            reason,
            stop,
            ids,
        )

    def _usage_chunk(self, read: TokenEvent) -> bytes:
        resumption = self._resumption
        fields = DETAILS.decode(read.usage)
        prompt, completion = len(resumption.prompt or ()), len(resumption.tokens)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        usage = encode_fields({**fields, **{name: b"%d" % count for name, count in counts.items()}})
        return b'%b"choices":[],"usage":%b}' % (self._opening(bytes(read.model)), usage)

    def _opening(self, model: bytes) -> bytes:
        """`model`: as this worker calls it, which the client may know by another name."""
        head = self._resumption.head
        assert head is not None
        return b'data: {"id":%b,"object":%b,"created":%b,"model":%b,' % (*head, model)
