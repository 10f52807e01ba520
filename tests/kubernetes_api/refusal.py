"""An answer that is an error, with the Status body of a real server."""

from typing import Any

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    503: "ServiceUnavailable",
}


class Refused(Exception):
    """``code``, ``message``, and the causes of a conflict or an invalid object."""

    def __init__(self, code: int, message: str, reason: str | None = None, causes: list[dict[str, str]] | None = None):
        super().__init__(message)
        self.code, self.message = code, message
        self.reason, self.causes = reason or REASONS[code], causes or []

    def status(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": {"causes": self.causes},
            "code": self.code,
        }
