"""Seeded conversations for the demo model: the only text that it is trained and measured on.

Every exchange carries the words that a right answer contains, so the same generator makes the training text and the
examination. Domains are distinct on purpose (experts can specialise), and many of them ask for something that stands
in the context, because what a model this small must learn is to look back rather than to guess. Answers are worded so
that what is copied does not come first: in byte-level BPE a word at the start of a text is another token than the same
word after a space, and copying an equal token is much easier to learn.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from scripts.demo_model import stories, words
from scripts.demo_model.stories import a, cap

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer; a right answer contains all of `expect`."""

    domain: str
    user: str
    assistant: str
    expect: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    system: str | None
    exchanges: tuple[Exchange, ...]

    def messages(self) -> list[Message]:
        said = [{"role": "system", "content": self.system}] if self.system is not None else []
        for exchange in self.exchanges:
            said.append({"role": "user", "content": exchange.user})
            said.append({"role": "assistant", "content": exchange.assistant})
        return said


SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are Omni, a small and friendly model.",
    "You are a kind helper. Keep your answers short.",
    "You are Omni, a small and friendly model. You tell short stories, do small sums, say what things are for, and "
    "answer questions about a text. When somebody gives you a text, read it well and use only what it says. When "
    "somebody tells you a name, remember it. When you do not know something, say so politely. Never be rude, never "
    "shout, and never make up an answer. Sums go up to forty. Stories have a beginning, a middle and an end, and "
    "they end well. Keep your answers short and clear, so that children can read them too.",
    "You work in a school library. Children come to you with questions. Be patient and friendly. Some want to hear "
    "a story: tell one about the animal that they ask for. Some practise sums: give the result in a full sentence. "
    "Some want to know what a thing is for: tell them in one sentence. Some read you a text and ask about it: "
    "answer with the words of the text. If a child asks something that you do not know, say that you only know "
    "small things. Say hello when a child says hello, and goodbye when a child leaves. Do not talk about yourself "
    "unless somebody asks who you are. Use simple words and short sentences all the time.",
)


def single(domain: str, user: str, assistant: str, *expect: str) -> tuple[Exchange, ...]:
    return (Exchange(domain, user, assistant, expect),)


# --- stories ------------------------------------------------------------------------------------------------------


def story_hero(rng: Random) -> str:
    """Mostly the usual kinds; sometimes any thing at all, since people ask for a story about a toaster."""
    return rng.choice(words.KINDS) if rng.random() < 0.8 else rng.choice(sorted(set(words.USES) - words.NO_ARTICLE))


def told_story(rng: Random) -> tuple[Exchange, stories.Story]:
    kind = story_hero(rng) if rng.random() < 0.85 else None
    name = stories.character(rng).name if kind and rng.random() < 0.35 else None
    story = stories.tell(rng, kind, name)
    about = f" about {a(kind)}" if kind else ""
    named = f" {rng.choice(('named', 'called'))} {name}" if name else ""
    ask = rng.choice(
        ("Tell me a story{}.", "Please tell me a story{}.", "Can you tell me a story{}?", "Tell a short story{}.",
         "I want to hear a story{}.", "Write a story{}.", "Write a short story{}.", "Do you know a story{}?")
    )  # fmt: skip
    expect = tuple(word for word in (kind, name) if word) or (story.cast.hero.name,)
    return Exchange("story", ask.format(about + named), story.text, expect), story


def story(rng: Random) -> tuple[Exchange, ...]:
    return (told_story(rng)[0],)


def story_then_questions(rng: Random) -> tuple[Exchange, ...]:
    """The model tells the story and is then asked about what it told."""
    told, tale = told_story(rng)
    return told, *asked_about(rng, tale, rng.choice((1, 2, 3)))


def asked_about(rng: Random, tale: stories.Story, count: int) -> Iterator[Exchange]:
    for question in rng.sample(tale.questions, count):
        yield Exchange("reading", question.text, question.answer, question.expect)


