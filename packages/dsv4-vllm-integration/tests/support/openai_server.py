# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI-compatible completion server: `python openai_server.py PORT`, one token a millisecond.

Its speed follows `TOKEN_SECONDS`, so two arms can differ; it preempts nothing and counts so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_SECONDS = float(os.environ.get("TOKEN_SECONDS", "0.001"))


class Handler(BaseHTTPRequestHandler):
    """Answers what the clients of the tests ask."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def answer(self, text: str, kind: str) -> None:
        """A whole response."""
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Health, metrics and the model list."""
        if self.path == "/health":
            self.answer("", "text/plain")
        elif self.path == "/metrics":
            self.answer('vllm:num_preemptions_total{engine="0"} 0.0\n', "text/plain")
        elif self.path == "/v1/models":
            self.answer(
                json.dumps({"object": "list", "data": [{"id": "small", "object": "model"}]}),
                "application/json",
            )
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        """A streamed completion of exactly `max_tokens` tokens."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        tokens = asked["max_tokens"]
        for _ in range(tokens):
            time.sleep(TOKEN_SECONDS)
            self.event({"choices": [{"index": 0, "text": "a ", "finish_reason": None}]})
        usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, value: object) -> None:
        """One server-sent event."""
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
