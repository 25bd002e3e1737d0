"""PURE. What the HTTP edge needs to know, frozen and checked once at start."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AppSettings(BaseModel):
    """Settings of one HTTP application. The dispatcher, the replicas and the server have their own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    served_model_names: tuple[str, ...] = Field(
        min_length=1, description="Names clients may ask for; the first is the default."
    )
    max_model_len: int = Field(ge=2, description="Longest prompt + output in tokens.")
    vocab_size: int = Field(ge=1, description="Rows of the model's embedding: token ids are below it.")
    api_keys: tuple[str, ...] = Field(
        (), description="Bearer keys; any of them opens the API. Empty: no key is asked for."
    )
    cors_allow_origins: tuple[str, ...] = Field(
        ("*",), description="Origins whose pages may call; empty: no CORS headers."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Longest request body; longer ones are answered 413.")
    max_prompts: int = Field(1024, ge=1, description="Most prompts in one completion request.")
    max_n: int = Field(128, ge=1, description="Most samples of one prompt.")
    max_sequences: int = Field(1024, ge=1, description="Most sequences (prompts x n) of one request.")
    default_temperature: float = Field(1.0, ge=0, le=2, description="Temperature where the request names none.")
    default_top_p: float = Field(1.0, gt=0, le=1, description="top_p where the request names none.")
    default_top_k: int = Field(0, ge=0, description="top_k where the request names none; 0: off.")
    default_min_p: float = Field(0.0, ge=0, le=1, description="min_p where the request names none.")
    default_repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="repetition_penalty where the request names none; 1: off."
    )
    policy: Literal["fcfs", "priority", "sjf"] = Field(
        "fcfs", description="The replicas' order of waiting requests; a priority is refused unless it is 'priority'."
    )
    default_max_tokens: int = Field(
        16, ge=1, description="Output tokens of a completion that names no limit, as OpenAI does."
    )
    on_loop_max_bytes: int = Field(
        4096,
        ge=0,
        description="Bodies up to this length are parsed and tokenized on the event loop; longer ones in a thread.",
    )
    num_tokenizer_threads: int = Field(2, ge=1, description="Threads for long bodies.")
    max_pending_body_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Most bytes of long bodies that are read, wait for a thread or are in one; more are answered 503.",
    )
    body_timeout_s: float = Field(60.0, gt=0, description="How long a body may take to arrive; then 408.")
    admin_endpoints: bool = Field(
        False, description="Whether POST /reset_prefix_cache and GET /debug/requests are there."
    )
    metrics_prefix: str = Field("vllm:", description="In front of metric names; vLLM's, so that its dashboards work.")
    router_name: str = Field("", description="Label `router` of every metric of this process.")
    set_request_id_header: bool = Field(True, description="Off under Ray Serve, whose proxy adds X-Request-Id itself.")
    version: str = Field("unknown", description="What /version says.")

    @model_validator(mode="after")
    def _names_and_keys_are_not_empty(self) -> AppSettings:
        if not all(self.served_model_names):
            raise ValueError("served_model_names holds an empty name")
        if not all(self.api_keys):
            raise ValueError("api_keys holds an empty key, which would let everybody in")
        return self
