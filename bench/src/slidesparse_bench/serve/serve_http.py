"""Ask a ``vllm serve`` of its own over HTTP, with the client of vLLM's own benchmark."""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any

from slidesparse_bench.serve.serve_load import Request, Served
from slidesparse_bench.serve.serve_options import ServeOptions, server_arguments
from slidesparse_bench.serve.serve_server import CLI, HOST, Server, free_port

MODEL = "served"
"""The model's name in requests."""

KEEP_ALIVE_S = 4.0
"""The client gives an idle connection up before vLLM's server does, after 5 s: otherwise both may meet on it."""

FILES = 65536
"""Open files that the client may have: each running request is a connection."""


class OverHttp:
    """A server and a client of it.

    Args:
        server: Up, and listening.
        session: aiohttp's, with as many connections as are asked for.
    """

    steps = None  # nobody sees an engine's steps from outside
    cli: tuple[str, ...] = CLI
    path = "/v1/completions"

    def __init__(self, server: Server, session: Any) -> None:
        self._server, self._session = server, session
        self.url = f"http://{HOST}:{server.port}{self.path}"

    @classmethod
    async def start(cls, options: ServeOptions) -> OverHttp:
        """Start a server and wait for it.

        Raises:
            UnsupportedError: It did not start.
        """
        assert options.log is not None
        port = free_port()
        command = [sys.executable, *cls.cli, *server_arguments(options, HOST, port, MODEL)]
        server = Server(command, port, options.log)
        try:
            server.wait_ready()
            return cls(server, open_session())
        except BaseException:
            server.stop()
            raise

    async def answer(self, request: Request, name: str, arrival: float) -> Served:
        """Ask for one answer; ``arrival`` is on the clock of time.perf_counter, now or before."""
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

        asked = RequestFuncInput(
            prompt=list(request.prompt),  # token ids go through as they are
            api_url=self.url,
            prompt_len=len(request.prompt),
            output_len=request.output,
            model=MODEL,
            ignore_eos=True,
            extra_body={"temperature": 0.0},
            request_id=name,
        )
        output = await async_request_openai_completions(asked, self._session)
        return served(output, output.output_tokens or 0, arrival)

    def require_alive(self) -> None:
        """Raise UnsupportedError if the server has ended."""
        self._server.require_alive()

    def engine_process(self) -> tuple[int, bool]:
        """The server's process, which is part of the engine."""
        return self._server.pid, True

    async def close(self) -> None:
        """End client and server."""
        try:
            await self._session.close()
        finally:
            self._server.stop()


def served(output: Any, tokens: int, arrival: float) -> Served:
    """What a server's own client says of a request, from the request's arrival on.

    Args:
        output: A ``RequestFuncOutput``, of vLLM or of SGLang, which took it from vLLM.
        tokens: Of the answer.
        arrival: When the request was due, on the clock of time.perf_counter.
    """
    if not output.success:
        lines = [line.strip() for line in str(output.error).splitlines() if line.strip()]
        return Served((), 0, lines[-1] if lines else "it was refused without a word")
    first = output.start_time - arrival + output.ttft
    return Served(tuple(accumulate(output.itl, initial=first)), tokens)


def open_session() -> Any:
    """A client's session, without a limit of its own and without proxies; asyncio must run."""
    import resource

    import aiohttp

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
