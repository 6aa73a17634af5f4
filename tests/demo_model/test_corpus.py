"""The generator is the ground truth of the demo model, so it must itself be right."""

import re
from itertools import islice
from random import Random

import pytest

from scripts.demo_model import corpus, stories, words
from scripts.demo_model.corpus import Conversation, Exchange

COUNT = 400


@pytest.fixture(scope="module")
def sample() -> list[Conversation]:
    return list(islice(corpus.conversations("test"), COUNT))


def exchanges(sample: list[Conversation], *domains: str) -> list[Exchange]:
    return [e for c in sample for e in c.exchanges if e.domain in domains]


def test_same_seed_same_text(sample: list[Conversation]) -> None:
    assert list(islice(corpus.conversations("test"), COUNT)) == sample


def test_other_seed_other_text(sample: list[Conversation]) -> None:
    assert list(islice(corpus.conversations("other"), COUNT)) != sample


def test_short_text_is_shorter(sample: list[Conversation]) -> None:
    def length(some: list[Conversation]) -> int:
        return sum(len(m["content"]) for c in some for m in c.messages())

    assert length(list(islice(corpus.conversations("test", short=True), COUNT))) < 0.7 * length(sample)


def test_roles_alternate(sample: list[Conversation]) -> None:
    for conversation in sample:
        roles = [m["role"] for m in conversation.messages()]
        roles = roles[1:] if conversation.system is not None else roles
        assert roles == ["user", "assistant"] * len(conversation.exchanges)


def test_every_domain_occurs(sample: list[Conversation]) -> None:
    assert {e.domain for c in sample for e in c.exchanges} == {
        "beyond", "chat", "echo", "facts", "knowledge", "list", "memory", "purpose", "reading", "shop", "story", "sum",
    }  # fmt: skip


def test_answers_hold_what_is_expected_of_them(sample: list[Conversation]) -> None:
    for exchange in (e for c in sample for e in c.exchanges):
        assert exchange.user.strip()
        assert exchange.assistant.strip()
        for word in exchange.expect:
            assert word.lower() in exchange.assistant.lower(), exchange


def test_sums_are_right(sample: list[Conversation]) -> None:
    checked = 0
    for exchange in exchanges(sample, "sum"):
        found = re.match(r"(\d+) ([+-]) (\d+) = (\d+)\.", exchange.assistant)
        assert found, exchange
        x, sign, y, result = int(found[1]), found[2], int(found[3]), int(found[4])
        assert result == (x + y if sign == "+" else x - y) >= 0
        checked += 1
    assert checked > 20


def test_answers_about_a_context_stand_in_it(sample: list[Conversation]) -> None:
    checked = 0
    for conversation in sample:
        said = [m["content"] for m in conversation.messages()]
        first = 1 if conversation.system is not None else 0
        for i, exchange in enumerate(conversation.exchanges):
            if exchange.domain in {"reading", "facts", "list", "echo", "memory", "shop"}:
                before = " ".join(said[: first + 2 * i + 1]).lower()
                assert all(word.lower() in before for word in exchange.expect), exchange
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("plot", stories.PLOTS)
def test_story_questions_are_answered_by_the_story(plot: stories.Plot) -> None:
    for seed in range(20):
        rng = Random(seed)
        cast = stories.cast(rng)
        sentences, questions = plot(rng, cast)
        text = " ".join((stories.opening(rng, cast), stories.meeting(rng, cast), *sentences))
        for question in questions + stories.about_anyone(cast):
            assert all(word in text for word in question.expect), (question, text)


def test_story_keeps_to_what_was_asked() -> None:
    story = stories.tell(Random(1), kind="fox", name="Tom")
    assert "fox" in story.text
    assert "Tom" in story.text
    assert story.cast.hero.they == "he"


def test_two_characters_differ() -> None:
    casts = [stories.cast(Random(seed)) for seed in range(200)]
    assert all(c.hero.name != c.friend.name and c.hero.kind != c.friend.kind for c in casts)


def test_a_use_belongs_to_one_thing() -> None:
    uses = [use for use, _ in words.USES.values()]
    assert len(uses) == len(set(uses))


@pytest.mark.parametrize(("noun", "phrase"), [("owl", "an owl"), ("fox", "a fox"), ("scissors", "scissors")])
def test_articles(noun: str, phrase: str) -> None:
    assert stories.a(noun) == phrase
