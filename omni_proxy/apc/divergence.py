"""How far what we predict is from what workers report. Pure.

A wrong block size, chat template or salt makes every prediction wrong at once: it must show within a minute of traffic,
and one odd request must not.
"""

from __future__ import annotations

from typing import Final

_WEIGHT: Final = 0.1
"""Of the newest report in the running mean."""
ALARM: Final = 0.1
"""Share of prompt tokens by which predictions are off, from which on they are not to be relied on."""
LEAST_REPORTS: Final = 10
WARN_EVERY_S: Final = 60.0


class Divergence:
    """One worker's predictions against its reports."""

    def __init__(self) -> None:
        self.predicted_tokens = 0
        self.reported_tokens = 0
        self.equal = 0
        self.over = 0
        """Reports of less than was predicted."""
        self.under = 0
        self.share = 0.0
        """Running mean of the difference, as a share of the prompt."""
        self._warned_at = float("-inf")

    @property
    def reports(self) -> int:
        return self.equal + self.over + self.under

    def compare(self, predicted: int, reported: int, prompt_tokens: int, block_tokens: int) -> None:
        """Take a report in. Less than a block apart is equal: engines differ in how they count the last one."""
        self.predicted_tokens += predicted
        self.reported_tokens += reported
        difference = predicted - reported
        if abs(difference) <= block_tokens:
            self.equal += 1
            difference = 0
        elif difference > 0:
            self.over += 1
        else:
            self.under += 1
        weight = max(_WEIGHT, 1 / self.reports)
        self.share += weight * (abs(difference) / max(prompt_tokens, 1) - self.share)

    def warning(self, now: float) -> str | None:
        """What to tell people, if there is something and it was not said just now."""
        if self.share < ALARM or self.reports < LEAST_REPORTS or now - self._warned_at < WARN_EVERY_S:
            return None
        self._warned_at = now
        if self.reported_tokens == 0:
            return (
                "it never reports cached tokens though some were predicted "
                "(vLLM tells them with --enable-prompt-tokens-details only)"
            )
        direction = "more" if self.over >= self.under else "less"
        return (
            f"{direction} cached tokens are predicted than it reports, by {self.share:.0%} of a prompt: "
            "compare its block size, chat template and tokenizer with ours"
        )
