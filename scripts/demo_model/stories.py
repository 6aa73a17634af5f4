"""Stories with a plot, and what a reader of each must know.

A story is told about a `Cast`, so that a request ("a story about a fox named Tom") can fix part of it, and it comes
with `Question`s whose answers stand in its text. Nothing here knows about chat messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from scripts.demo_model import words


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its full answer, and the words that any right answer contains."""

    text: str
    answer: str
    expect: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Character:
    """Somebody in a story; `they` is the pronoun that goes with the name."""

    name: str
    kind: str
    they: str

    @property
    def them(self) -> str:
        return "him" if self.they == "he" else "her"

    @property
    def their(self) -> str:
        return "his" if self.they == "he" else "her"


@dataclass(frozen=True, slots=True)
class Cast:
    """Who and what a story is about."""

    hero: Character
    friend: Character
    trait: str
    home: str
    spot: str
    colour: str
    treasure: str

    @property
    def item(self) -> str:
        return f"{self.colour} {self.treasure}"


@dataclass(frozen=True, slots=True)
class Story:
    sentences: tuple[str, ...]
    questions: tuple[Question, ...]
    cast: Cast

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def a(noun: str) -> str:
    """The noun with its article."""
    if noun in words.NO_ARTICLE:
        return noun
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def cap(text: str) -> str:
    return text[0].upper() + text[1:]


