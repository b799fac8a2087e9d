"""The smallest engine: `python -S -E engine.py PORT [SECONDS]` is ready after that many seconds, on $POD_IP only."""

import http.server
import os
import sys
import time


class Ready(http.server.BaseHTTPRequestHandler):
    """Answers every request with status 200."""

    def do_GET(self) -> None:
        """Responds with 200 to any path."""
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Suppresses the access log."""


if __name__ == "__main__":
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    http.server.ThreadingHTTPServer((os.environ["POD_IP"], int(sys.argv[1])), Ready).serve_forever()
