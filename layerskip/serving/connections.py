"""Connections of the server: one that does not send a request's head in time is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # in which a client sends the head of a request
_END_SECONDS = 5  # in which answers under way may end


class Connection(H11Protocol):
    """A connection with a limit of time for the heads of requests."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the time where a head is waited for, and end it where one is there."""
        if self.conn.their_state is not h11.IDLE:
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)


def configured(app: Any, *, log: bool = False) -> uvicorn.Config:
    """How the application is served.

    Args:
        log: whether each request is told on standard error.
    """
    formats: dict[str, Any] = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "loggers": {
            "uvicorn": {"handlers": ["stderr"], "level": "WARNING"},
            "uvicorn.access": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        },
    }
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=formats,
        access_log=log,
        timeout_graceful_shutdown=_END_SECONDS,
    )