def invented_name(rng: Random) -> str:
    """A name in no list: what is bound must not depend on having seen the name before."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def character(rng: Random, kind: str | None = None, name: str | None = None) -> Character:
    they = rng.choice(("he", "she"))
    if name is not None:
        they = "he" if name in words.NAMES_HE else "she" if name in words.NAMES_SHE else they
    elif rng.random() < 0.12:
        name = invented_name(rng)
    else:
        name = rng.choice(words.NAMES_HE if they == "he" else words.NAMES_SHE)
    return Character(name, kind or rng.choice(words.KINDS), they)


def cast(rng: Random, kind: str | None = None, name: str | None = None) -> Cast:
    """Two different characters and their belongings; what is not asked for is drawn."""
    hero, friend = character(rng, kind, name), character(rng)
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = character(rng)
    return Cast(
        hero=hero,
        friend=friend,
        trait=rng.choice(words.TRAITS),
        home=rng.choice(words.PLACES),
        spot=rng.choice(words.SPOTS),
        colour=rng.choice(words.COLOURS),
        treasure=rng.choice(words.TREASURES),
    )


def opening(rng: Random, c: Cast) -> str:
    h = c.hero
    return rng.choice(
        (
            f"Once upon a time there was {a(c.trait)} {h.kind} named {h.name} who lived {c.home}.",
            f"There once was {a(c.trait)} {h.kind} called {h.name}. {h.name} lived {c.home}.",
            f"This is a story about {h.name}, {a(c.trait)} {h.kind} who lived {c.home}.",
        )
    )


def meeting(rng: Random, c: Cast) -> str:
    h, f = c.hero, c.friend
    return rng.choice(
        (
            f"{h.name} had a good friend, {a(f.kind)} named {f.name}.",
            f"The best friend of {h.name} was {f.name}, {a(f.kind)}.",
            f"Next door lived {a(f.kind)} named {f.name}.",
        )
    )


def ending(rng: Random, c: Cast) -> str:
    h, f = c.hero, c.friend
    return rng.choice(
        (
            f"{h.name} and {f.name} were happy for the rest of the day.",
            f"From that day on {h.name} and {f.name} were the best of friends.",
            f"Then {h.name} and {f.name} went home together, and that is the end of the story.",
            f"And {h.name} never forgot what {f.name} had done.",
        )
    )


def lost_and_found(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    sentences = [
        f"{h.name} loved {h.their} {c.item} more than anything.",
        rng.choice(
            (
                f"One morning the {c.treasure} was gone, and {h.name} began to cry.",
                f"One day {h.name} could not find the {c.treasure} and was very sad.",
            )
        ),
        f'"Do not worry, {h.name}," said {f.name}. "I will help you look for it."',
        f"They looked everywhere, and at last {f.name} found the {c.treasure} {c.spot}.",
        rng.choice((f'"Thank you, {f.name}!" said {h.name}.', f"{h.name} thanked {f.name} and smiled.")),
    ]
    return sentences, [
        Question(f"What did {h.name} lose?", f"It was the {c.item}.", (c.item,)),
        Question(f"Who found the {c.treasure}?", f"It was {f.name}.", (f.name,)),
        Question(f"Where was the {c.treasure}?", f"{cap(c.spot)}.", (c.spot,)),
    ]


def birthday(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    food = rng.choice(words.FOODS)
    sentences = [
        f"It was {f.name}'s birthday, and {h.name} wanted to give {f.them} something nice.",
        rng.choice(
            (
                f"{h.name} thought about it all night long.",
                f"{h.name} had no money, but {h.they} had an idea.",
            )
        ),
        f"{h.name} made {a(c.colour)} {c.treasure} and hid it {c.spot}.",
        f"When {f.name} found the {c.treasure}, {f.they} jumped for joy.",
        f"Then they ate {a(food)} together.",
    ]
    return sentences, [
        Question("Whose birthday was it?", f"It was {f.name}'s birthday.", (f.name,)),
        Question(f"What did {h.name} make?", f"{cap(a(c.item))}.", (c.item,)),
        Question(f"Where did {h.name} hide the {c.treasure}?", f"{cap(c.spot)}.", (c.spot,)),
        Question("What did they eat?", f"{cap(a(food))}.", (food,)),
    ]


def brave(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    fear = rng.choice(words.FEARS)
    sentences = [
        f"{h.name} was afraid of {fear}.",
        f"One evening {f.name} called for help. {f.name} had lost {f.their} {c.item} {c.spot}.",
        rng.choice(
            (
                f"{h.name} was scared, but {h.they} wanted to help {f.name}.",
                f'"I must be brave," said {h.name}.',
            )
        ),
        f"So {h.name} went to look {c.spot} and brought back the {c.treasure}.",
        f'"You are very brave, {h.name}," said {f.name}.',
        f"After that {h.name} was not afraid of {fear} any more.",
    ]
    return sentences, [
        Question(f"What was {h.name} afraid of?", f"It was {fear}.", (fear,)),
        Question(f"What did {f.name} lose?", f"It was the {c.item}.", (c.item,)),
        Question(f"Who brought back the {c.treasure}?", f"It was {h.name}.", (h.name,)),
    ]


def big_harvest(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    food = rng.choice(("carrot", "pumpkin", "turnip", "potato", "cabbage", "melon"))
    sentences = [
        f"In spring {h.name} planted a seed and gave it water every day.",
        f"Soon a very big {food} grew out of the ground.",
        f"{h.name} pulled and pulled, but the {food} did not move.",
        rng.choice((f'"Please help me, {f.name}!" called {h.name}.', f"Then {h.name} asked {f.name} for help.")),
        f"Together they pulled the {food} out and carried it home in {a(c.colour)} basket.",
        f"{f.name} made soup, and there was enough for everyone.",
    ]
    return sentences, [
        Question("What grew out of the ground?", f"A very big {food} grew out of the ground.", (food,)),
        Question(f"Who helped {h.name}?", f"It was {f.name}.", (f.name,)),
        Question("Who made soup?", f"It was {f.name}.", (f.name,)),
        Question("What colour was the basket?", f"The basket was {c.colour}.", (c.colour,)),
    ]


def broken(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    sentences = [
        f"One {rng.choice(words.WEATHER)} day {h.name} played with {f.name}'s {c.item}.",
        f"{rng.choice(('Crack!', 'Oh no!', 'Bang!'))} The {c.treasure} fell down and broke.",
        rng.choice(
            (
                f"{h.name} was scared and hid the {c.treasure} {c.spot}.",
                f"{h.name} did not know what to do and put the {c.treasure} {c.spot}.",
            )
        ),
        f'In the evening {h.name} told the truth. "I am sorry, {f.name}," said {h.name}.',
        rng.choice(
            (
                f'"Thank you for telling me," said {f.name}. "We can mend it."',
                f"{f.name} was not angry, and they mended the {c.treasure} together.",
            )
        ),
    ]
    return sentences, [
        Question("What broke?", f"It was the {c.item}.", (c.treasure,)),
        Question(f"Who broke the {c.treasure}?", f"It was {h.name}.", (h.name,)),
        Question(f"Where did {h.name} put the {c.treasure}?", f"{cap(c.spot)}.", (c.spot,)),
        Question(f"What colour was the {c.treasure}?", f"The {c.treasure} was {c.colour}.", (c.colour,)),
    ]


def sharing(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    sentences = [
        f"One day {h.name} and {f.name} found {a(c.colour)} {c.treasure} {c.spot}.",
        f'"It is mine!" said {h.name}. "No, it is mine!" said {f.name}.',
        rng.choice(
            (
                f"They were so angry that nobody could play with the {c.treasure}.",
                "They pulled and shouted until both were tired.",
            )
        ),
        f'Then {f.name} had an idea. "Let us share the {c.treasure}," said {f.name}.',
        f"So {h.name} had the {c.treasure} in the morning, and {f.name} had it in the evening.",
    ]
    return sentences, [
        Question("What did they find?", f"{cap(a(c.item))}.", (c.item,)),
        Question("Who had an idea?", f"It was {f.name}.", (f.name,)),
        Question(f"Who had the {c.treasure} in the morning?", f"It was {h.name}.", (h.name,)),
        Question(f"Who had the {c.treasure} in the evening?", f"It was {f.name}.", (f.name,)),
    ]


def journey(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    goal = rng.choice([place for place in words.PLACES if place != c.home])
    food = rng.choice(words.FOODS)
    sentences = [
        f"One {rng.choice(words.WEATHER)} morning {h.name} went on a long journey with a map and {a(food)}.",
        rng.choice(
            (
                f"On the way {h.name} met {f.name}, who was very hungry.",
                f"After a while {h.name} saw {f.name}, who had nothing to eat.",
            )
        ),
        f"{h.name} gave {f.name} the {food}.",
        f'"You are kind," said {f.name}. "I know where a treasure is."',
        f"They walked for three days, and {goal} they found {a(c.item)}.",
        f'"This is for you, {h.name}," said {f.name}.',
    ]
    return sentences, [
        Question(f"What did {h.name} give {f.name}?", f"It was the {food}.", (food,)),
        Question("What did they find?", f"{cap(a(c.item))}.", (c.item,)),
        Question(f"Where did they find the {c.treasure}?", f"{cap(goal)}.", (goal,)),
        Question("Who was hungry?", f"It was {f.name}.", (f.name,)),
    ]


def storm(rng: Random, c: Cast) -> tuple[list[str], list[Question]]:
    h, f = c.hero, c.friend
    food = rng.choice(words.FOODS)
    sentences = [
        f"One night there was a storm, and the wind blew {f.name}'s house away.",
        f"{f.name} was wet and cold, and all {f.they} had left was {a(c.item)}.",
        f'{f.name} knocked at the door. "Come in, {f.name}," said {h.name}.',
        f"{h.name} gave {f.them} a warm blanket and {a(food)}.",
        f"In the morning the sun came out, and {h.name} helped {f.name} to build a new house.",
        f"To say thank you, {f.name} gave {h.name} the {c.treasure}.",
    ]
    return sentences, [
        Question("Whose house blew away?", f"It was the house of {f.name}.", (f.name,)),
        Question(f"Who helped {f.name}?", f"It was {h.name}.", (h.name,)),
        Question(f"What did {f.name} give {h.name}?", f"It was the {c.item}.", (c.item,)),
    ]


def about_anyone(c: Cast) -> list[Question]:
    """What can be asked of every story, because its opening says it."""
    h, f = c.hero, c.friend
    return [
        Question(f"Who was {h.name}?", f"{cap(a(c.trait))} {h.kind}.", (h.kind,)),
        Question(f"Where did {h.name} live?", f"{cap(c.home)}.", (c.home,)),
        Question(f"Who was {f.name}?", f"{cap(a(f.kind))}.", (f.kind,)),
        Question("Who is the story about?", f"It is about {h.name}, {a(c.trait)} {h.kind}.", (h.name,)),
        Question(f"What was the name of the {h.kind}?", f"The {h.kind} was named {h.name}.", (h.name,)),
        Question(f"What was the name of the {f.kind}?", f"The {f.kind} was named {f.name}.", (f.name,)),
    ]


Plot = Callable[[Random, Cast], tuple[list[str], list[Question]]]
PLOTS: Final[Sequence[Plot]] = (
    lost_and_found, birthday, brave, big_harvest, broken, sharing, journey, storm,
)  # fmt: skip


def tell(rng: Random, kind: str | None = None, name: str | None = None) -> Story:
    c = cast(rng, kind, name)
    middle, questions = rng.choice(PLOTS)(rng, c)
    sentences = (opening(rng, c), meeting(rng, c), *middle, ending(rng, c))
    return Story(sentences, tuple(questions + about_anyone(c)), c)
