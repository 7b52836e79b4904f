#!/usr/bin/env python3
"""Checks a running server with the `openai` package: models, plain and streamed answers, 32 clients at once, errors.

    pip install openai
    python3 bench/openai_client_check.py http://127.0.0.1:8080

Prints one line a check and exits with 1 when one fails. Needs no particular model: texts are not judged, but a greedy answer
must be the same plain and streamed.
"""
import argparse
import asyncio
import sys
import time

import openai

FAILED = []


def check(name, condition, detail=""):
    print(("ok    " if condition else "FAIL  ") + name + (f": {detail}" if detail and not condition else ""), flush=True)
    if not condition:
        FAILED.append(name)


def refused(name, kind, call):
    try:
        call()
    except openai.APIStatusError as error:
        check(name, isinstance(error, kind), f"{type(error).__name__}: {error}")
        return error
    check(name, False, "not refused")
    return None


def plain(client, model):
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=16, temperature=0)
    choice = answer.choices[0]
    check("chat: role", choice.message.role == "assistant")
    check("chat: finish reason", choice.finish_reason in ("stop", "length"), choice.finish_reason)
    check("chat: usage", answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens)
    check("chat: cached tokens", answer.usage.prompt_tokens_details.cached_tokens >= 0)
    check("chat: kv", "tokens_below_16_bits" in answer.usage.model_extra.get("kv", {}))

    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True})
    text, finish, usage = "", None, None
    for chunk in stream:
        for part in chunk.choices:
            text += part.delta.content or ""
            finish = part.finish_reason or finish
        usage = chunk.usage or usage
    check("stream: same text as plain", text == choice.message.content, f"{text!r} != {choice.message.content!r}")
    check("stream: finish reason", finish == choice.finish_reason)
    check("stream: usage", usage is not None and usage.completion_tokens == answer.usage.completion_tokens)

    several = client.chat.completions.create(
        model=model, messages=[{"role": "system", "content": "Be brief."},
                               {"role": "user", "content": [{"type": "text", "text": "One word."}]}],
        max_completion_tokens=4, n=3, seed=1, temperature=1, top_p=0.9, stop=["\n\n"], presence_penalty=0.1,
        frequency_penalty=0.1, logprobs=True, top_logprobs=2, user="check", logit_bias={"5": -1},
        extra_body={"top_k": 20, "min_p": 0.01, "kv": {"min_bits": 16}, "cache_salt": "x", "priority": 1})
    check("chat: n", sorted(c.index for c in several.choices) == [0, 1, 2])
    check("chat: logprobs", all(len(t.top_logprobs) == 2 for c in several.choices for t in c.logprobs.content))

    text_answer = client.completions.create(model=model, prompt=["Once", "Twice"], max_tokens=4, temperature=0, logprobs=1)
    check("completions: two prompts", [c.index for c in text_answer.choices] == [0, 1])
    check("completions: logprobs", len(text_answer.choices[0].logprobs.tokens) >= 1)
    streamed = ["", ""]
    for chunk in client.completions.create(model=model, prompt=["Once", "Twice"], max_tokens=4, temperature=0, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.text
    check("completions: stream", streamed == [c.text for c in text_answer.choices], f"{streamed}")
    by_ids = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=2)
    check("completions: token ids", by_ids.usage.prompt_tokens == 3)
    left = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count."}], max_tokens=200, stream=True)
    next(iter(left))
    left.close()
    check("stream: left early", True)


def errors(client, model):
    ask = lambda **more: client.chat.completions.create(  # noqa: E731
        **{"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **more})
    error = refused("unknown model is a 404", openai.NotFoundError, lambda: ask(model="no-such-model"))
    check("unknown model: code", error is not None and error.code == "model_not_found")
    error = refused("bad temperature is a 400", openai.BadRequestError, lambda: ask(temperature=-1))
    check("bad temperature: param", error is not None and error.param == "temperature")
    refused("no messages is a 400", openai.BadRequestError, lambda: ask(messages=[]))
    refused("JSON mode is a 400", openai.BadRequestError, lambda: ask(response_format={"type": "json_object"}))
    refused("an image is a 400", openai.BadRequestError, lambda: ask(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]))
    error = refused("a prompt over the context is a 400", openai.BadRequestError, lambda: client.completions.create(
        model=model, prompt=[5] * 600_000, max_tokens=1))
    check("over the context: code", error is not None and error.code == "context_length_exceeded", str(error))


async def together(base_url, model, clients):
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=600, max_retries=0)

    async def one(index):
        messages = [{"role": "user", "content": f"Write a line about the number {index}."}]
        if index % 2:
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
            return answer.usage.completion_tokens
        tokens = 0
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True})
        async for chunk in stream:
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        return tokens

    start = time.monotonic()
    tokens = await asyncio.gather(*(one(i) for i in range(clients)))
    seconds = time.monotonic() - start
    check(f"{clients} clients at once", all(t > 0 for t in tokens), str(tokens))
    print(f"      {sum(tokens)} tokens in {seconds:.2f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", help="such as http://127.0.0.1:8080")
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    base_url = args.url.rstrip("/") + "/v1"
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=600, max_retries=0)
    models = client.models.list().data
    check("models", len(models) == 1)
    model = models[0].id
    check("model by name", client.models.retrieve(model).id == model)
    plain(client, model)
    errors(client, model)
    asyncio.run(together(base_url, model, args.clients))
    print("all checks passed" if not FAILED else f"{len(FAILED)} checks failed: " + ", ".join(FAILED))
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
