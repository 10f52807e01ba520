"""Port forwarding to a pod, as Kubernetes speaks it over a WebSocket (v4.channel.k8s.io)."""

import base64
import hashlib
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, CLOSE = 2, 8


def forward(request: BaseHTTPRequestHandler, target: tuple[str, int], port: int) -> None:
    """Upgrade the request and pump bytes between it and ``target``, which stands for the pod's ``port``."""
    accept = base64.b64encode(hashlib.sha1((request.headers["Sec-WebSocket-Key"] + GUID).encode()).digest())
    request.send_response(101)
    request.send_header("Upgrade", "websocket")
    request.send_header("Connection", "Upgrade")
    request.send_header("Sec-WebSocket-Accept", accept.decode())
    request.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
    request.end_headers()
    request.close_connection = True
    for channel in (0, 1):  # data and error: each begins with the port
        _send(request, channel, struct.pack("<H", port))
    try:
        pod = socket.create_connection(target)
    except OSError as error:
        _send(request, 1, f"error forwarding port {port}: {error}".encode())
        return
    with pod:
        threading.Thread(target=_back, args=(request, pod), daemon=True).start()
        while (frame := _receive(request)) is not None:
            if frame[:1] == b"\0" and len(frame) > 1:
                pod.sendall(frame[1:])


def _back(request: BaseHTTPRequestHandler, pod: socket.socket) -> None:
    try:
        while data := pod.recv(65536):
            _send(request, 0, data)
        request.wfile.write(struct.pack("!BBH", 0x80 | CLOSE, 2, 1000))
        request.wfile.flush()
    except (OSError, ValueError):
        pass  # the client has gone


def _send(request: BaseHTTPRequestHandler, channel: int, data: bytes) -> None:
    payload = bytes([channel]) + data
    size = struct.pack("!B", len(payload)) if len(payload) < 126 else struct.pack("!BQ", 127, len(payload))
    request.wfile.write(bytes([0x80 | BINARY]) + size + payload)
    request.wfile.flush()


def _receive(request: BaseHTTPRequestHandler) -> bytes | None:
    """Return the next data frame, unmasked; None at the end."""
    while True:
        head = request.rfile.read(2)
        if len(head) < 2 or head[0] & 0x0F == CLOSE:
            return None
        size = head[1] & 0x7F
        if size >= 126:
            size = int.from_bytes(request.rfile.read(2 if size == 126 else 8), "big")
        mask = request.rfile.read(4)
        data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(request.rfile.read(size)))
        if head[0] & 0x0F == BINARY:
            return data
