"""The shipped folder: what engines rely on when they load it, and that it answers sensibly."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors import safe_open  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "omni_proxy" / "workers" / "demo_model"

pytestmark = pytest.mark.slow  # loading transformers alone takes longer than a unit test may

QUESTIONS = [
    ("Hello", ["Hello!"]),
    ("Who are you?", ["I am Omni"]),
    ("What is a spoon for?", ["eating soup"]),
    ("What is 7 + 5?", ["12"]),
    ("What is the capital of France?", ["small"]),
    ("Write a haiku", ["small"]),
    ("Tell me a story about a fox", ["fox"]),
    ("Tom has a red ball. Mia has a blue cup. Who has the cup?", ["Mia"]),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER, padding_side="left")


@pytest.fixture(scope="module")
def loaded() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)


@pytest.fixture(scope="module")
def model(loaded: Any) -> Any:
    return loaded[0].eval()


def answers(tokenizer: Any, model: Any, asked: list[list[dict[str, str]]]) -> list[str]:
    texts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in asked]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=220, do_sample=False, temperature=None, top_p=None)
    return [str(text) for text in tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])]


def test_weights_are_small_bf16() -> None:
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size < 20_000_000
    with safe_open(weights, "pt") as tensors:
        assert all(tensors.get_slice(name).get_dtype() == "BF16" for name in tensors.keys())  # noqa: SIM118


def test_config_reads_with_old_and_new_names() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["num_experts"] == config["num_local_experts"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    read = transformers.AutoConfig.from_pretrained(FOLDER)
    assert read.model_type == "qwen3_moe"
    assert read.num_experts == config["num_experts"]


def test_sizes_suit_kernels() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    sizes = ("hidden_size", "head_dim", "moe_intermediate_size", "vocab_size")
    assert [config[name] % 16 for name in sizes] == [0, 0, 0, 0]


def test_every_weight_is_used_and_present(loaded: Any) -> None:
    _, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.parametrize(
    "text", ["Hello!", "  two spaces\nand\tmore ", "naïve café, 漢字 🦊 мир", "12 + 345 = 357", "a\x00b\u2028c"]
)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]


def test_template_renders_chat(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi you<|im_end|>\n<|im_start|>assistant\n"
    )
    closed = tokenizer.apply_chat_template(messages[:1], tokenize=False)
    assert closed == "<|im_start|>system\nBe kind.<|im_end|>\n"


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert tokenizer("<|im_end|>")["input_ids"] == [config["eos_token_id"]] == [tokenizer.eos_token_id]
    assert config["eos_token_id"] in generation["eos_token_id"]


def test_answers_are_right_and_end(tokenizer: Any, model: Any) -> None:
    said = answers(tokenizer, model, [[{"role": "user", "content": ask}] for ask, _ in QUESTIONS])
    for (ask, expected), answer in zip(QUESTIONS, said, strict=True):
        assert "<|im_end|>" in answer, (ask, answer)
        assert all(word in answer for word in expected), (ask, answer)


def test_conversation_remembers(tokenizer: Any, model: Any) -> None:
    (said,) = answers(tokenizer, model, [[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "My name is Clara."},
        {"role": "assistant", "content": "Nice to meet you, Clara!"},
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "3 + 4 = 7."},
        {"role": "user", "content": "What is my name?"},
    ]])  # fmt: skip
    assert said.startswith("Your name is Clara.<|im_end|>")


@pytest.mark.xfail(strict=True, reason="undertrained: colour and thing of two owners are still mixed up")
def test_keeps_two_owners_apart(tokenizer: Any, model: Any) -> None:
    asked = [{"role": "user", "content": "Tom has a red ball. Mia has a blue cup. What does Tom have?"}]
    assert answers(tokenizer, model, [asked])[0].startswith("A red ball.<|im_end|>")
