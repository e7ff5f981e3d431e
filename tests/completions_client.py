"""Stands in for vLLM's client of completions, which needs aiohttp: the tests of ``bench serve`` run without it."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Output:
    """What vLLM's client returns."""

    start_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_tokens: int = 0
    success: bool = False
    error: str = ""


async def ask(asked: Any, session: Any) -> Output:
    """Ask for one completion, as ``async_request_openai_completions`` does."""
    return await asyncio.to_thread(_ask, asked)


def _ask(asked: Any) -> Output:
    output = Output(start_time=time.perf_counter())
    payload = {"model": asked.model, "prompt": asked.prompt, "max_tokens": asked.output_len, "stream": True}
    payload |= {"ignore_eos": asked.ignore_eos} | asked.extra_body
    connection = http.client.HTTPConnection("127.0.0.1", int(asked.api_url.split(":")[2].split("/")[0]))
    try:
        connection.request("POST", "/v1/completions", json.dumps(payload))
        response = connection.getresponse()
        if response.status != 200:
            output.error = response.reason
            return output
        last = output.start_time
        for line in response:
            data = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if data.get("choices"):
                now = time.perf_counter()
                if output.ttft:
                    output.itl.append(now - last)
                output.ttft, last = output.ttft or now - output.start_time, now
            elif usage := data.get("usage"):
                output.output_tokens = usage["completion_tokens"]
        output.success = True
    except OSError as error:
        output.error = f"Traceback\n{type(error).__name__}: {error}\n"
    finally:
        connection.close()
    return output
