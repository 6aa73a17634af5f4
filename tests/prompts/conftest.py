from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.server.conftest import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a chat template, and nothing else."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    return folder
