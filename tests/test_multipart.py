"""The model's name in a form: found where it is a field, and changed there only."""

from __future__ import annotations

import time

import pytest

from omni_proxy.call import INTERNAL_FIELDS
from omni_proxy.internals import internal_in_form
from omni_proxy.multipart import BadForm, fields_in_form, form_with_model, model_in_form

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


TYPE = b"multipart/form-data; boundary=b"


def part(disposition: str, value: bytes = b"evil", more: str = "") -> bytes:
    return f"--b\r\nContent-Disposition: form-data; {disposition}\r\n{more}\r\n".encode() + value + b"\r\n"


def test_fields_are_named_with_their_values() -> None:
    body = b"preamble\r\n" + MODEL + FILE + part("name=plain", b"1") + END
    found = {name: body[start:end].strip() for name, start, end in fields_in_form(body, TYPE)}
    assert found == {"model": b"whisper", "file": b'name="model"', "plain": b"1"}


@pytest.mark.parametrize(
    "forged",
    [
        part('name="kv_transfer_params"'),
        part("name=kv_transfer_params"),
        part('NAME="kv_transfer_params"'),
        part('name="a"; name="kv_transfer_params"'),
        part('filename="x"; name="kv_transfer_params"'),
        part('name="kv_transfer_params[remote_host]"'),
        part('name="kv_transfer_params.remote_host"'),
        part("name*=utf-8''kv%5Ftransfer_params"),
        part('name*0="kv_transfer"; name*1="_params"'),
        part('name="kv_transfer\\_params"'),
        part('name="bootstrap_room"', more="X-Other: 1\r\n"),
        part('filename="x";\r\n name="rid"'),
        part('name="x"', more='content-disposition: form-data; name="rid"\r\n'),
        part('name="rid"').replace(b"\r\n", b"\n"),
        b'--b\r\nX: y\r\ncontent-disposition : form-data; name="routed_dp_rank"\r\n\r\n1\r\n',
        part('name="extra_body"', b'{"a": [{"kv_transfer_params": {}}]}'),
        part('name="vllm_xargs"', b'{"kv\\u005ftransfer_params": {}}'),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_what_is_internal_is_found_however_it_is_written(forged: bytes, last: bool) -> None:
    whole = MODEL + FILE + forged + END if last else forged + MODEL + FILE + END
    assert internal_in_form(whole, TYPE, INTERNAL_FIELDS) is not None


@pytest.mark.parametrize(
    "own",
    [
        part('name="prompt"', b"kv_transfer_params"),
        part('name="file"; filename="kv_transfer_params"', b'name="kv_transfer_params"'),
        part('name="bird"'),
        part('name="extra_body"', b'{"temperature": 0}'),
        part('name="extra_body"', b"kv_transfer_params"),
        part('name="timestamp_granularities[]"', b"word"),
    ],
)
def test_what_is_the_clients_own_is_not_refused(own: bytes) -> None:
    assert internal_in_form(MODEL + own + END, TYPE, INTERNAL_FIELDS) is None


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (MODEL + END, b"multipart/form-data"),
        (MODEL + END, b'multipart/form-data; boundary=""'),
        (MODEL + END, b"multipart/form-data; boundary=b; boundary=c"),
        (b'--b\r\nContent-Disposition: form-data; name="a"', TYPE),
        (b"--b\r\nX: " + b"y" * 10_000 + b"\r\n\r\n1\r\n" + END, TYPE),
    ],
)
def test_a_form_that_can_be_read_in_two_ways_is_refused(body: bytes, content_type: bytes) -> None:
    with pytest.raises(BadForm):
        internal_in_form(body, content_type, INTERNAL_FIELDS)


def test_many_parts_take_no_time() -> None:
    body = b"".join([b"--b\r\n\r\n"] * 100_000) + END
    began = time.process_time()
    assert internal_in_form(body, TYPE, INTERNAL_FIELDS) is None
    assert time.process_time() - began < 10.0
