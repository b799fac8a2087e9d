"""What `serve` prints so that a person can paste it: a curl and a Python snippet that work against this listener."""

from __future__ import annotations


def curl(url: str, model: str, *, key: bool) -> str:
    """One streaming chat Call."""
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if key else ""
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} -d '{body}'"


def python(url: str, model: str, *, key: bool) -> str:
    """The same with the official client (`pip install openai`)."""
    api_key = "YOUR_KEY" if key else "none-needed"
    return "\n".join(
        (
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}/v1", api_key="{api_key}")',
            'messages = [{"role": "user", "content": "Hello"}]',
            f'answer = client.chat.completions.create(model="{model}", messages=messages)',
            "print(answer.choices[0].message.content)",
        )
    )
