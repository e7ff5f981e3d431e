"""Pretends to be ``vllm serve`` or SGLang's server: it takes the same arguments, says that it is well, and streams.

    python completions_server.py MODEL --port PORT ...
    python completions_server.py --model-path MODEL --port PORT ...

FAKE_SERVER in the environment lets it misbehave: "refuses" (dies at the start), "never well", "short" (a token less),
"dies" (at the first request), "errors" (refuses every second request), "silent" (of SGLang's, sends no text).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

GAP_S = 0.002
MODE = os.environ.get("FAKE_SERVER", "")
SEEN = count()


class Handler(BaseHTTPRequestHandler):
    """Answers until the connection closes, as HTTP/1.0 has it."""

    def log_message(self, form: str, *values: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(503 if MODE == "never well" or self.path != "/health" else 200)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "dies":
            print("RuntimeError: CUDA error: out of memory\nthe engine is gone", flush=True)
            os._exit(7)
        of_sglang = self.path == "/generate"
        prompt = asked["input_ids" if of_sglang else "prompt"]
        fine = all(isinstance(token, int) for token in prompt) and asked["stream"]
        if of_sglang:
            asked |= {"model": "served", **asked["sampling_params"]}
            asked["max_tokens"] = asked["max_new_tokens"]
        fine = fine and asked["model"] == "served" and asked["ignore_eos"]
        if not fine or (MODE == "errors" and next(SEEN) % 2):
            self.send_error(400, "Bad Request")
            return
        self.send_response(200)
        self.end_headers()
        tokens = asked["max_tokens"] - (MODE == "short")
        for done in range(1, tokens + 1):
            time.sleep(GAP_S)
            of_one = {"text": "w7 " * done * (MODE != "silent"), "meta_info": {"completion_tokens": done}}
            self.tell(of_one if of_sglang else {"choices": [{"text": "", "index": 0}]})
        if not of_sglang:
            self.tell({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": len(prompt)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def tell(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """All connections of a load may come at once."""

    request_queue_size = 1024
    daemon_threads = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--model-path", dest="model")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    print("starting", options.model, flush=True)
    if MODE == "refuses":
        print("ValueError: the root of it\nsome frames\nRuntimeError: Engine core initialization failed.", flush=True)
        sys.exit(1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as an engine core
    print("child", child.pid, flush=True)
    Server(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
