"""Trace files and generated workloads, good and bad."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from omni_proxy.config import ConfigError
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.presets import PRESETS, preset
from omni_proxy.sim.setup import LoadBasis, at_load, known_tokens, offered_load
from omni_proxy.sim.synthetic import KINDS, parse_synthetic
from omni_proxy.sim.traces import read_trace
from tests.sim.helpers import SMALL

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_mooncake_trace(tmp_path: Path) -> None:
    second = '{"timestamp": 1500, "input_length": 512, "output_length": 0, "hash_ids": [0]}\n'
    workload = read_trace(written(tmp_path, "t.jsonl", GOOD + "\n" + second))
    first, last = workload.requests
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens, first.block_keys) == (0.0, 600, 5, (0, 1))
    assert first.full_blocks(512) == (0,)
    assert first.unit_keys(512) == (0,) * 32
    assert (last.arrival_s, last.output_tokens) == (1.5, 1)
    assert list(known_tokens(workload)) == [0, 511]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"timestamp": 0, "input_length": 60', "t.jsonl:2: input_length: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1', "t.jsonl:2: hash_ids: "),
        ('{"timesta', "t.jsonl:2: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 600 "output_length": 5}', "t.jsonl:2: output_length: JSON is malformed"),
        ('{"timestamp": 0, "input_length": "x", "output_length": 5, "hash_ids": []}', "t.jsonl:2: input_length: "),
        ('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}', "t.jsonl:2: input_length: "),
        ('{"timestamp": 0, "output_length": 5, "hash_ids": []}', "t.jsonl:2: .*input_length"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1]}',
            "t.jsonl:2: hash_ids: has 1 ids",
        ),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}', "t.jsonl:2: timestamp: "),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [-1]}', "t.jsonl:2: hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [99999999999999999999]}', "t.jsonl:2: "),
        ("[1]", "t.jsonl:2: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        read_trace(written(tmp_path, "t.jsonl", GOOD + line))


def test_instants_may_not_go_back(tmp_path: Path) -> None:
    later = GOOD.replace('"timestamp": 0', '"timestamp": 9')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: timestamp: 0 is before 9"):
        read_trace(written(tmp_path, "t.jsonl", later + GOOD))


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_an_azure_trace(tmp_path: Path) -> None:
    text = HEADER + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.2299600,110,27\n"
    workload = read_trace(written(tmp_path, "t.csv", text))
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in workload.requests] == [
        (0.0, 4808, 10),
        (0.25, 110, 27),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a,b\n", "t.csv:1: the header"),
        (HEADER + "2023-11-16 18:17:03.9,x,1\n", "t.csv:2: ContextTokens: .* got 'x'"),
        (HEADER + "2023-11-16 18:17:03.9,1,0\n", "t.csv:2: GeneratedTokens: .* got '0'"),
        (HEADER + "soon,1,1\n", "t.csv:2: TIMESTAMP: 'soon'"),
        (HEADER + "2023-11-16 18:17:03.9,1\n", "t.csv:2: has 2 columns"),
        (HEADER + "2023-11-16 18:17:03+00:00,1,1\n", "t.csv:2: TIMESTAMP: .* has a time zone"),
        (HEADER + "2023-11-16 18:17:03.9,1,1\n" + "x" * 200_000 + ",1,1\n", "t.csv:3: is no CSV"),
        (HEADER, "holds no request"),
        ("", "t.csv:1: the header"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        read_trace(written(tmp_path, "t.csv", text))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a Mooncake trace"):
        read_trace(written(tmp_path, "t.txt", ""))
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("kind", list(KINDS))
def test_generated_workloads_follow_their_seed(kind: str) -> None:
    text = f"{kind},requests=200,rate=10"
    assert parse_synthetic(text, 1) == parse_synthetic(text, 1)
    assert parse_synthetic(text, 1) != parse_synthetic(text, 2)
    workload = parse_synthetic(text, 1)
    assert len(workload.requests) == 200
    for number, request in enumerate(workload.requests):
        assert len(request.block_keys) == -(-request.prompt_tokens // workload.block_tokens)
        assert request.after is None or request.after < number


def test_bursts_are_denser_than_poisson() -> None:
    def variation(kind: str) -> float:
        instants = [r.arrival_s for r in parse_synthetic(f"{kind},requests=2000,rate=10", 1).requests]
        gaps = [b - a for a, b in itertools.pairwise(instants)]
        mean = sum(gaps) / len(gaps)
        return math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) / mean

    assert variation("poisson") == pytest.approx(1.0, abs=0.15)
    assert variation("bursts") > 3


def test_turns_and_prefixes_share() -> None:
    for kind, least in (("prefixes", 0.3), ("fanout", 0.3), ("turns", 0.4), ("poisson", 0.0)):
        workload = parse_synthetic(f"{kind},requests=500", 1)
        share = sum(known_tokens(workload)) / sum(r.prompt_tokens for r in workload.requests)
        assert share > least or share == least == 0


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("storms", "no workload 'storms'"),
        ("poisson,rat=3", "no setting 'rat'"),
        ("poisson,rate=x", "rate: must be a number above 0, got 'x'"),
        ("poisson,rate=nan", "rate: "),
        ("poisson,requests=0", "requests: "),
        ("poisson,rate", "rate: "),
    ],
)
def test_wrong_generated_workloads(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        parse_synthetic(text, 0)


@pytest.mark.parametrize("basis", list(LoadBasis))
def test_load_is_what_was_asked_for(basis: LoadBasis) -> None:
    workers = make_cluster(3, 1, 0, SMALL)
    workload = at_load(parse_synthetic("prefixes,requests=300", 1), workers, 0.7, basis)
    assert offered_load(workload, workers, basis) == pytest.approx(0.7)
    assert offered_load(workload, workers, LoadBasis.SHARED) <= offered_load(workload, workers, LoadBasis.COLD)


def test_denser_sessions_think_as_long() -> None:
    workload = parse_synthetic("turns,requests=50", 1)
    for before, after in zip(workload.requests, workload.stretched(0.5).requests, strict=True):
        factor = 1.0 if before.after is not None else 0.5
        assert after.arrival_s == before.arrival_s * factor


def test_load_of_one_instant_is_refused() -> None:
    workload = parse_synthetic("poisson,requests=1", 1)
    with pytest.raises(ConfigError, match="all arrive at once"):
        at_load(workload, make_cluster(1, 1, 0, SMALL), 0.5, LoadBasis.COLD)


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_presets_are_sane(model: EngineModel) -> None:
    assert model.alone_s(1000) < model.alone_s(2000) < model.alone_s(2000, 4000)
    chance = random.Random(1)
    for _ in range(20):
        seqs, kv, steps = chance.randint(1, 64), chance.randint(64, 10**6), chance.randint(1, 500)
        walked = sum(model.step_s + model.decode_step_s(seqs, kv + seqs * i) for i in range(steps))
        assert model.decode_run_s(steps, seqs, kv) == pytest.approx(walked)


def test_an_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="no preset 'h300'; known are h200-deepseek-r1"):
        preset("h300")