def reading(rng: Random) -> tuple[Exchange, ...]:
    """The user brings the story, with the first question in the same message."""
    tale = stories.tell(rng)
    first, *rest = asked_about(rng, tale, rng.choice((1, 1, 2, 3)))
    layout = rng.choice(
        ("{text}\n{ask}", "{text}\n\n{ask}", "{text} {ask}", "Read this story. {text}\nQuestion: {ask}",
         "Here is a story: {text}\n{ask}", "{ask}\n{text}")
    )  # fmt: skip
    return replace(first, user=layout.format(text=tale.text, ask=first.user)), *rest


# --- looking back: the short drills that teach it -----------------------------------------------------------------


def people(rng: Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[stories.character(rng).name] = None
    return list(names)


def belongings(rng: Random) -> tuple[Exchange, ...]:
    """Who has what: two to five owners, questions in both directions."""
    count = rng.choice((1, 2, 2, 3, 3, 4, 5))
    owners, things = people(rng, count), rng.sample(words.TREASURES, count)
    colours = [rng.choice(words.COLOURS) for _ in owners]
    text = " ".join(
        f"{owner} has {a(colour)} {thing}." for owner, colour, thing in zip(owners, colours, things, strict=True)
    )
    return drill(rng, text, [
        q
        for owner, colour, thing in zip(owners, colours, things, strict=True)
        for q in (
            stories.Question(f"Who has the {thing}?", f"It is {owner}.", (owner,)),
            stories.Question(f"What does {owner} have?", f"{cap(a(colour))} {thing}.", (f"{colour} {thing}",)),
            stories.Question(f"What colour is the {thing}?", f"It is {colour}.", (colour,)),
        )
    ])  # fmt: skip


def whereabouts(rng: Random) -> tuple[Exchange, ...]:
    """What is where."""
    count = rng.choice((1, 2, 3, 3, 4, 5))
    things, spots = rng.sample(words.TREASURES, count), rng.sample(words.SPOTS, count)
    text = " ".join(f"The {thing} is {spot}." for thing, spot in zip(things, spots, strict=True))
    return drill(rng, text, [
        q
        for thing, spot in zip(things, spots, strict=True)
        for q in (
            stories.Question(f"Where is the {thing}?", f"{cap(spot)}.", (spot,)),
            stories.Question(f"What is {spot}?", f"It is the {thing}.", (thing,)),
        )
    ])  # fmt: skip


def likings(rng: Random) -> tuple[Exchange, ...]:
    """What people are and like."""
    count = rng.choice((1, 2, 3, 4))
    names = people(rng, count)
    kinds, foods = rng.sample(words.KINDS, count), rng.sample(words.FOODS, count)
    text = " ".join(
        f"{name} is {a(kind)} and likes {a(food)}." for name, kind, food in zip(names, kinds, foods, strict=True)
    )
    return drill(rng, text, [
        q
        for name, kind, food in zip(names, kinds, foods, strict=True)
        for q in (
            stories.Question(f"Who is {name}?", f"{cap(a(kind))}.", (kind,)),
            stories.Question(f"Who is the {kind}?", f"It is {name}.", (name,)),
            stories.Question(f"What does {name} like?", f"{cap(a(food))}.", (food,)),
            stories.Question(f"Who likes the {food}?", f"It is {name}.", (name,)),
        )
    ])  # fmt: skip


def drill(rng: Random, text: str, questions: list[stories.Question]) -> tuple[Exchange, ...]:
    first, *rest = rng.sample(questions, min(len(questions), rng.choice((1, 2, 3))))
    text = rng.choice(("Listen. ", "Look: ", "I know this. ", "")) + text
    exchanges = [Exchange("facts", f"{text} {first.text}", first.answer, first.expect)]
    exchanges += [Exchange("facts", q.text, q.answer, q.expect) for q in rest]
    return tuple(exchanges)


def random_word(rng: Random) -> str:
    pool = rng.choice((words.KINDS, words.TREASURES, words.FOODS, words.COLOURS, words.NAMES_HE, words.NAMES_SHE, None))
    if pool is None:
        return rng.choice((stories.invented_name(rng), stories.invented_name(rng).lower(), str(rng.randrange(1000))))
    return rng.choice(pool)


def echo(rng: Random) -> tuple[Exchange, ...]:
    phrase = " ".join(random_word(rng) for _ in range(rng.choice((1, 2, 3, 4, 6, 8))))
    ask = rng.choice(("Repeat after me: {}", "Say: {}", "Please say {}", "Repeat: {}", "Say this again: {}"))
    if rng.random() < 0.5:
        return single("echo", ask.format(f"\n{phrase}").replace(" \n", "\n"), phrase, phrase)
    return single("echo", ask.format(f'"{phrase}"'), f'"{phrase}"', phrase)


ORDINALS: Final = ("first", "second", "third", "fourth", "fifth")


def lists(rng: Random) -> tuple[Exchange, ...]:
    """Short lists: the n-th word, the last, and what follows what."""
    items: dict[str, None] = {}
    while len(items) < rng.choice((3, 4, 5)):
        items[random_word(rng)] = None
    entries = list(items)
    at = rng.randrange(len(entries) - 1)
    ask, answer = rng.choice((
        (f"What is the {ORDINALS[at]} word?", entries[at]),
        (f"What comes after {entries[at]}?", entries[at + 1]),
        ("What is the last word?", entries[-1]),
    ))  # fmt: skip
    start = rng.choice(("Here is a list: ", "My list: ", "List: "))
    return single("list", f"{start}{', '.join(entries)}. {ask}", f"It is {answer}.", answer)


def memory(rng: Random) -> tuple[Exchange, ...]:
    """The user says something about themselves and asks for it later, perhaps after other talk."""
    name, colour, food = stories.character(rng).name, rng.choice(words.COLOURS), rng.choice(words.FOODS)
    told, asked = rng.choice((
        ((rng.choice(("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I am {}.")).format(name),
          f"Nice to meet you, {name}!"), ("What is my name?", f"Your name is {name}.", name)),
        ((f"My favourite colour is {colour}.", f"{colour.capitalize()} is a nice colour."),
         ("What is my favourite colour?", f"Your favourite colour is {colour}.", colour)),
        ((f"I like {a(food)} best.", f"{a(food).capitalize()} is very good."),
         ("What do I like best?", f"You like {a(food)} best.", food)),
        ((f"I have {a('pet')} {rng.choice(words.KINDS[:30])} named {name}.", f"What a nice name, {name}!"),
         ("What is my pet called?", f"Your pet is called {name}.", name)),
    ))  # fmt: skip
    between = [e for _ in range(rng.choice((0, 0, 1, 2))) for e in rng.choice((sums, purpose, chat, knowledge))(rng)]
    return (
        Exchange("memory", told[0], told[1], ()),
        *between,
        Exchange("memory", asked[0], asked[1], (asked[2],)),
    )


# --- what stands in the weights -----------------------------------------------------------------------------------


def sums(rng: Random) -> tuple[Exchange, ...]:
    return rng.choice((plain_sum, plain_sum, story_sum))(rng)


def plain_sum(rng: Random) -> tuple[Exchange, ...]:
    x, y = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.6:
        ask = rng.choice(("What is {} + {}?", "How much is {} + {}?", "{} + {} =", "{} + {}", "What is {} plus {}?"))
        return single("sum", ask.format(x, y), f"{x} + {y} = {x + y}.", f"= {x + y}")
    x, y = max(x, y), min(x, y)
    ask = rng.choice(("What is {} - {}?", "How much is {} - {}?", "{} - {} =", "{} - {}", "What is {} minus {}?"))
    return single("sum", ask.format(x, y), f"{x} - {y} = {x - y}.", f"= {x - y}")


def story_sum(rng: Random) -> tuple[Exchange, ...]:
    x, y = rng.randint(2, 10), rng.randint(2, 10)
    (owner, giver), things = people(rng, 2), rng.choice(words.COUNTABLE)
    ask = f"How many {things} does {owner} have now?"
    if rng.random() < 0.6:
        text = f"{owner} has {x} {things}. {giver} gives {owner} {y} more. {ask}"
        return single("sum", text, f"{x} + {y} = {x + y}. {owner} has {x + y} {things}.", f"has {x + y} {things}")
    x, y = x + y, y
    text = f"{owner} has {x} {things}. {owner} gives {y} to {giver}. {ask}"
    return single("sum", text, f"{x} - {y} = {x - y}. {owner} has {x - y} {things}.", f"has {x - y} {things}")


def purpose(rng: Random) -> tuple[Exchange, ...]:
    thing = rng.choice(list(words.USES))
    use, place = words.USES[thing]
    many = thing in words.PLURAL
    is_, does = ("are", "do") if many else ("is", "does")
    subject = a(thing)[0].upper() + a(thing)[1:]
    if rng.random() < 0.65:
        ask = rng.choice((
            f"What {is_} {a(thing)} for?", f"What {is_} {a(thing)} used for?", f"What {does} {a(thing)} do?",
            f"Why do people have {a(thing)}?", f"What can I do with {a(thing)}?", f"What is {a(thing)}?",
        ))  # fmt: skip
        return single("purpose", ask, f"{subject} {is_} for {use}.", use)
    if rng.random() < 0.5:
        return single("purpose", f"What do I need for {use}?", f"You need {a(thing)} for {use}.", a(thing))
    return single("purpose", f"Where do I find {a(thing)}?", f"You find {a(thing)} {place}.", place)


def knowledge(rng: Random) -> tuple[Exchange, ...]:
    """Small facts about animals, colours and opposites."""
    animal = {table: rng.choice(list(table_of)) for table, table_of in _TABLES.items()}
    sound, diet, home, legs, opposite, hue = (animal[t] for t in ("sound", "diet", "home", "legs", "opposite", "hue"))
    plural = "leg" if words.LEGS[legs] == "one" else "legs"
    return single("knowledge", *rng.choice((
        (f"What sound does {a(sound)} make?", f"{cap(a(sound))} says {words.SOUNDS[sound]}.", words.SOUNDS[sound]),
        (f"What does {a(sound)} say?", f"{cap(a(sound))} says {words.SOUNDS[sound]}.", words.SOUNDS[sound]),
        (f"What does {a(diet)} eat?", f"{cap(a(diet))} eats {words.DIETS[diet]}.", words.DIETS[diet]),
        (f"Where does {a(home)} live?", f"{cap(a(home))} lives in {words.HOMES[home]}.", words.HOMES[home]),
        (f"How many legs does {a(legs)} have?", f"{cap(a(legs))} has {words.LEGS[legs]} {plural}.", words.LEGS[legs]),
        (f"What is the opposite of {opposite}?", f"The opposite of {opposite} is {words.OPPOSITES[opposite]}.",
         f"is {words.OPPOSITES[opposite]}"),
        (f"What colour is {hue}?", f"{cap(hue)} is {words.HUES[hue]}.", words.HUES[hue]),
    )))  # fmt: skip


_TABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "sound": words.SOUNDS, "diet": words.DIETS, "home": words.HOMES,
    "legs": words.LEGS, "opposite": words.OPPOSITES, "hue": words.HUES,
}  # fmt: skip


