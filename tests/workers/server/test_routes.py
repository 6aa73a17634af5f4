"""The small routes: models, health, load, tokenizing, metrics."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_proxy import __version__
from tests.workers.server.fake import FakeEngine, LiveServer


def test_models_are_listed_under_every_name(http: httpx.Client) -> None:
    models = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "alias"]
    assert {model["max_model_len"] for model in models} == {128}


def test_any_name_or_none_is_served(engine: FakeEngine, http: httpx.Client) -> None:
    names = [
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **model}).json()["model"]
        for model in ({}, {"model": None}, {"model": "alias"})
    ]
    assert names == ["tiny", "tiny", "alias"]


def test_health_version_and_load(http: httpx.Client) -> None:
    health = http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/load").json() == {"server_load": 0}
    assert http.post("/reset_prefix_cache").json() == {"success": True}


def test_tokenize_and_back(live: LiveServer, http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "the cat 🙂", "return_token_strs": True}).json()
    assert answer["tokens"] == live.tokenizer.encode("the cat 🙂", True)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
    assert answer["token_strs"][0] == live.tokenizer.token_text(answer["tokens"][0])
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "the cat 🙂"}


def test_chats_are_tokenized_as_they_are_served(engine: FakeEngine, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert list(engine.submitted[0].prompt_token_ids) == tokens


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}])
def test_tokenize_wants_one_of_two(http: httpx.Client, body: dict[str, object]) -> None:
    assert http.post("/tokenize", json=body).status_code == 400


def test_long_texts_are_tokenized_beside_the_loop(live: LiveServer, http: httpx.Client) -> None:
    text = "the cat sat " * 300
    assert http.post("/tokenize", json={"prompt": text}).json()["tokens"] == live.tokenizer.encode(text, True)


def test_metrics_have_the_names_of_vllm(own_server: LiveServer) -> None:
    engine = own_server.engine
    assert isinstance(engine, FakeEngine)
    with httpx.Client(base_url=own_server.url, timeout=5, trust_env=False) as http:
        http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True})
        http.post("/v1/completions", json={"prompt": [5], "max_tokens": 9, "stop_token_ids": [5]})
        text, experts = http.get("/metrics").text, http.get("/omni/experts").json()
    names = {"model_name": "tiny", "engine": "0"}
    found = {
        (sample.name, *sorted((k, v) for k, v in sample.labels.items() if k not in names)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["vllm:num_requests_running",] == 0
    assert found["vllm:num_requests_waiting",] == 0
    assert found["vllm:kv_cache_usage_perc",] == 0.25
    assert found["vllm:prefix_cache_queries_total",] == 7
    assert found["vllm:prefix_cache_hits_total",] == 3
    assert found["vllm:prompt_tokens_total",] == 4 + 3 + 5
    assert found["vllm:generation_tokens_total",] == 4
    assert found["vllm:prompt_tokens_by_source_total", ("source", "local_compute")] == 4
    assert found["vllm:prompt_tokens_by_source_total", ("source", "local_cache_hit")] == 3
    assert found["vllm:prompt_tokens_by_source_total", ("source", "external_kv_transfer")] == 5
    assert found["vllm:request_success_total", ("finished_reason", "length")] == 1
    assert found["vllm:request_success_total", ("finished_reason", "stop")] == 1
    assert found["vllm:request_success_total", ("finished_reason", "abort")] == 0
    assert found["vllm:num_preemptions_total",] == 2
    assert found["vllm:time_to_first_token_seconds_count",] == 2
    assert found["vllm:time_per_output_token_seconds_count",] == 2
    assert found["vllm:e2e_request_latency_seconds_count",] == 2
    assert found["vllm:cache_config_info", ("block_size", "4"), ("num_gpu_blocks", "64")] == 1
    assert found["vllm:nixl_bytes_transferred_sum",] == 2048
    assert found["vllm:nixl_num_failed_transfers_total",] == 1
    assert found["omni_kv_bytes_sent_total",] == 1024
    assert found["omni_kv_bytes_received_total",] == 2048
    assert found["omni_kv_blocks_leased",] == 0
    assert found["omni_expert_tokens_total", ("expert", "1"), ("layer", "0")] == 2
    assert experts == {"tokens": [[1, 2], [3, 4]], "imbalance": []}


def test_leaving_clients_are_counted_as_aborted(own_server: LiveServer) -> None:
    engine = own_server.engine
    assert isinstance(engine, FakeEngine)
    engine.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(own_server.url + "/v1/completions", json={"prompt": "a"}, timeout=0.2, trust_env=False)
    text = ""
    while 'finished_reason="abort",model_name="tiny"} 1.0' not in text:
        text = httpx.get(own_server.url + "/metrics", trust_env=False).text


def test_sleep_and_wake_up(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/sleep?level=1").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.get("/health").status_code == 200
    assert http.post("/wake_up").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    refused = http.post("/sleep?level=2")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")


def test_latencies_and_sizes_are_told_under_vllm_s_names(http: httpx.Client) -> None:
    def counts() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {s.name: s.value for f in families for s in f.samples if s.name.endswith("_count")}

    before = counts()
    assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5}).status_code == 200
    rise = {name: value - before[name] for name, value in counts().items()}
    once = (
        "time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "e2e_request_latency_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_time_per_output_token_seconds",
    )  # fmt: skip
    assert {name: rise[f"vllm:{name}_count"] for name in once} == dict.fromkeys(once, 1)
    assert rise["vllm:inter_token_latency_seconds_count"] == 4
