"""One JSON object a line on stderr. Keys of filters, digests, seeds and tokens are never logged."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: level, logger, timestamp, message, and its exception if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _is_for_the_operator(record: logging.LogRecord) -> bool:
    """False for what gRPC says of metadata that is no UTF-8, since it repeats it, and that may be nearly a
    token; and of an answer that reached nobody, since callers that give up are no error of ours."""
    return not record.getMessage().startswith(("Invalid encoding on ", "ExecuteBatchError"))


def configure(level: str) -> None:
    """Send everything that is logged through one JSON formatter."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_for_the_operator)
