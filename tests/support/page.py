"""A `tierfs ui` process, and plain requests to it."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from urllib.parse import urlencode, urlsplit


class PageServer:
    """A running `tierfs ui`. `url` is what it printed."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "tierfs.cli", "ui", *map(str, words)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        self.url = self.process.stdout.readline().split("  ")[0].strip()
        parts = urlsplit(self.url)
        self.port, self.token = parts.port, parts.fragment.removeprefix("token=")

    def ask(self, path, method="GET", **headers):
        """Return status, headers and body."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=names)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def get(self, name, code=200, **parameters):
        """Return a document of the API, when a job behind it is done."""
        while True:
            status, _, body = self.ask(f"/api/{name}.json?{urlencode(parameters, doseq=True)}")
            if status != 202:
                assert status == code, (status, body)
                return json.loads(body)

    def events(self):
        """Yield name and data of each event. Closing the generator closes the connection."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", "/api/events")
            stream = connection.getresponse()
            while line := stream.readline().decode():
                if line.startswith("event: "):
                    yield (
                        line.strip().removeprefix("event: "),
                        json.loads(stream.readline().decode().removeprefix("data: ")),
                    )
                    stream.readline()
            stream.close()

    def stop(self):
        """End the server as Ctrl-C does, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        with self.process:
            return self.process.wait(30)


@contextlib.contextmanager
def served(*words):
    server = PageServer(*words, *([] if "--port" in words else ["--port", "0"]))
    try:
        yield server
    finally:
        server.stop()
