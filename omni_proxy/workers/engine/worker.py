"""One worker process: an engine and its HTTP server, from options to exit code.

`run_worker` is what the command line calls. It binds the port first, so that a port in use is known at once, then
loads the model, then serves (`worker_life`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import prometheus_client
import uvloop

from omni_proxy.gguf.file import GgufError
from omni_proxy.gguf.folder import model_folder, model_name
from omni_proxy.prompts.chat_template import ChatTemplateError, load_chat_template
from omni_proxy.prompts.text_tokenizer import TokenizerError
from omni_proxy.workers.engine.calls import CallBuilder
from omni_proxy.workers.engine.model_card import ModelCard, load_defaults
from omni_proxy.workers.engine.text import ModelTokenizer
from omni_proxy.workers.engine.worker_life import EXIT_FORCED, EXIT_OK, LauncherWatch, WorkerLife
from omni_proxy.workers.engine.worker_options import WorkerOptions

if TYPE_CHECKING:
    from omni_proxy.workers.engine.engine import Engine

EXIT_BAD_START: Final = 2
_log = logging.getLogger(__name__)
_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class StartError(Exception):
    """The worker cannot start; the text is the one line that its user reads."""


def run_worker(options: WorkerOptions) -> int:
    """Serve until told to stop. Returns the exit code: 0 drained, 1 forced, 2 could not start (one line on stderr)."""
    problem = options.problem()
    if problem is not None:
        return _cannot_start(problem)
    _prepare_process(options)
    launcher = LauncherWatch(options.parent_fd)
    try:
        with _bound(options.host, options.port) as sock:
            with _uncollected():
                engine, builder = _load(options)
            return _serve(options, sock, engine, builder, launcher)
    except StartError as exc:
        return _cannot_start(str(exc))


def _cannot_start(reason: str) -> int:
    sys.stderr.write(f"omni-proxy worker: {' '.join(reason.split())}\n")
    return EXIT_BAD_START


def _end_on_signals(code: int) -> None:
    """While no loop handles them, signals end the process: there is nobody to drain for."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(code))


def _prepare_process(options: WorkerOptions) -> None:
    """What must be set before torch and the tokenizers library start their threads, and before anything can wait."""
    _end_on_signals(EXIT_OK)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


@contextmanager
def _uncollected() -> Iterator[None]:
    """What is made meanwhile stays for good: collecting it would slow down the start, each full collection, the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """The bound socket; it refuses connections until the server listens on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, OverflowError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            raise StartError(f"cannot listen on {host}:{port}: {reason}") from exc
        yield sock


def _load(options: WorkerOptions) -> tuple[Engine, CallBuilder]:
    """Load tokenizer, template and model; raises StartError. Torch is first imported here."""
    named = Path(options.model)
    try:
        folder = model_folder(named)
        name = model_name(named)
    except GgufError as exc:
        raise StartError(str(exc)) from exc
    if not folder.is_dir():
        raise StartError(f"{options.model}: no such model folder")
    try:
        tokenizer = ModelTokenizer.load(folder)
        template = load_chat_template(folder)
    except (TokenizerError, ChatTemplateError) as exc:
        raise StartError(str(exc)) from exc
    engine = _load_engine(replace(options, model=str(folder)))
    card = ModelCard(
        names=options.served_model_name or (name,),
        root=options.model,
        max_model_len=engine.info.max_model_len,
        vocab_size=engine.info.vocab_size,
        created=int(time.time()),
        defaults=load_defaults(folder),
        eos_token_ids=engine.info.eos_token_ids,
    )
    return engine, CallBuilder(card, tokenizer, template, options.role)


def _load_engine(options: WorkerOptions) -> Engine:
    # Here, because importing torch takes longer than everything else, and a bad option should be known before.
    from omni_proxy.workers.engine.engine import Engine

    engine_id = f"{options.role}-{options.host}-{os.getpid()}"
    try:
        return Engine(options.engine_config(engine_id))
    except (ValueError, OSError, RuntimeError, MemoryError) as exc:  # a bad checkpoint, port, or too little memory
        _log.debug("the engine cannot start", exc_info=True)
        raise StartError(str(exc) or type(exc).__name__) from exc


def _serve(
    options: WorkerOptions,
    sock: socket.socket,
    engine: Engine,
    builder: CallBuilder,
    launcher: LauncherWatch,
) -> int:
    engine.start()
    try:
        life = WorkerLife(options, engine, builder, launcher)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(life.run(sock))
    finally:
        _end_on_signals(EXIT_FORCED)
        builder.close()
        engine.stop()
