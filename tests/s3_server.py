"""An S3-compatible server on loopback: moto's, with requests that tests can watch, hold and cut off."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Environment = Mapping[str, Any]

SECRETS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class S3Server:
    """Context manager. `watch` is called with the method and the key of each request, before it is served.

    What it raises is what happens: CutOff, LostReply, Overloaded. PUTs are served one at a time: moto looks
    for a name and makes it in two steps, a real store in one.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._one_put = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._num_buckets = 0
        self.bytes_sent = 0
        self.behave()

    def behave(self) -> None:
        """From now on it is like any other server."""
        self.watch: Callable[[str, str], None] = _nothing
        # as servers do that do not know the condition
        self.ignores_conditions = False

    def make_bucket(self) -> None:
        self._num_buckets += 1
        self.files.mkdir(self.bucket)

    @property
    def bucket(self) -> str:
        return f"bucket-{self._num_buckets}"

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that need nothing of the environment."""
        return {"key": "somebody", "secret": "hush", "endpoint_url": self.url}

    @property
    def files(self) -> Any:
        """What is on the server, as s3fs sees it."""
        import s3fs

        return s3fs.S3FileSystem(**self.options, use_listings_cache=False)

    @property
    def environment(self) -> dict[str, str]:
        """By which a process finds the server."""
        return {"AWS_ENDPOINT_URL": self.url, **SECRETS}

    def __enter__(self) -> S3Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, key = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        try:
            self.watch(method, key)
        except CutOff:
            # in the middle of the body, if there is one
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0) // 2)
            return _hang_up(environment)
        except LostReply:
            self._answer(method, environment, lambda *_: lambda _: None)
            return _hang_up(environment)
        except Overloaded:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        return self._answer(method, environment, start_response)

    def _answer(self, method: str, environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if method != "PUT":
            body = list(self._app(environment, start_response))
            self.bytes_sent += sum(map(len, body))
            return body
        if self.ignores_conditions:
            environment.pop("HTTP_IF_NONE_MATCH", None)
        with self._one_put:
            return list(self._app(environment, start_response))


class CutOff(Exception):
    """The connection breaks before the request is whole."""


class LostReply(Exception):
    """The request is served, its reply never comes."""


class Overloaded(Exception):
    """The server asks to come later."""


def _hang_up(environment: Environment) -> Iterable[bytes]:
    environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return []


def _nothing(method: str, key: str) -> None:
    pass
