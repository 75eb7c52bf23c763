"""Ray: answers files of prompts, and replicates servers, on the machines of a cluster."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

try:
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext
except ImportError as missing:
    raise ValueError("Ray is not installed: pip install 'layerskip[ray]'") from missing

from layerskip.files.environment import cores
from layerskip.serving.prompt_files import Answering, Answers, Numbered, Row, length

Opening = Callable[..., AbstractContextManager[Answering]]
"""Opens a model that answers, with the number of models on its machine; can be pickled."""


@contextmanager
def cluster(address: str | None = None, workers: int | None = None) -> Iterator[None]:
    """Connect to a Ray cluster without its log output; one started here also ends here.

    Args:
        address: by default that of RAY_ADDRESS; without either, a cluster is started here.
        workers: number of workers for which a cluster started here has room.

    Raises:
        ValueError: there is no cluster.
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    here: dict[str, Any] = {}
    if address == "local":
        here = {"num_cpus": max(cores(), workers or 1), "include_dashboard": False}
    try:
        ray.init(address, **here, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"no Ray cluster at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def answer_by_ray(
    opening: Opening,
    prompts: Sequence[Numbered],
    answers: Answers,
    progress: Callable[[], None],
    *,
    workers: int | None = None,
    at_once: int = 32,
    gpus: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Answer prompts that have no row yet on the connected cluster.

    Each prompt is a Ray Data task for an actor with a model. Its row is the same as in one process,
    except for the number of drafted tokens, and is written here as soon as it is ready. Another
    actor takes over the prompts of one that dies.

    Args:
        opening: run by each actor, in this working directory if its machine has it.
        progress: called after each row.
        workers: number of actors; by default one per GPU, or one per machine without GPUs.
        at_once: number of prompts that an actor has at a time.
        gpus: whether each actor takes a GPU, if there are any.
        say: called with a message on the number of actors.

    Raises:
        ValueError: the cluster has no room, or actors cannot open the model.
    """
    machines = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    there = ray.cluster_resources()
    cards = int(there.get("GPU", 0)) if gpus else 0
    actors, room = workers or cards or len(machines), cards or int(there.get("CPU", 0))
    if not 0 < actors <= room:
        kind = "GPUs" if cards else "CPUs"
        raise ValueError(f"{actors} workers need as many {kind}, the cluster has {room}")
    say(f"Ray: machines {len(machines)}, models {actors}, prompts at once {at_once} each")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    left = [each for each in prompts if each[1].id not in answers.done]
    left.sort(key=length)
    items = [{"prompt": pickle.dumps(each)} for each in left]
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map(
        _Worker,
        fn_constructor_args=[opening, -(-actors // len(machines)), os.getcwd()],
        compute=ActorPoolStrategy(
            size=actors,
            max_concurrent_calls_per_actor=at_once,
            max_tasks_in_flight_per_actor=at_once,
            enable_true_multi_threading=True,
        ),
        num_cpus=None if cards else 1,
        num_gpus=1 if cards else None,
    )
    for each in rows.iter_rows():
        row: Row = json.loads(each["row"])
        if "refused" in row:
            raise ValueError(row["refused"])
        answers.add(row)
        answers.tokens += row.get("new_tokens", 0)
        progress()


class _Worker:
    """An actor that answers prompts, each in a thread that waits for the one that decodes."""

    def __init__(self, opening: Opening, models_here: int, folder: str) -> None:
        import torch

        if Path(folder).is_dir():
            os.chdir(folder)
        # Ray allows only one CPU thread if an actor has one CPU.
        torch.set_num_threads(max(1, cores() // models_here))
        self._stack, self._refused = ExitStack(), ""
        try:
            self._answering = self._stack.enter_context(opening(models_here=models_here))
            self._answering.serving.start()
        except (ValueError, OSError) as error:  # another actor would fail in the same way
            self._refused = str(error)

    def __call__(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"row": json.dumps(self._row(pickle.loads(given["prompt"])))}

    def _row(self, numbered: Numbered) -> Row:
        if self._refused:
            return {"refused": self._refused}
        rows = SimpleQueue[Row]()

        def tell(new: int, row: Row | None) -> None:
            if row is not None:
                rows.put(row)

        self._answering.submit(numbered, tell)
        return rows.get()


def deployment(
    model: str,
    *,
    replicas: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    name: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    api_key: str | None = None,
    max_rows: int = 16,
    max_queue: int = 128,
    **settings: Any,
) -> Any:
    """Make the server of `layerskip serve` as a Ray Serve application.

    Run it with `ray.serve.run(deployment("smollm2", replicas=2))`. Each replica has its own model,
    batch and queue; Ray Serve distributes requests among them.

    Args:
        model, device, dtype: as for `layerskip.api.loading.load`.
        cpus, gpus: per replica, which uses as many threads as CPUs.
        name: name of the model for clients; by default its own.
        context, api_key: as for `Served` and `make_app`.
        max_rows, max_queue: per replica, as for `Serving`.
        **settings: as for `LayerSkipDecoding`.
    """
    from ray import serve

    def build() -> Any:
        from layerskip.api.loading import load
        from layerskip.serving.http import make_app
        from layerskip.serving.openai_api import Served
        from layerskip.serving.scheduler import Serving

        loaded = load(model, device=device, dtype=dtype)
        served = Served(loaded, name, context=context)
        serving = Serving(
            loaded.model,
            max_rows=max_rows,
            max_queue=max_queue,
            max_tokens=served.context,
            **settings,
        )
        return make_app(serving, served, api_key=api_key)

    replicated = serve.deployment(
        name="layerskip",
        num_replicas=replicas,
        max_ongoing_requests=max_rows + max_queue,  # each replica's own queue handles any excess
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    return replicated(serve.ingress(build)()).bind()
