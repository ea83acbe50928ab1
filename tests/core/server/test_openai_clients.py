"""The official OpenAI clients, for Python and for Node, against the gateway: streamed and not, with tools.

The npm package is installed once into a cache outside the repository (`APPRENTICE_TEST_CACHE`, else ~/.cache/apprentice-tests).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from filelock import FileLock
from openai import OpenAI
from pydantic import BaseModel
from support.small_registry import BASE_NAME, POLICY, SmallServer, small_server
from support.tiny_models import tiny_tokenizer

from apprentice.core.engines.protocol import PolicyVersion
from apprentice.core.records import SamplingParams

NPM_PACKAGE = "openai@7"
KEY = "a-long-enough-key-0123456789"
TEXT = "It is sunny in Paris ☀"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def agent_like(prompt_ids: Sequence[int], sampling: SamplingParams, policy: PolicyVersion) -> list[int]:
    """Calls the tool if the prompt offers one and has no result yet; asked for JSON, gives JSON; else says the text."""
    prompt = TOKENIZER.decode(list(prompt_ids))
    if "JSON" in prompt and "schema" in prompt and "weather" not in prompt.split("schema")[0]:
        reply = '{"city": "Paris", "sunny": true}'
    else:
        reply = CALL if '"weather"' in prompt and "22 degrees" not in prompt else TEXT
    return [*TOKENIZER.encode(reply, add_special_tokens=False), TOKENIZER.eos_token_id]


TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    with small_server(tmp_path_factory.mktemp("clients"), agent_like, key=KEY) as running:
        yield running


@pytest.fixture
def client(server: SmallServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/t/python/v1", api_key=KEY, max_retries=0) as running:
        yield running


def test_python_gets_a_reply_with_everything_that_openai_promises(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=POLICY, messages=HI, logprobs=True, top_logprobs=1, n=2, seed=1)
    assert [choice.message.content for choice in reply.choices] == [TEXT, TEXT]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).startswith(TEXT.encode())
    extras: Any = reply.model_extra
    assert extras["policy_version"] == 0


def test_python_streams(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=POLICY, messages=HI, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_python_runs_a_tool_and_sends_the_result_back(client: OpenAI, server: SmallServer, stream: bool) -> None:
    trajectory = f"python-tools-{stream}".lower()
    client = client.with_options(base_url=f"{server.url}/t/{trajectory}/v1")
    messages = list(HI)
    if stream:
        with client.chat.completions.stream(model=POLICY, messages=messages, tools=[TOOL]) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model=POLICY, messages=messages, tools=[TOOL], tool_choice="auto").choices[0].message
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}]
    final = client.chat.completions.create(model=POLICY, messages=messages, tools=[TOOL])
    assert final.choices[0].message.content == TEXT
    first, second = server.ledger.completions(trajectory)
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.token_ids)] == first.prompt_ids + first.token_ids
    assert second.parent == first.id


class Weather(BaseModel):
    city: str
    sunny: bool


def test_python_parses_structured_output(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(model=POLICY, messages=[{"role": "user", "content": "hi"}], response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Paris", sunny=True)


def test_python_completes_token_ids(client: OpenAI) -> None:
    reply = client.completions.create(model=POLICY, prompt=[5, 6, 7], max_tokens=4, logprobs=1, extra_body={"return_token_ids": True})
    extras: Any = reply.model_extra
    assert extras["prompt_token_ids"] == [5, 6, 7]
    assert reply.choices[0].finish_reason == "length"
    streamed = client.completions.create(model=POLICY, prompt="hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == TEXT


def test_python_lists_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [POLICY, BASE_NAME]
    assert client.models.retrieve(POLICY).owned_by == "apprentice"


def test_python_raises_openai_s_own_errors(client: OpenAI, server: SmallServer) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=HI)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=POLICY, messages=HI, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=POLICY, messages=[{"role": "user", "content": "x" * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="not-the-key-of-this-server").models.list()
    server.ledger.finish_trajectory("python")
    server.http.post("/api/trajectories/python/finish", json={}, headers={"authorization": f"Bearer {KEY}"})
    with pytest.raises(openai.ConflictError):
        client.chat.completions.create(model=POLICY, messages=HI)


SCRIPT = """
import assert from "node:assert/strict";
import OpenAI from "openai";

const { url, key, model, text, tool } = JSON.parse(process.env.CASE);
const client = new OpenAI({ baseURL: `${url}/t/node/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];

const reply = await client.chat.completions.create({ model, messages });
assert.equal(reply.choices[0].message.content, text);
assert.equal(reply.choices[0].finish_reason, "stop");
assert.equal(reply.policy_version, 0);

let streamed = "", usage = null;
const stream = await client.chat.completions.create({ model, messages, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.ok(usage.completion_tokens > 0);

const run = async (first) => {
  const call = first.tool_calls[0];
  assert.equal(call.function.name, "weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  const history = [...messages, first, { role: "tool", tool_call_id: call.id, content: "22 degrees" }];
  const last = await client.chat.completions.create({ model, messages: history, tools: [tool] });
  assert.equal(last.choices[0].message.content, text);
};
const called = await client.chat.completions.create({ model, messages, tools: [tool] });
assert.equal(called.choices[0].finish_reason, "tool_calls");
await run(called.choices[0].message);
const runner = client.chat.completions.stream({ model, messages, tools: [tool] });
const { role, content, tool_calls } = await runner.finalMessage();
await run({ role, content, tool_calls });

const completion = await client.completions.create({ model, prompt: [5, 6, 7] });
assert.equal(completion.choices[0].text, text);
const listed = [];
for await (const entry of await client.models.list()) listed.push(entry.id);
assert.ok(listed.includes(model));
assert.equal((await client.models.retrieve("tiny")).id, "tiny");

await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  return true;
});
await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (error) => error.param === "temperature");

const aborting = await client.chat.completions.create({ model, messages, stream: true });
for await (const chunk of aborting) break;
console.log("all of it works");
"""


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """A folder with the npm client installed; made once."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are needed for the npm client")
    cache = Path(os.environ.get("APPRENTICE_TEST_CACHE", Path.home() / ".cache" / "apprentice-tests"))
    folder = cache / NPM_PACKAGE.replace("@", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "npm.lock"):
        if not (folder / "node_modules" / "openai" / "package.json").exists():
            (folder / "package.json").write_text('{"private": true, "type": "module"}')
            subprocess.run(["npm", "install", "--no-audit", "--no-fund", NPM_PACKAGE], cwd=folder, check=True, timeout=240)
    return folder


def test_the_npm_client_works_streamed_and_not_with_tools(server: SmallServer, node_folder: Path) -> None:
    script = node_folder / f"case-{os.getpid()}.mjs"
    script.write_text(SCRIPT)
    case = {"url": server.url, "key": KEY, "model": POLICY, "text": TEXT, "tool": TOOL}
    try:
        done = subprocess.run(
            ["node", str(script)], env={**os.environ, "CASE": json.dumps(case)}, capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        script.unlink()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all of it works"
    recorded = server.ledger.completions("node")
    assert {completion.policy for completion in recorded} == {POLICY}
    assert sum("tool_calls" in completion.message for completion in recorded) == 2
