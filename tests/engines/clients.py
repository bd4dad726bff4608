"""Runs the clients of Anthropic and Ollama, and Claude Code, against `medusa serve`; prints one line each.

clients.py URL MODEL [CLAUDE]: in an environment with the packages anthropic and ollama. CLAUDE: the program `claude`
of the npm package @anthropic-ai/claude-code, which is run with a home of its own.
"""

import os
import subprocess
import sys
import tempfile
from typing import Any

import anthropic
import ollama

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "Tells the weather", "input_schema": SCHEMA}
FUNCTION = {"name": "weather", "description": "Tells the weather", "parameters": SCHEMA}
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo? Use the tool."}]


def check_anthropic(url: str, model: str) -> str:
    """Checks a whole turn with a tool and its result, whole and streamed, the token count and an error."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: Any = {"model": model, "max_tokens": 60, "messages": ASK, "tools": [TOOL]}
    forced = {**asked, "tool_choice": {"type": "tool", "name": "weather"}}
    whole = client.messages.create(**forced)
    with client.messages.stream(**forced) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        [call] = message.content
        assert message.stop_reason == "tool_use", message
        assert call.type == "tool_use", message
        assert isinstance(call.input["city"], str), message
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 5 degrees"}
    turns = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(**{**asked, "messages": [*ASK, *turns]}) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason in ("end_turn", "max_tokens", "tool_use")
    counted = client.messages.count_tokens(model=model, messages=ASK, tools=[TOOL])
    assert counted.input_tokens > 0
    try:
        client.messages.create(model="none", max_tokens=1, messages=ASK)
    except anthropic.NotFoundError as reason:
        assert reason.type == "not_found_error", reason
    else:
        raise AssertionError("another model was accepted")
    return f"anthropic {anthropic.__version__}: {call.input}, then {text!r}"


def check_ollama(url: str, model: str) -> str:
    """Checks chats, whole and streamed, a form, a text in the middle, and the model's description."""
    client = ollama.Client(host=url)
    options = {"num_predict": 40, "temperature": 0}
    asked: Any = {"model": model, "messages": ASK, "options": options}
    whole = client.chat(**asked)
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    called = client.chat(**asked, tools=[{"type": "function", "function": FUNCTION}])
    formed = client.chat(**asked, format=SCHEMA)
    assert '"city"' in (formed.message.content or ""), formed
    assert [entry.model for entry in client.list().models] == [model]
    shown = client.show(model)
    if "insert" in (shown.capabilities or ()):
        middle = client.generate(model, "def add(a, b):\n", suffix="\n", options=options)
        assert middle.response, middle
    return f"ollama: {whole.message.content!r}, calls {called.message.tool_calls}"


def check_claude(url: str, model: str, program: str) -> str:
    """Checks one turn of Claude Code."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "60",
            "API_TIMEOUT_MS": "3000000",
        }
        words = ["-p", "Say hello.", "--output-format", "json", "--max-turns", "1"]
        words += ["--system-prompt", "You are brief.", "--tools", "Read"]
        done = subprocess.run(
            [program, *words], env=environment, cwd=home, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return f"claude: {done.stdout.strip()}"


if __name__ == "__main__":
    address, name, *program = sys.argv[1:]
    print(check_anthropic(address, name))
    print(check_ollama(address, name))
    for path in program:
        print(check_claude(address, name, path))
