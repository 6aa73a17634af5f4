"""One leg of a request inside a simulated engine. Pure; changed by its engine only."""

from __future__ import annotations

from enum import Enum, auto


class Where(Enum):
    """Where in its engine a job is."""

    NEW = auto()
    """On its way to its engine."""
    WAITING = auto()
    PREFILLING = auto()
    PULLING = auto()
    READY = auto()
    """Its context is here; it joins the next pass."""
    RUNNING = auto()
    HELD = auto()
    """A P leg whose KV waits for a pull."""
    GONE = auto()


class Job:
    """A prompt to compute, an answer to make, or both."""

    __slots__ = (
        "aborted",
        "cached_tokens",
        "computed",
        "generated",
        "joined_pass",
        "joined_serial",
        "keep_kv",
        "keys",
        "output_tokens",
        "pinned",
        "private",
        "prompt_tokens",
        "pull",
        "rid",
        "serial",
        "tag",
        "target",
        "told_first",
        "where",
    )

    def __init__(
        self,
        rid: str,
        serial: int,
        prompt_tokens: int,
        output_tokens: int,
        keys: tuple[int, ...] = (),
        keep_kv: bool = False,
        pull: bool = False,
        tag: object = None,
    ) -> None:
        self.rid = rid
        self.serial = serial
        """Rises with every job of a run: the larger, the younger."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.keys = keys
        """Keys of the blocks that the prompt fills."""
        self.keep_kv = keep_kv
        """A P leg: computed here, answered elsewhere."""
        self.pull = pull
        """A D leg whose KV is still elsewhere."""
        self.tag = tag
        """Whatever its owner wants to find again."""
        self.where = Where.NEW
        self.target = prompt_tokens
        """Tokens of context to be here before the next token can be made."""
        self.computed = 0
        self.cached_tokens = 0
        """Prompt tokens found in the cache at the first admission."""
        self.generated = 0
        self.pinned = 0
        """So many of `keys` are pinned, from the beginning on."""
        self.private = 0
        self.told_first = False
        self.aborted = False
        self.joined_pass = 0
        self.joined_serial = 0

    def admitted(self, pinned: int, cached_tokens: int, private: int) -> None:
        """Memory was taken for it."""
        self.pinned = pinned
        self.computed = cached_tokens
        self.private = private
        if not self.told_first and self.generated == 0:
            self.cached_tokens = cached_tokens

    def start_again(self) -> None:
        """Preempted: its prompt and what it has made so far are computed anew."""
        self.where = Where.WAITING
        self.target = self.prompt_tokens + self.generated
        self.computed = 0
