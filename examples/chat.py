"""Talk to a running cluster with the official OpenAI client: `python -m examples.chat "What is the capital of
France?"`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import openai


def ask(
    base_url: str,
    question: str,
    model: str,
    api_key: str = "none",
    max_tokens: int = 64,
    on_first_token: Callable[[], object] = lambda: None,
) -> str:
    """Stream the answer to the terminal and return it."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    answer = ""
    for chunk in stream:
        text = chunk.choices[0].delta.content or "" if chunk.choices else ""
        if text and not answer:
            on_first_token()
        print(text, end="", flush=True)
        answer += text
    print()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    try:
        ask(options.base_url, options.question, options.model, options.api_key)
    except openai.OpenAIError as error:
        raise SystemExit(f"{options.base_url}: {error}") from None


if __name__ == "__main__":
    main()
