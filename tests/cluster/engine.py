"""The smallest engine: `python -S -E engine.py PORT [SECONDS]`, ready after so many seconds, on $POD_IP only."""

import http.server
import os
import sys
import time


class Ready(http.server.BaseHTTPRequestHandler):
    """Says 200 to everything."""

    def do_GET(self) -> None:
        """Any path."""
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    http.server.ThreadingHTTPServer((os.environ["POD_IP"], int(sys.argv[1])), Ready).serve_forever()
