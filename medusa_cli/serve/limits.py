"""What a server allows and asks for."""

from dataclasses import dataclass

MEGA = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Sizes in tokens unless said; temperature is of requests that name none; body_s: seconds a body may take."""

    name: str
    api_key: str | None = None
    slots: int = 8
    waiting: int = 64
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 2048
    max_body: int = MEGA  # bytes
    body_s: float = 20.0
    temperature: float = 0.0
