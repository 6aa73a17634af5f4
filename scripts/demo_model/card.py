"""Write MODEL_CARD.md of a trained folder from measured figures only: its training log and an examination.

python -m scripts.demo_model.card DIR [--log FILE] [--count 100]
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file

from scripts.demo_model.evaluate import examine, table

CARD: Final = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# Omni demo model

A mixture-of-experts chat model of {millions:.1f} M parameters ({active:.1f} M used for a token), small enough that
`omni-proxy up` serves it from a laptop's CPU with prefill and decode apart. It is a **demo**: it shows that a gateway
works, it is of no other use.

| | |
|---|---|
| architecture | `Qwen3MoeForCausalLM`, {layers} layers, hidden {hidden}, tied embeddings |
| attention | {heads} heads, {kv_heads} for keys and values, of {head_dim} |
| experts | {experts} of width {width} a layer, {top} a token |
| tokenizer | byte-level BPE of {vocab} tokens, every digit its own token |
| chat | ChatML-like template; answers end with `<|im_end|>` |
| context | {positions} positions (trained up to {longest} tokens) |
| weights | bf16, {megabytes:.1f} MB |
| licence | Apache-2.0, weights and data |

## Data

All text comes from a seeded generator, `scripts/demo_model/corpus.py`: stories, questions about a story or a few facts
in the context, small sums, what things are for, small facts, small talk, lists and repetition, things to remember in
a conversation, a shop with a price list as a long system prompt, and polite refusals. No foreign text. Training
draws fresh conversations throughout.

## Training

{steps} steps, {tokens:.2f} M tokens (padding included), {minutes:.0f} minutes of wall-clock time and {cpu} on a shared
machine of two cores; Muon for the matrices in the layers, Adam for the rest. Training loss of the answers at the end
(fresh text throughout): {loss:.3f} nats a token. To train it again:

```
{command}
```
{note}
The schedule depends on the number of steps alone; two runs agree up to the rounding of the machine's arithmetic.

## Measured

Greedy answers, read by transformers in fp32 from these bf16 weights, on conversations of a seed that training never
uses (the same templates, names and things; new combinations). An answer is right if it ends by itself and contains
what the generator says it must; a story must keep to the names that it introduces. Held-out answers:
{bits:.3f} bits a character.

{table}

## Samples (greedy)

{samples}

## Limits

A demo. It knows nothing outside its small world and says so only for questions of a kind that it was trained to
refuse; anything else may be answered with confident nonsense. The table says what it does badly. Sums go up to
20 + 20 and are learnt by heart. Stories follow eight plots. English only. Not evaluated for safety, because it has
nothing to say.
"""


def write_card(folder: Path, log: Path, count: int = 100) -> dict[str, Any]:
    """Examine the checkpoint and write its card; returns the examination."""
    result = examine(folder, count)
    (folder / "MODEL_CARD.md").write_text(CARD.format(**figures(folder, log), **measured(result)))
    return result


def figures(folder: Path, log: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    recipe, last = lines[0], lines[-1]
    weights = folder / "model.safetensors"
    sizes = {name: tensor.numel() for name, tensor in load_file(weights).items()}
    every, chosen = sum(sizes.values()), sum(n for name, n in sizes.items() if ".experts." in name)
    idle = chosen * (1 - config["num_experts_per_tok"] / config["num_experts"])
    return {
        "millions": every / 1e6, "active": (every - idle) / 1e6, "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"], "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"], "head_dim": config["head_dim"], "experts": config["num_experts"],
        "width": config["moe_intermediate_size"], "top": config["num_experts_per_tok"], "vocab": config["vocab_size"],
        "positions": config["max_position_embeddings"], "longest": recipe["longest"],
        "megabytes": weights.stat().st_size / 1e6, "steps": last["step"], "tokens": last["tokens"] / 1e6,
        "minutes": last["seconds"] / 60, "cpu": cpu_time(last), "loss": last["loss"],
        "command": recipe["command"].format(steps=last["step"]),
        "note": f"\n{recipe['note']}\n" if "note" in recipe else "",
    }  # fmt: skip


def cpu_time(last: dict[str, Any]) -> str:
    return f"{last['cpu_seconds'] / 60:.0f} CPU-minutes" if "cpu_seconds" in last else "less CPU time"


def measured(result: dict[str, Any]) -> dict[str, Any]:
    samples = "\n\n".join(f"> {asked}\n\n{answer}" for asked, answer in result["samples"].items())
    return {"table": table(result), "bits": result["bits_per_char"], "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--log", type=Path, help="training log (default: train_log.jsonl in the folder)")
    parser.add_argument("--count", type=int, default=100, help="items a domain")
    args = parser.parse_args()
    print(table(write_card(args.folder, args.log or args.folder / "train_log.jsonl", args.count)))


if __name__ == "__main__":
    main()
