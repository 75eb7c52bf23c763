"""The search command: runs a study as the flags say and writes its files.

They are `study.log` (the trials; `--storage` names another place), `cost.json`, `trials.csv`,
`search.json` (everything, for `layerskip report`), `skip.json` and `report/`.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from layerskip.cli import flags
from layerskip.cli.flags import check_limit, flag, load_skips, switch, warn_idle
from layerskip.cli.inputs import as_chats, check_folder, given_prompts, in_turn
from layerskip.cli.opening import open_model, open_passes
from layerskip.cli.terminal import Talk, aligned, ratio, to_json, two_columns
from layerskip.files.locking import LOCK, alone
from layerskip.files.records import redacted
from layerskip.files.writing import write_text
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import plural

if TYPE_CHECKING:
    from layerskip.search.finalists import Finalist
    from layerskip.search.pipeline import Search, SearchResult
    from layerskip.search.study import Standing

LEAST_BOUND = 1.1
"""Below this bound on its speedup, a draft is hardly worth the trouble."""
TIMEOUT = 540.0
"""Seconds for a whole search if neither the number of trials nor a time limit is given."""
JUDGING, LONGEST_JUDGING = 0.2, 140.0
"""Share of the time, and maximum in seconds, for judging the best drafts."""
MOMENT = 1e-6
"""Seconds given to the trials when no time is left for them."""
WRITING = 10.0
"""Maximum seconds, besides a fifth of the time, for writing the files and the report."""
HELD_OUT = 12
"""Maximum number of prompts to time finalists on; also never more than a third of all."""
POSITIONS = 1024
"""Maximum number of tokens in a trial, used for small models and on a GPU."""
FEWEST_POSITIONS = 128
WORK = 3.5e10
"""Otherwise, the product of these tokens and the model's weights: a trial then takes about a second
on two cores. Few trials on many tokens find less than many trials on few."""


def search(
    *,
    command: typer.Context,
    output: Path = flag(
        "Folder for all results. Repeating the command resumes its study.", "DIR", default=...
    ),
    prompts: flags.Prompts = None,
    chat: flags.Chat = False,
    space: str = flag(
        "What drafts may skip: exit (all layers after some point), layer (any layers) or sublayer "
        "(any attention and MLP sublayers). After commas, what else to try: bits, experts, window, "
        "vocabulary, lookup, controller (all if none is named).",
        "LIST",
        default="sublayer",
    ),
    bits: Literal["auto", "8", "4", "none"] = flag(
        "Low precision for sublayers and the head. auto: 8 bits if the passes are native, else "
        "none.",
        default="auto",
    ),
    allow_ends: bool = switch(
        "--allow-ends", "Let drafts also skip the first layer and sublayers of the last."
    ),
    sampler: Literal["gp", "tpe", "random"] = flag(
        "Trial sampler, of Optuna: Gaussian process (gp), Parzen estimator (tpe) or random.",
        default="gp",
    ),
    trials: int | None = flag("Number of trials.  [default: as many as time allows]", "N", min=1),
    timeout: float | None = flag(
        "Time limit of the whole command, later stages included.  [default: 540; none with "
        "--trials]",
        "S",
    ),
    skip: list[str] | None = flag("Try this skip config first; repeatable.", "FILE"),
    entry: flags.Entry = None,
    storage: str | None = flag(
        "Database or journal file of the study.  [default: a journal in DIR]", "URL"
    ),
    study_name: str = flag("Name of the study in the storage.", "NAME", default="layerskip"),
    workers: int = flag("Run the study in N processes here.", "N", default=1, min=1),
    positions: int | None = flag(
        "Number of tokens in a trial.  [default: 1024; fewer for a large model on a CPU]",
        "N",
        min=1,
    ),
    repeats: int | None = flag(
        "Timed calls of each finalist per prompt.  [default: 2]", "N", min=1
    ),
    no_confirm: bool = switch("--no-confirm", "Trust the predictions; do not time the finalists."),
    max_new_tokens: flags.MaxNewTokens = 64,
    sampling: flags.Sampling,
    seed: flags.Seed = 0,
    loading: flags.Loading,
    quiet: flags.Quiet = False,
    as_json: flags.AsJson = False,
) -> None:
    """Search for the fastest draft, and time the best candidates.

    A draft may skip sublayers or round their weights. After Ctrl-C all finished trials are kept,
    and the same command resumes. Machines with the same --storage and --study-name share a study.

    Example: layerskip search demo-llama --output found
    """
    talk = Talk(quiet)
    sampling = sampling.checked(talk)
    check_limit("timeout", timeout, "seconds")
    if no_confirm:
        warn_idle({"repeats": repeats}, "with --no-confirm")
    if timeout is None and trials is None:
        timeout = TIMEOUT
    started = time.monotonic()
    first = load_skips(skip, entry)
    asked = as_chats(given_prompts(prompts, loading.model), chat)
    chosen, held_out = split_prompts(asked, timed=not no_confirm)
    check_folder(output)
    command.with_resource(alone(output / LOCK, output))  # until the command ends
    where = str(output / "study.log") if storage is None else storage
    if storage is not None and "://" not in storage:  # a journal, which serves one command
        journal = Path(storage)
        lock = journal.with_name(f".{journal.name}.lock")
        command.with_resource(alone(lock, journal, "--storage"))
    if storage is not None:
        talk.progress("opening the storage")
        from layerskip.search.storage import check_storage

        check_storage(storage)
    loaded = open_model(loading, talk)
    loaded.store_halves(loading.execution)  # as `generate` does, whose costs these are

    from layerskip.api.loading import encode
    from layerskip.bench.suite import make_header
    from layerskip.files.searches import SCHEMA
    from layerskip.search.fitting import parts_of, space_for, typical_context
    from layerskip.search.pipeline import Search
    from layerskip.search.study import fail_abandoned
    from layerskip.search.workers import worker_processes
    from layerskip.timing.threads import cpu_threads

    kind, parts = parts_of(space)
    if kind == "exit" and allow_ends:
        warn_idle({"allow_ends": True}, "with --space exit")
    if "bits" not in parts and bits in ("8", "4"):
        warn_idle({"bits": bits}, "without bits in --space")
    named: dict[str, Any] = {"none": None, "8": 8, "4": 4}
    positions = positions or default_positions(loaded.model)
    chosen = chosen[: max(1, math.ceil(positions / max_new_tokens))]
    traced = [encode(loaded.tokenizer, prompt) for prompt in chosen]
    timed = [] if no_confirm else [encode(loaded.tokenizer, prompt) for prompt in held_out]
    with open_passes(loaded, loading, talk, _known_threads(output, workers)) as opened:
        threads = (opened.threads or 1) // workers
        task = sampling.task(loaded.model, max_new_tokens, seed=seed, execution=loading.execution)
        within = space_for(
            opened,
            space,
            bits=named.get(bits, bits),
            allow_ends=allow_ends,
            context=typical_context(traced, max_new_tokens),
        )
        tried = {
            "bits": within.bits,
            "experts": within.experts,
            "window": within.windows,
            "vocabulary": within.vocabularies,
        }
        for part, values in tried.items():
            if part in space and not values:
                warn_idle({f"space {part}": True}, "with this model and these prompts")
        until = math.inf if timeout is None else started + timeout - min(WRITING, timeout / 5)
        steps = Search(
            loaded.model,
            traced,
            timed,
            task=task,
            space=within,
            parts=parts,
            positions=positions,
            first=first,
            progress=lambda what, share: talk.progress(f"{share:4.0%} {what}"),
            until=until,
        )
        steps.open(where, study_name)
        fail_abandoned(steps.study)
        steps.price()
        cost = steps.objective.cost
        write_text(output / "cost.json", json.dumps(cost, indent=1) + "\n")
        _say_bound(talk, steps)
        if timeout is not None:
            spent = time.monotonic() - started
            judging = min(JUDGING * timeout, LONGEST_JUDGING)
            left = max(MOMENT, until - judging - time.monotonic())
            talk.say(
                f"{timeout:.0f} s in all: {spent:.0f} s spent, {left:.0f} s for trials, then up to "
                f"{judging:.0f} s to {'time' if timed else 'judge'} the best drafts"
            )
            timeout = left
        further = worker_processes(
            workers - 1,
            threads,
            loading=loading.where,
            prompts=chosen,
            task=task,
            space=within,
            positions=positions,
            sampler=sampler,
            trials=trials,
            timeout=timeout,
            first=first,
            storage=where,
            study_name=study_name,
            cost=cost,
        )
        with cpu_threads(max(1, threads)), further:
            _run(steps, trials, sampler, timeout, output, talk)
        talk.progress("")
        steps.judge(repeats=repeats or 2)
        result = steps.result()
        looked_at = [*chosen, *(held_out if timed else [])]
        header = make_header(loaded, steps.opened, steps.task, looked_at, prompts)
    header["prompts"] |= {
        "traced": [prompt.id for prompt in chosen],
        "held_out": [prompt.id for prompt in looked_at[len(chosen) :]],
        "chat": chat,
    }
    study = {"name": study_name, "storage": redacted(where)}
    record = {**header, "kind": "search", "schema": SCHEMA, "study": study, **result.record}
    _finish(output, record, result, loaded.name, talk, as_json)


def _known_threads(output: Path, workers: int) -> int | None:
    """The number of threads that needs no measuring: from the costs of a study that is resumed.

    Several workers share all threads. None if the number must be measured.
    """
    import torch

    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((output / "cost.json").read_text())["place"]["threads"])
    return torch.get_num_threads() if workers > 1 else None


def default_positions(model: Any) -> int:
    """The number of tokens per trial, for trials of about a second. It depends on no clock."""
    if model.device.type != "cpu":
        return POSITIONS
    weights = sum(weight.numel() for weight in model.parameters())
    return max(FEWEST_POSITIONS, min(POSITIONS, int(WORK / weights)))


def split_prompts(prompts: Sequence[Prompt], *, timed: bool) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts into those to trace, in turn from every category, and those held out.

    Finalists are timed on the first prompts of each category: a third of all, HELD_OUT at most.

    Args:
        timed: whether they are timed; one prompt could not tell a draft from the default.

    Raises:
        ValueError: there are too few prompts.
    """
    mixed, count = in_turn(prompts), min(HELD_OUT, len(prompts) // 3)
    if timed and count < 2:
        raise ValueError(
            "a search needs at least 6 prompts, a third of them to time the best drafts on, got "
            f"{len(prompts)}; give more, or --no-confirm to trust the predictions"
        )
    if len(prompts) < 2:
        raise ValueError("a search needs at least 2 prompts, got 1; give more")
    count = max(1, count)
    return mixed[count:], mixed[:count]


def _run(
    steps: Search, trials: int | None, sampler: Any, timeout: float | None, output: Path, talk: Talk
) -> None:
    """Run the trials with a progress line. They are written to a file even after Ctrl-C."""
    from pandas import DataFrame

    from layerskip.search.record import trials_table
    from layerskip.search.study import standing

    started, before = time.monotonic(), standing(steps.study).finished

    def tell(at: Standing) -> None:
        spent, done = time.monotonic() - started, max(1, at.finished - before)
        left = math.inf if timeout is None else max(0.0, timeout - spent)
        if at.trials is not None:
            left = min(left, spent / done * (at.trials - at.finished))
        seconds = f", {left:.0f} s left" if left < math.inf else ""
        talk.progress(
            f"trials {at.finished}, of which guided {at.guided}, best {at.best:.2f}x"
            f"{steps.objective.prices.doubt} ({at.best_origin}){seconds}"
        )

    def keep() -> int:
        rows = trials_table(steps.study, steps.space)
        table = DataFrame(rows, dtype=object)  # failed trials have fewer columns
        sets = table.map(lambda each: json.dumps(each) if type(each) is dict else each)
        write_text(output / "trials.csv", sets.to_csv(index=False))
        return sum(row["state"] == "complete" for row in rows)

    try:
        steps.run(trials, sampler=sampler, timeout=timeout, on_trial=tell)
    except (KeyboardInterrupt, OSError, RuntimeError) as error:
        if not _interrupted(error):
            raise
        talk.say(f"{plural(keep(), 'finished trial')} kept; the same command resumes the search")
        raise KeyboardInterrupt from error
    keep()  # now, since the following steps may be interrupted, too
    at = standing(steps.study)
    talk.say(f"trials {at.finished}, of which guided {at.guided}")


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error: a lock interrupted during its release raises another one."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _interrupted(error.__context__)
    )


