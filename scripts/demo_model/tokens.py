"""The demo model's tokenizer, its chat template, and conversations as token ids with their targets marked."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.demo_model.corpus import Conversation, conversations

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# A word takes the space before it; every digit is a token of its own, so that sums are about digits.
WORDS: Final = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
TEMPLATE: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- elif message.content %}{%- for part in message.content %}{{- part.text or '' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(vocab: int, seed: int, count: int = 12_000) -> Tokenizer:
    """Byte-level BPE: any text round-trips, the words of the corpus are mostly single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (m["content"] for c in islice(conversations(f"{seed}/tokenizer"), count) for m in c.messages())
    tokenizer.train_from_iterator(("system\n", "user\n", "assistant\n", *texts), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, length: int) -> None:
    """As transformers reads it, with the template inside tokenizer_config.json, where every engine looks."""
    make: Any = PreTrainedTokenizerFast
    wrapped = make(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(out, save_jinja_files=False)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return int(found)


Row = tuple[list[int], list[int], list[int]]


def encode(tokenizer: Tokenizer, batch: Iterable[Conversation]) -> list[Row]:
    """Ids of each rendered conversation, and the positions whose next token the assistant says, and the user."""
    start, end = (id_of(tokenizer, token) for token in (START, END))
    said = [[(m["role"], m["content"]) for m in c.messages()] for c in batch]
    pieces = [f"{role}\n{content}" for messages in said for role, content in messages]
    bodies = iter(tokenizer.encode_batch_fast([*pieces, "\n", "assistant\n"], add_special_tokens=False))
    encoded = [[(role, next(bodies).ids) for role, _ in messages] for messages in said]
    newline, answer = next(bodies).ids, len(next(bodies).ids)
    result = []
    for messages in encoded:
        ids: list[int] = []
        targets: dict[str, list[int]] = {"assistant": [], "user": [], "system": []}
        for role, body in messages:
            name = answer if role == "assistant" else 2
            targets[role].extend(range(len(ids) + name, len(ids) + len(body) + 1))
            ids += [start, *body, end, *newline]
        result.append((ids[:-1], targets["assistant"], targets["user"]))
    return result
