"""The model's name in a form: found where it is a field, and changed there only."""

from __future__ import annotations

import time

import pytest

from omni_proxy.multipart import form_with_model, model_in_form

FILE = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\nContent-Type: audio/wav\r\n\r\n'
    b'name="model"\r\n'
)
MODEL = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
END = b"--b--\r\n"


@pytest.mark.parametrize("body", [MODEL + END, MODEL + FILE + END, FILE + MODEL + END, MODEL.lower() + END])
def test_a_model_is_found_and_changed(body: bytes) -> None:
    assert model_in_form(body) == "whisper"
    assert form_with_model(body, "big/x") == body.replace(b"whisper", b"big/x")


@pytest.mark.parametrize("body", [b"", END, FILE + END, b'name="model"', MODEL[:40], MODEL[:-4], b"\r\n\r\n" * 4])
def test_what_has_no_such_field_stays(body: bytes) -> None:
    assert model_in_form(body) == ""
    assert form_with_model(body, "x") == body


@pytest.mark.parametrize(
    "words", [b'name="model"', b'\ncontent-disposition: name="model"', b'\nx; name="model"\r\n\r\n']
)
def test_a_file_full_of_such_words_takes_no_time(words: bytes) -> None:
    began = time.process_time()
    model_in_form(words * 100_000)
    assert time.process_time() - began < 1.0
