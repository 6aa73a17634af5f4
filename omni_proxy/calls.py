"""What becomes of a client's body: `Call`. Pure."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Raw

from omni_proxy.call_shapes import Fields, MediaItem

_FieldsOf = Callable[[bytes, bytes, type[Raw]], Fields]
_Has = Callable[[bytes, bytes, str], bool]
try:
    from omni_proxy._body_scan import fields as fields_of
    from omni_proxy._body_scan import has

    _fields_of: _FieldsOf | None = fields_of
    _has: _Has | None = has
except ImportError:  # not built: then nobody knows places
    _fields_of = _has = None


def fields_at(body: bytes, places: bytes) -> Fields:
    """The fields of a body that was scanned."""
    assert _fields_of is not None
    return _fields_of(body, places, Raw)


class Call:
    """One client call as the gateway understands it. `body` and `fields` are what the client sent.

    Of most calls nobody looks at the fields by their names: they are made of their places in the body when somebody
    does.
    """

    __slots__ = (
        "_fields",
        "asked",
        "body",
        "content_type",
        "form",
        "has_parts",
        "max_tokens",
        "media",
        "model",
        "parts",
        "path",
        "places",
        "priority",
        "prompt_bytes",
        "prompts",
        "samples",
        "says_thinking",
        "stream",
        "tampered",
        "thinking",
        "token_ids",
        "ttft_target_s",
        "wants_usage",
        "whole",
        "whole_because",
    )

    ttft_target_s: float | None
    """How soon the client wants the first token; a field of ours, which workers ignore."""
    wants_usage: bool
    """The client asked for usage in its stream."""
    asked: str
    """What the client called the model, where that was looked up."""
    says_thinking: bool
    """A field says whether the model should think, or how much."""
    thinking: bool
    """The model should think before it answers: such answers are long."""
    whole: bool
    """Must be computed by one worker: several answers, or an answer about the prompt itself."""
    whole_because: str | None
    """The field that asks for that."""
    parts: int
    """So many answers of one prompt each would serve it as well; 1: it cannot be divided."""
    tampered: bool
    """The client sent internal fields; they must not reach a worker."""
    form: bool
    """The body is a multipart form and passes as it is, under the client's own content type."""
    content_type: bytes
    """Of a form."""
    prompt_bytes: int | None
    """How much of the body is text to be computed; None: all of it."""
    has_parts: bool
    """A message's content is a list of parts, not one text."""
    media: tuple[MediaItem, ...]
    """Images and sound in its messages."""
    token_ids: bytes
    """The prompt's token ids as JSON, where it was text and workers are to get them."""
    places: bytes
    """Where the fields are in the body, for the scanner; empty: it does not know, or the fields are others now."""

    def __init__(
        self,
        path: str,
        body: bytes,
        fields: Fields | None,
        model: str,
        stream: bool = False,
        max_tokens: int | None = None,
        priority: int = 0,
        ttft_target_s: float | None = None,
        wants_usage: bool = False,
        prompts: int = 1,
        samples: int = 1,
        whole: bool = False,
        whole_because: str | None = None,
        parts: int = 1,
        tampered: bool = False,
        form: bool = False,
        prompt_bytes: int | None = None,
        has_parts: bool = False,
        says_thinking: bool = False,
        places: bytes = b"",
    ) -> None:
        self.path = path
        self.body = body
        self._fields = fields
        self.model = model
        self.stream = stream
        self.max_tokens = max_tokens
        self.priority = priority
        self.ttft_target_s = ttft_target_s
        self.wants_usage = wants_usage
        self.prompts = prompts
        self.samples = samples
        self.asked = ""
        self.says_thinking = says_thinking
        self.thinking = False
        self.whole = whole
        self.whole_because = whole_because
        self.parts = parts
        self.tampered = tampered
        self.form = form
        self.content_type = b""
        self.prompt_bytes = prompt_bytes
        self.has_parts = has_parts
        self.media = ()
        self.token_ids = b""
        self.places = places

    @property
    def fields(self) -> Fields:
        """The fields of the body by their names, each as the client wrote it."""
        fields = self._fields
        if fields is None:
            fields = self._fields = fields_at(self.body, self.places)
        return fields

    def has(self, name: str) -> bool:
        """Is there a field of this name in the body?"""
        fields = self._fields
        if fields is None:
            assert _has is not None
            return _has(self.body, self.places, name)
        return name in fields

    def put(self, fields: Fields, body: bytes | None = None) -> None:
        """Take other fields from now on; `body`: those as a body, where somebody will ask for it."""
        self._fields, self.places = fields, b""
        if body is not None:
            self.body = body

    def copy(self) -> Call:
        """The same once more, to be changed."""
        copy = Call(self.path, self.body, self._fields, self.model)
        copy.stream, copy.max_tokens, copy.priority = self.stream, self.max_tokens, self.priority
        copy.ttft_target_s, copy.wants_usage = self.ttft_target_s, self.wants_usage
        copy.prompts, copy.samples, copy.parts = self.prompts, self.samples, self.parts
        copy.asked, copy.says_thinking, copy.thinking = self.asked, self.says_thinking, self.thinking
        copy.whole, copy.whole_because, copy.tampered = self.whole, self.whole_because, self.tampered
        copy.form, copy.content_type = self.form, self.content_type
        copy.prompt_bytes, copy.has_parts, copy.media = self.prompt_bytes, self.has_parts, self.media
        copy.token_ids, copy.places = self.token_ids, self.places
        return copy