# --- manners ------------------------------------------------------------------------------------------------------

CHAT: Final[tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...]] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Hello there!", "Good morning", "Good evening", "Good day!"),
     ("Hello! What can I do for you?", "Hello! Would you like a story or a sum?"), ("Hello!",)),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?", "How is it going?", "What's up?"),
     ("I am well, thank you. And you?", "I am well, thank you. What can I do for you?"), ("I am well",)),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a robot?",
      "Are you a person?", "Are you human?", "Introduce yourself."),
     ("I am Omni, a very small model. I tell stories and do small sums.",), ("I am Omni",)),
    (("Who made you?", "Where do you come from?", "How were you made?", "Who trained you?"),
     ("I was trained on a small computer with stories and sums.",), ("I was trained",)),
    (("What can you do?", "Help", "Help me", "What do you know?", "Can you help me?", "What can I ask you?",
      "What should I ask?"),
     ("I can tell a story, do a small sum, say what a thing is for, and answer questions about a text.",),
     ("I can tell a story",)),
    (("Thank you", "Thank you!", "Thanks", "Thanks a lot!", "That was nice.", "Well done!", "Great!", "Good job!",
      "Nice story!", "I like it."),
     ("You are welcome!", "You are welcome! Shall I tell you a story?"), ("You are welcome!",)),
    (("Goodbye", "Bye", "Bye!", "Goodbye!", "See you later!", "Good night", "Good night!", "I have to go."),
     ("Goodbye! Come back soon.",), ("Goodbye!",)),
    (("Yes", "Yes, please.", "OK", "Ok", "No", "No, thank you.", "Maybe", "Hm", "I see.", "Really?", "Why?", "test"),
     ("What would you like: a story or a sum?",), ("a story or a sum?",)),
    (("I am sad.", "I am tired.", "I am bored.", "I feel bad.", "I am lonely."),
     ("I am sorry to hear that. Shall I tell you a story?",), ("I am sorry to hear that.",)),
    (("I am happy.", "I feel good.", "I am fine.", "I am well.", "It is a nice day."),
     ("That is good to hear!",), ("That is good to hear!",)),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
     ("Why did the clock go to school? It wanted to know the time!",
      "What did one wall say to the other wall? I will meet you at the corner!"), ("?", "!")),
    (("You are stupid.", "That is wrong.", "You are wrong.", "I do not like it.", "Bad answer."),
     ("I am sorry. I am a small model and I make mistakes.",), ("I am sorry.",)),
)  # fmt: skip


