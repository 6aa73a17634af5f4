"""One continuation: how the engine's tokens become text, and where stop strings end it. Pure.

Knows nothing of the engine's thread, of HTTP or of JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from omni_proxy.workers.engine.text import Detokenizer, StopStrings
from omni_proxy.workers.engine.tool_calls import CallPiece, ToolText
from omni_proxy.workers.engine.types import EngineRequest, FinishReason, Handoff, Output, TokenLogprob

TOOL_CALLS: Final = "tool_calls"
"""Finish reason of a choice that called functions."""


@dataclass(slots=True)
class Delta:
    """What one output adds to one choice, after stop strings have cut it."""

    index: int
    text: str = ""
    offset: int = 0
    """Characters of this choice before `text`."""
    total_tokens: int = 0
    """Tokens of this choice up to and with these."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    calls: list[CallPiece] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """One continuation: how its tokens become text and how far it has come."""

    index: int
    request: EngineRequest
    detokenizer: Detokenizer
    stops: StopStrings
    include_stop: bool = False
    last_at: float | None = None
    """When its last tokens came, in seconds of the event loop's clock; for the metrics."""
    first_at: float | None = None
    """When its first tokens came."""
    queued_s: float = 0.0
    """How long it waited in the engine to be admitted."""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    shown_chars: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    handoff: Handoff | None = None
    unshown: str = ""
    """Text that waits for the rest of its token."""
    tools: ToolText | None = None
    """Takes function calls out of the text."""
    calls: list[CallPiece] = field(default_factory=list)
    """Whole calls so far."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    echo: str | None = None
    """The prompt's text, to be shown before the answer's."""
    only_prompt: bool = False
    """No token was asked for: the one that the engine must draw is not shown."""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)

    def feed(self, output: Output) -> Delta:
        """Take one output of the engine; a stop string may end the choice before the engine does.

        Text and tokens stay in step: a delta with text brings the text to the end of its tokens, so that somebody else
        can go on from them. What an unfinished character or a possible stop string holds up waits with its token.
        """
        delta = Delta(self.index, error=output.error)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self.only_prompt and output.error is None:
            output = output._replace(token_ids=(), logprobs=None)
        shown = [self._token(output, at, delta) for at in range(len(output.token_ids))]
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.queued_s += output.queued_s
        if output.finish_reason is not None and self.stops.matched is None:
            shown.append(self._end(output))
        delta.text = self.unshown + "".join(shown)
        self.unshown = ""
        if self.stops.matched is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, self.stops.matched
        if self.finish_reason is None and (self.detokenizer.holds or self.stops.holds):
            self.unshown, delta.text = delta.text, ""
        self._take_calls(delta)
        delta.finish_reason, delta.stop_reason = self.finish_reason, self.stop_reason
        delta.offset, delta.total_tokens = self.shown_chars, len(self.token_ids)
        self.shown_chars += len(delta.text)
        self.texts.append(delta.text)
        return delta

    def _take_calls(self, delta: Delta) -> None:
        """Move function calls out of the delta's text; a choice that made some ends with that as its reason."""
        if self.tools is None:
            return
        delta.text, delta.calls = self.tools.feed(delta.text, self.finish_reason is not None)
        for piece in delta.calls:
            if piece.name is not None:
                self.calls.append(piece)
            else:
                self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + piece.arguments)
        if self.calls and self.finish_reason == FinishReason.STOP.value:
            self.finish_reason = TOOL_CALLS

    def _token(self, output: Output, at: int, delta: Delta) -> str:
        if self.stops.matched is not None:
            return ""
        token = output.token_ids[at]
        self.token_ids.append(token)
        delta.token_ids.append(token)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs[at])
            delta.logprobs.append(output.logprobs[at])
        if self._ends_here(output, at) and not self.include_stop:
            return ""
        text = self.detokenizer.push(token)
        early = len(self.token_ids) < self.request.sampling.min_tokens
        return text if early else self.stops.feed(text)

    def _ends_here(self, output: Output, at: int) -> bool:
        """Whether this token (end of text, or one of `stop_token_ids`) ended the choice; its text is not shown."""
        return output.finish_reason is FinishReason.STOP and at == len(output.token_ids) - 1

    def _end(self, output: Output) -> str:
        assert output.finish_reason is not None
        self.finish_reason = output.finish_reason.value
        text = self.stops.feed(self.detokenizer.finish())
        if self.stops.matched is None:
            text += self.stops.flush()
            self.handoff = output.handoff
            if output.finish_reason is FinishReason.STOP:
                self.stop_reason = self._stop_token()
        return text

    def _stop_token(self) -> int | None:
        """The last token if the client named it in `stop_token_ids`; None for the model's own end of text."""
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self.request.sampling.stop_token_ids else None
