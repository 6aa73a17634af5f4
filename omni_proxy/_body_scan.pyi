from msgspec import Raw

def scan(
    body: bytes, prompt: str, of_messages: bool, raw: type[Raw]
) -> tuple[dict[str, Raw], int, int, bool] | None: ...