def _say_bound(talk: Talk, steps: Search) -> None:
    plain = 1.0 / steps.objective.prices.step
    talk.say(
        f"bound: no draft of {steps.space} is faster than {steps.bound:.1f}x plain decoding "
        f"({plain:.0f} tokens/s here)"
    )
    if doubt := steps.objective.prices.doubt:
        talk.say(
            f"costs: uncertain by{doubt}, as repeated timings differed; so are the predictions"
        )
    if steps.bound < LEAST_BOUND:
        warnings.warn(
            f"even a draft that is always right would gain less than {LEAST_BOUND - 1:.0%}",
            stacklevel=2,
        )


def _finish(
    output: Path, record: dict[str, Any], result: SearchResult, name: str, talk: Talk, as_json: bool
) -> None:
    """Write the files and print the results."""
    from layerskip.analysis import write_report

    here, skip = record["environment"], result.skip
    notes = {
        **(skip.notes or {}),
        "created": record["created"],
        "hardware": {
            **{key: here[key] for key in ("cpu", "devices")},
            **{key: record[key] for key in ("device", "dtype")},
        },
        "versions": {"layerskip": here["layerskip"], **here["packages"]},
        "prompts": record["prompts"],
    }
    skip = replace(skip, model=name, notes=notes)
    write_text(output / "search.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    skip.save(output / "skip.json")
    talk.progress("drawing the report")
    words = write_report([output / "search.json"], output / "report", talk.progress)
    talk.progress("")
    print(words)
    print(_table(result.finalists))
    talk.say(f"written to {output}: skip.json, trials.csv, cost.json, search.json, report/")
    if as_json:
        keys = "bound plain finalists best_exit winner default keep_default seconds"
        document = {"skip": skip.to_dict(), **{key: record[key] for key in keys.split()}}
        print(to_json({**document, "trials": len(record["trials"]), "output": str(output)}))


def _table(finalists: Sequence[Finalist]) -> str:
    """Format the finalists: speedups with 95% intervals, and what runs."""
    from layerskip.analysis.run_tables import same_text
    from layerskip.api.drafts import skip_label

    lines, runs = [["draft", "c", "alpha", "predicted", "measured", "same text"]], []
    for each in finalists:
        timed, what = each.confirmed, skip_label(each.skip, each.skip)
        line = [each.name, f"{each.costs.draft:.2f}", f"{each.alpha:.2f}"]
        line.append(ratio(each.predicted, each.low, each.high))
        line.append(ratio(timed["speedup"], timed["low"], timed["high"]) if timed else "-")
        lines.append([*line, same_text(timed or {}) or "-"])
        runs.append((each.name, f"{what}, lookup" if each.decoding.lookup else what))
    return "\n\n".join([aligned(lines), *([two_columns(runs)] if runs else [])])
