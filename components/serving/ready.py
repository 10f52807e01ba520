"""``python -m components.serving.ready --port N``: exit 0 while the server generates, 1 when it does not.

A health route answers as long as the process lives; a token proves the engine. On a busy server the probe's own
request may wait longer than a probe can, so a server whose count of generated tokens moves meanwhile is ready as well.
"""

import argparse
import http.client
import json
import os
import sys

REQUEST_SECONDS = 5.0
COUNTER = "vllm:generation_tokens_total"


def main() -> int:
    """Ask for one token; print one line to stderr when there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True, help="where the server listens, on loopback")
    port = parser.parse_args().port
    try:
        before = generated(port)
        try:
            complete(port)
        except TimeoutError:
            if generated(port) == before:
                raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"not ready: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def complete(port: int) -> None:
    """Generate one token. Raises :class:`ValueError` for an answer without one, :class:`TimeoutError` for none."""
    body = json.dumps({"prompt": "1", "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    status, answer = _request(port, "POST", "/v1/completions", body)
    if status != 200 or json.loads(answer)["usage"]["completion_tokens"] != 1:
        raise ValueError(f"/v1/completions answered {status}: {answer[:200].decode(errors='replace')}")


def generated(port: int) -> float:
    """Return how many tokens the server has generated since it started."""
    return total(port, COUNTER)


def total(port: int, *names: str) -> float:
    """Return the sum of the series with these names on the server's /metrics; :class:`ValueError` without any."""
    status, page = _request(port, "GET", "/metrics")
    lines = [line for line in page.decode().splitlines() if line.partition("{")[0] in names]
    if status != 200 or not lines:
        raise ValueError(f"/metrics answered {status}, without {', '.join(names)}")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _request(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
