"""Directives that have no setting of ours, and why. Pure: a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_proxy.import_nginx.notes import Fate

_U, _C, _L = Fate.UNNEEDED, Fate.CHANGED, Fate.LOST

_ACCESS: Final = "access control; keep it in front of the gateway"
_FILES: Final = "the gateway serves no files and rewrites no paths"
_KERNEL: Final = "always on where it helps"
_LIMIT: Final = "rates are not limited per client; limits.max_waiting_requests bounds the queue"
_CACHE: Final = "answers are not cached; what is reused is the KV cache of prompts (kv_cache_policy)"
_PROCESS: Final = "the service manager's business (systemd, Docker, Kubernetes)"

REASONS: Final[Mapping[str, tuple[Fate, str]]] = {
    # main and events
    "user": (_U, _PROCESS),
    "pid": (_U, _PROCESS),
    "daemon": (_U, _PROCESS),
    "master_process": (_U, _PROCESS),
    "worker_rlimit_nofile": (_U, _PROCESS),
    "worker_priority": (_U, _PROCESS),
    "worker_cpu_affinity": (_U, _PROCESS),
    "events": (_U, "connections are bounded by file descriptors only"),
    "load_module": (_L, "there are no modules"),
    "stream": (_L, "the gateway speaks HTTP only"),
    "mail": (_L, "the gateway speaks HTTP only"),
    "error_log": (_U, "messages go to standard error; --log-level says how many"),
    # http
    "types": (_U, "workers name the type of their answers"),
    "default_type": (_U, "workers name the type of their answers"),
    "charset": (_U, "workers name the type of their answers"),
    "sendfile": (_U, _KERNEL),
    "tcp_nopush": (_U, _KERNEL),
    "tcp_nodelay": (_U, _KERNEL),
    "aio": (_U, _KERNEL),
    "server_tokens": (_U, "no Server header is sent"),
    "server_name": (_U, "every host name is answered"),
    "server_names_hash_bucket_size": (_U, "every host name is answered"),
    "types_hash_max_size": (_U, "there is no such table"),
    "client_header_timeout": (_C, "timeouts.client_body_s bounds the reading of a whole request"),
    "client_header_buffer_size": (_U, "buffers grow as needed, within fixed bounds"),
    "large_client_header_buffers": (_U, "buffers grow as needed, within fixed bounds"),
    "client_body_buffer_size": (_U, "bodies are held in memory up to limits.client_max_body_bytes"),
    "client_body_temp_path": (_U, "bodies are held in memory up to limits.client_max_body_bytes"),
    "reset_timedout_connection": (_U, "a client that does not read is reset"),
    "keepalive_requests": (_U, "a connection may carry any number of requests"),
    "resolver": (_U, "names are resolved by the system whenever a connection is opened"),
    "resolver_timeout": (_U, "timeouts.connect_s includes the resolving of names"),
    "map": (_L, "there are no variables"),
    "geo": (_L, "there are no variables"),
    "split_clients": (_L, "there are no variables; weights split the load of workers"),
    "set": (_L, "there are no variables"),
    "if": (_L, "there are no conditions"),
    "http2": (_L, "clients are served HTTP/1.1"),
    "http3": (_L, "clients are served HTTP/1.1"),
    # balancing
    "least_conn": (_U, "work is placed by outstanding tokens, which says more than connections"),
    "least_time": (_U, "work is placed by outstanding tokens"),
    "random": (_U, "work is placed by outstanding tokens"),
    "ip_hash": (_C, "requests go where their prefix is in the KV cache, whoever sends them (kv_cache_policy: apc)"),
    "hash": (_C, "requests go where their prefix is in the KV cache (kv_cache_policy: apc)"),
    "sticky": (_C, "requests go where their prefix is in the KV cache (kv_cache_policy: apc)"),
    "zone": (_U, "one scheduler counts for all processes"),
    "queue": (_C, "requests always wait for a free worker: limits.max_waiting_requests, limits.queue_timeout_s"),
    "keepalive_time": (_U, "connections to workers live until they are idle for keepalive.idle_s"),
    "health_check": (_C, "workers are probed at /health: health.interval_s, health.failures_down"),
    # proxying
    "proxy_http_version": (_U, "workers are always spoken to in HTTP/1.1"),
    "proxy_request_buffering": (_U, "a body is read whole, then sent at once"),
    "proxy_buffer_size": (_U, "buffers grow as needed, within fixed bounds"),
    "proxy_buffers": (_U, "buffers grow as needed, within fixed bounds"),
    "proxy_busy_buffers_size": (_U, "buffers grow as needed, within fixed bounds"),
    "proxy_max_temp_file_size": (_U, "nothing is written to files"),
    "proxy_temp_path": (_U, "nothing is written to files"),
    "proxy_send_timeout": (_U, "timeouts.first_byte_s includes the sending"),
    "proxy_socket_keepalive": (_U, "a dead connection is found by the time limits and the probes"),
    "proxy_redirect": (_U, "workers do not redirect"),
    "proxy_pass_request_headers": (_U, "headers go on, without those of the connection"),
    "proxy_pass_request_body": (_U, "the body goes on"),
    "proxy_ignore_client_abort": (_C, "a request whose client leaves is always ended at its workers"),
    "proxy_next_upstream_timeout": (_C, "retries are bounded by their number and by limits.queue_timeout_s"),
    "proxy_cache": (_L, _CACHE),
    "proxy_cache_path": (_L, _CACHE),
    "proxy_cache_valid": (_L, _CACHE),
    "proxy_cache_bypass": (_U, _CACHE),
    "proxy_no_cache": (_U, _CACHE),
    "proxy_hide_header": (_L, "headers of workers go on, without those of the connection"),
    "proxy_pass_header": (_U, "headers of workers go on, without those of the connection"),
    "proxy_intercept_errors": (_L, "error answers of workers go on as they are"),
    "proxy_ssl_protocols": (_U, "TLS 1.2 and above"),
    "proxy_ssl_ciphers": (_L, "the ciphers are those of the system's OpenSSL"),
    "proxy_ssl_session_reuse": (_U, "connections are kept instead"),
    "proxy_ssl_verify_depth": (_U, "chains may have any length"),
    "proxy_ssl_server_name": (_U, "the name is always sent"),
    "proxy_ssl_password_file": (_L, "keys must not be encrypted"),
    "proxy_ssl_crl": (_L, "revocation lists are not read"),
    "grpc_pass": (_L, "the gateway speaks HTTP/1.1 to workers"),
    "chunked_transfer_encoding": (_U, "streams are chunked for HTTP/1.1 clients"),
    "add_header": (_L, "headers are not added to answers"),
    "gzip": (_L, "answers go out as the workers send them"),
    "expires": (_L, "headers are not added to answers"),
    # TLS
    "ssl_protocols": (_U, "TLS 1.2 and above"),
    "ssl_ciphers": (_L, "the ciphers are those of the system's OpenSSL"),
    "ssl_prefer_server_ciphers": (_U, "the ciphers are those of the system's OpenSSL"),
    "ssl_session_cache": (_U, "sessions are resumed by tickets"),
    "ssl_session_timeout": (_U, "sessions are resumed by tickets"),
    "ssl_session_tickets": (_U, "sessions are resumed by tickets"),
    "ssl_dhparam": (_U, "keys are exchanged over elliptic curves"),
    "ssl_stapling": (_L, "OCSP answers are not stapled"),
    "ssl_stapling_verify": (_L, "OCSP answers are not stapled"),
    "ssl_password_file": (_L, "keys must not be encrypted"),
    "ssl_crl": (_L, "revocation lists are not read"),
    "ssl_verify_depth": (_U, "chains may have any length"),
    # access and files
    "allow": (_L, _ACCESS),
    "deny": (_L, _ACCESS),
    "auth_basic": (_L, _ACCESS),
    "auth_basic_user_file": (_L, _ACCESS),
    "auth_request": (_L, _ACCESS),
    "auth_jwt": (_L, _ACCESS),
    "satisfy": (_L, _ACCESS),
    "limit_except": (_L, _ACCESS),
    "limit_req": (_L, _LIMIT),
    "limit_req_zone": (_L, _LIMIT),
    "limit_conn": (_L, _LIMIT),
    "limit_conn_zone": (_L, _LIMIT),
    "limit_rate": (_L, "answers are not slowed down"),
    "real_ip_header": (_L, "the access log names the connection's address; X-Forwarded-For goes on to workers"),
    "set_real_ip_from": (_L, "the access log names the connection's address; X-Forwarded-For goes on to workers"),
    "root": (_L, _FILES),
    "alias": (_L, _FILES),
    "index": (_L, _FILES),
    "try_files": (_L, _FILES),
    "error_page": (_L, "errors have the shape of OpenAI's API"),
    "return": (_L, _FILES),
    "rewrite": (_L, _FILES),
    "stub_status": (_C, "GET /metrics and GET /omni/workers"),
}


def reason_of(name: str) -> tuple[Fate, str]:
    """What becomes of a directive that has no setting of ours."""
    found = REASONS.get(name)
    if found is None and name.startswith("gzip_"):
        found = REASONS["gzip"]
    return found or (Fate.LOST, "has no counterpart")
