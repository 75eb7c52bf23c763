"""The serve command: OpenAI's interface over HTTP; every heavy import waits."""

from __future__ import annotations

import ipaddress
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerskip.cli.drafting import Drafting, Sources, open_decoding
from layerskip.cli.options import DraftFlags, Loading, MaxRows, Memory, Quiet, Sampling
from layerskip.cli.terminal import Talk

if TYPE_CHECKING:
    from layerskip.checkpoints import Loaded
    from layerskip.serving.api import Served


def serve(
    *,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0: on every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="LAYERSKIP_API_KEY",
            show_envvar=False,
            help="What clients must show.  [default: LAYERSKIP_API_KEY of the environment]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What clients call the model.  [default: its own name]"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="The most tokens of a prompt and its text.  [default: the model's own limit]",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Tokens to generate at most, where a client is mute."
        ),
    ] = 1024,
    max_rows: MaxRows = 16,
    max_queue: Annotated[
        int, typer.Option(min=1, metavar="N", help="The most texts that wait; more get a 429.")
    ] = 128,
    memory: Memory = None,
    max_body: Annotated[
        float, typer.Option(min=0, metavar="MB", help="The largest request; larger ones get a 413.")
    ] = 4.0,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="The longest that a request may take.")
    ] = 600.0,
    draft: DraftFlags,
    sources: Sources,
    drafting: Drafting,
    loading: Loading,
    quiet: Quiet = False,
) -> None:
    """Serve a model to OpenAI's clients: many texts at once, each the one it has alone."""
    if api_key is not None and not api_key.strip():
        raise ValueError("--api-key is empty; give a key, or leave it out for none")
    sources.refuse_keeping("serve")
    talk = Talk(quiet)
    found: list[Served] = []

    def described(loaded: Loaded) -> None:
        found.append(_served(loaded, name, context, max_new_tokens))

    with _listening(host, port) as listener:  # before the model is loaded, so that errors are quick
        try:
            import fastapi  # noqa: F401
            import prometheus_client  # noqa: F401
            import uvicorn
        except ImportError as missing:
            raise ValueError(
                f"serve needs {missing.name}: pip install 'layerskip[serve]'"
            ) from missing
        if api_key is None and not _private(host):
            warnings.warn(
                f"whoever reaches {host} may use this server; give --api-key", stacklevel=2
            )
        opening = open_decoding(draft, sources, drafting, Sampling(), loading, talk, described)
        with opening as (loaded, _, settings, _):
            from layerskip.serving.http import make_app
            from layerskip.serving.scheduler import Serving

            del settings["do_sample"]  # each request says that
            [served] = found
            serving = Serving(
                loaded.model,
                memory=None if memory is None else int(memory * 1e9),
                max_rows=max_rows,
                max_queue=max_queue,
                max_tokens=served.context,
                **settings,
            )
            app = make_app(
                serving, served, api_key=api_key, max_body=int(max_body * 1e6), timeout=timeout
            )
            config = uvicorn.Config(
                app, log_level="warning", access_log=False, timeout_graceful_shutdown=5
            )
            where, number = listener.getsockname()[:2]
            shown = f"[{where}]" if ":" in where else where
            talk.say(f"serving {served.name} at http://{shown}:{number}/v1 until Ctrl-C")
            uvicorn.Server(config).run(sockets=[listener])


def _served(loaded: Loaded, name: str | None, context: int | None, max_new_tokens: int) -> Served:
    """The model as clients see it; never with a path of this machine."""
    from layerskip.serving.api import Served

    own = loaded.name if loaded.folder is None else Path(loaded.name).resolve().name
    return Served.of(
        name or own,
        loaded.model,
        loaded.tokenizer,
        context=context,
        max_new_tokens=max_new_tokens,
    )


def _listening(host: str, port: int) -> socket.socket:
    """A socket there.

    Raises:
        ValueError: the port is taken, or the address is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot listen at --host {host} --port {port}: {reason}") from error


def _private(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