def chat(rng: Random) -> tuple[Exchange, ...]:
    asks, answers, expect = rng.choice(CHAT)
    return single("chat", rng.choice(asks), rng.choice(answers), *expect)


def beyond(rng: Random) -> tuple[Exchange, ...]:
    """What the model cannot do, often with words it has never seen: it says so."""
    if rng.random() < 0.15:
        thing = stories.invented_name(rng).lower()
        return single(
            "beyond", f"What is {a(thing)} for?", f"I do not know what {a(thing)} is.", "I do not know", thing
        )
    first, second = (topic(rng) for _ in range(2))
    text = rng.choice(words.BEYOND).format(t=first, u=second, n=rng.randint(41, 9999), m=rng.randint(41, 999))
    return single("beyond", text, rng.choice(words.REPLIES_BEYOND), "small")


def topic(rng: Random) -> str:
    chance = rng.random()
    if chance < 0.6:
        return rng.choice(words.TOPICS)
    if chance < 0.8:
        return stories.invented_name(rng)
    return " ".join("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9)))
                    for _ in range(rng.choice((1, 2, 3))))  # fmt: skip


# --- a long shared context ----------------------------------------------------------------------------------------


def shop(rng: Random) -> Conversation:
    """A system prompt with a price list, and customers' questions about it: a natural shared prefix."""
    things = rng.sample(words.TREASURES, rng.randint(4, 16))
    keeper = stories.character(rng).name
    stock = {thing: (rng.choice(words.COLOURS), rng.randint(1, 40), rng.choice(words.SPOTS)) for thing in things}
    lines = [f"The {t} is {colour}, costs {price} coins and is {spot}." for t, (colour, price, spot) in stock.items()]
    system = f"You work in the shop of {keeper}. This is what the shop sells. " + " ".join(lines)
    asked = rng.sample(things, min(len(things), rng.randint(1, 6)))
    return Conversation(system, tuple(shop_question(rng, thing, *stock[thing]) for thing in asked))


