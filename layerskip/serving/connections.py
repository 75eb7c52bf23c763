"""Connections of the server: one is closed if it does not send a request's head in time."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # time limit for a client to send the head of a request
_END_SECONDS = 5  # time limit for answers in progress to end


class Connection(H11Protocol):
    """A connection with a time limit for the heads of requests."""

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
        """Start the timer when a head is expected, and stop it when one has arrived."""
        if self.conn.their_state is not h11.IDLE:
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)


def configured(app: Any, *, log: bool = False) -> uvicorn.Config:
    """The configuration of the server for an application.

    Args:
        log: whether to log each request to standard error.
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
