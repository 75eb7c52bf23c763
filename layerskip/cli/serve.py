"""The serve command: OpenAI's API over HTTP. Heavy imports happen only when they are used."""

from __future__ import annotations

import ipaddress
import os
import socket
import warnings
from pathlib import Path

from layerskip.cli import flags
from layerskip.cli.flags import flag, switch, warn_idle
from layerskip.cli.opening import open_decoding, open_model
from layerskip.cli.terminal import Talk


def serve(
    *,
    host: str = flag(
        "Listen on this address; 0.0.0.0: on all networks.", "ADDRESS", default="127.0.0.1"
    ),
    port: int = flag("Listen on this port; 0: any free one.", "N", default=8000, min=0, max=65535),
    api_key: list[str] | None = flag(
        "Key that clients must send; repeatable.  [default: environment variable "
        "LAYERSKIP_API_KEY, a line for each key]",
        "KEY",
    ),
    name: str | None = flag("Name of the model for clients.  [default: its own]", "NAME"),
    lora: str | None = flag(
        "Merge this peft adapter into the model, and serve it as NAME.", "NAME=FOLDER"
    ),
    context: int | None = flag(
        "Maximum length of prompt plus text, in tokens.  [default: the model's limit]", "N", min=2
    ),
    max_new_tokens: int = flag(
        "Generate at most N tokens if a request sets no limit.", "N", default=1024, min=1
    ),
    max_rows: flags.MaxRows = 16,
    max_queue: int = flag(
        "Queue at most N texts; requests beyond that get HTTP 429.", "N", default=128, min=1
    ),
    memory: flags.Memory = None,
    max_body: float = flag("Largest request body; beyond it, HTTP 413.", "MB", default=4.0, min=0),
    timeout: float = flag("Time limit of a request.", "SECONDS", default=600.0, min=1),
    cors: list[str] | None = flag(
        "Allow requests from web pages of this origin (https://example.org; *: any); repeatable.",
        "ORIGIN",
    ),
    access_log: bool = switch("--access-log", "Log each request to standard error."),
    tool_parser: str = flag(
        "Format of the model's tool calls: hermes, llama3, mistral, mistral-named, gemma4, "
        "functiongemma or none; auto: found from its chat template.",
        "NAME",
        default="auto",
    ),
    reasoning_parser: str = flag(
        "Format of the model's reasoning: think, gemma4, mistral or none; auto: found from its "
        "chat template.",
        "NAME",
        default="auto",
    ),
    decoding: flags.Decoding,
    loading: flags.Loading,
    quiet: flags.Quiet = False,
) -> None:
    """Serve a model to OpenAI clients, with many texts at once.

    Example: layerskip serve HuggingFaceTB/SmolLM2-135M-Instruct
    """
    keys = api_key or os.environ.get("LAYERSKIP_API_KEY", "").splitlines()
    if not all(key.strip() for key in keys):
        raise ValueError("--api-key is empty; give a key, or leave it out for none")
    adapter = None if lora is None else _adapter(lora)
    if adapter is not None:
        warn_idle({"name": name}, "with --lora, which sets the name")
        name = adapter[0]
    talk = Talk(quiet)
    with _listening(host, port) as listener:  # before loading the model, so that errors come early
        try:
            import uvicorn

            from layerskip.serving.formats import format_of, reasoning_of
            from layerskip.serving.http import make_app, owner_of
        except ImportError as missing:
            raise ValueError(
                f"serve needs {missing.name}: pip install 'layerskip[serve]'"
            ) from missing
        format_of(tool_parser, "")  # names are refused before the model is loaded
        reasoning_of(reasoning_parser, "")
        if not keys and not _private(host):
            warnings.warn(
                f"anyone who can reach {host} can use this server; give --api-key", stacklevel=2
            )
        loaded = open_model(loading, talk, reads=True)

        from layerskip.decoding.sources.earlier import EarlierAnswers
        from layerskip.families.wrappers import merge_adapter
        from layerskip.serving.connections import configured
        from layerskip.serving.openai_api import Served
        from layerskip.serving.scheduler import Serving

        if adapter is not None:
            merge_adapter(loaded.model, adapter[1])
        served = Served(
            loaded,
            name,
            context=context,
            max_new_tokens=max_new_tokens,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        with open_decoding(decoding, flags.Writing(), loading, loaded, talk) as opened:
            serving = Serving(
                loaded.model,
                memory=None if memory is None else int(memory * 1e9),
                max_rows=max_rows,
                max_queue=max_queue,
                max_tokens=served.context,
                **opened.settings,
            )
            for source in opened.plan.sources:
                if isinstance(source, EarlierAnswers):  # damaged files are refused now
                    for key in keys:
                        source.of(owner_of(key))
            app = make_app(
                serving,
                served,
                api_key=keys,
                max_body=int(max_body * 1e6),
                timeout=timeout,
                origins=cors or (),
            )
            where, number = listener.getsockname()[:2]
            shown = f"[{where}]" if ":" in where else where
            talk.say(f"serving {served.name} at http://{shown}:{number}/v1 until Ctrl-C")
            uvicorn.Server(configured(app, log=access_log)).run(sockets=[listener])


def _adapter(given: str) -> tuple[str, Path]:
    """Split --lora into the name and the folder."""
    name, _, folder = given.partition("=")
    if not name or not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(
            "--lora must be NAME=FOLDER with an adapter_config.json in the folder, got " + given
        )
    return name, Path(folder)


def _listening(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ValueError: the port is taken, or the address is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot listen at --host {host} --port {port}: {reason}") from error


def _private(host: str) -> bool:
    """Whether the address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