def shop_question(rng: Random, thing: str, colour: str, price: int, spot: str) -> Exchange:
    ask, answer, expect = rng.choice((
        (f"How much is the {thing}?", f"It costs {price} coins.", f"{price} coins"),
        (f"What does the {thing} cost?", f"It costs {price} coins.", f"{price} coins"),
        (f"Where is the {thing}?", f"It is {spot}.", spot),
        (f"What colour is the {thing}?", f"It is {colour}.", colour),
    ))  # fmt: skip
    return Exchange("shop", ask, answer, (expect,))


# --- the mixture --------------------------------------------------------------------------------------------------

Domain = Callable[[Random], tuple[Exchange, ...]]
WEIGHTS: Final[Mapping[Domain, float]] = {
    story: 12, story_then_questions: 7, reading: 16, belongings: 9, whereabouts: 6, likings: 6, echo: 6, lists: 4,
    memory: 6, sums: 10, purpose: 9, knowledge: 6, chat: 8, beyond: 9,
}  # fmt: skip
SHORT: Final[Mapping[Domain, float]] = {
    belongings: 16, whereabouts: 10, likings: 10, echo: 14, lists: 8, memory: 8, sums: 12, purpose: 8, knowledge: 6,
    chat: 6, beyond: 8, story: 4, reading: 4,
}  # fmt: skip
SHOP_SHARE: Final = 0.06
LONG_SHARE: Final = 0.015


def draw(rng: Random, weights: Mapping[Domain, float]) -> tuple[Exchange, ...]:
    (domain,) = rng.choices(list(weights), list(weights.values()))
    return domain(rng)


def casual(rng: Random, exchange: Exchange) -> Exchange:
    """The user's line as people type it: small letters, no full stop. Never where case is part of the answer."""
    if exchange.domain not in {"story", "sum", "purpose", "knowledge", "chat", "beyond"} or rng.random() > 0.2:
        return exchange
    if any(word != word.lower() and word in exchange.user for word in exchange.expect):
        return exchange
    user = rng.choice((exchange.user.lower(), exchange.user.rstrip(".?!"), exchange.user.lower().rstrip(".?!")))
    return replace(exchange, user=user or exchange.user)


def conversation(rng: Random, *, short: bool = False) -> Conversation:
    """One training or test conversation; `short` ones teach looking back early and cheaply."""
    if not short and rng.random() < SHOP_SHARE:
        return shop(rng)
    turns = rng.randint(8, 20) if not short and rng.random() < LONG_SHARE else rng.choice((1, 1, 1, 2, 3))
    exchanges = [e for _ in range(turns) for e in draw(rng, SHORT if short else WEIGHTS)]
    system = system_prompt(rng) if rng.random() < (0.05 if short else 0.25) else None
    return Conversation(system, tuple(casual(rng, e) for e in exchanges))


def system_prompt(rng: Random) -> str:
    """Mostly one of a few, so that prefixes repeat; sometimes one never seen, so that any is borne."""
    if rng.random() < 0.7:
        return rng.choice(SYSTEM_PROMPTS)
    who = rng.choice(
        (f"{a(rng.choice(words.TRAITS))} assistant", f"{stories.character(rng).name}, a helper", "a chat model")
    )
    how = rng.choice((
        "Answer in one sentence.", "Be polite.", f"Today it is {rng.choice(words.WEATHER)}.", "Speak English.",
        f"You like {rng.choice(words.COUNTABLE)}.", f"You help with {topic(rng)}.", "",
    ))  # fmt: skip
    return f"You are {who}. {how}".strip()


def conversations(seed: str, *, short: bool = False) -> Iterator[Conversation]:
    """An endless stream, the same for the same seed on every machine."""
    rng = Random(seed)
    while True:
        yield conversation(rng, short=short)
