"""The demo command: a small benchmark, a streamed text, and an explanation of the results."""

from __future__ import annotations

import textwrap
from typing import Any

import typer

from layerskip.cli import terminal
from layerskip.cli.flags import AsJson, DraftFlags, Loading, MaxNewTokens, Quiet, Seed
from layerskip.cli.inputs import shipped_prompts
from layerskip.cli.opening import open_checked_drafts
from layerskip.texts.tokens import decode_text

TEMPERATURE, REPEATS = 0.8, 3
GREEDY_TOKENS = 48  # per prompt, to keep the demo short


def demo(
    *,
    draft: DraftFlags,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    loading: Loading,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Show that drafting changes no text, and how fast it is.

    Example: layerskip demo demo-gemma2
    """
    talk, prompts = terminal.Talk(quiet), shipped_prompts(1)
    with open_checked_drafts(draft, loading, talk) as opened:
        from layerskip.analysis.run_tables import COMPARED, headlines, same_text
        from layerskip.analysis.runs import ALL, Run
        from layerskip.bench.batches import encode_all, make_batches
        from layerskip.bench.methods import Engine, Method, Peer, Task
        from layerskip.bench.runner import benchmark

        loaded, model, skip = opened.loaded, opened.loaded.model, opened.settings["skip"]
        tokenizer = loaded.tokenizer
        passes, threads = opened.model.describe(), opened.model.threads
        encoded = encode_all(tokenizer, prompts, model.device)
        batches, _ = make_batches(encoded, [1], 0)
        sampled = Task(max_new_tokens, True, TEMPERATURE, seed=seed, execution=loading.execution)
        greedy = Task(min(max_new_tokens, GREEDY_TOKENS), execution=loading.execution)
        print(terminal.title("A prompt that was not used in training"))
        print(textwrap.dedent(prompts[0].text or "").rstrip())
        law = f"temperature {TEMPERATURE}, seed {seed}"
        print(terminal.title(f"Continued by sampling, {law}"), flush=True)
        ours = Engine(model, sampled, "self", skip, **opened.sources)
        stream = terminal.TextStream(tokenizer, terminal.write_out)
        shown = ours.generate(batches[0], streamer=stream)
        rows = {}  # headline numbers by method, for sampled and greedy decoding
        for task in (sampled, greedy):
            ours = Engine(model, task, "self", skip, **opened.sources)
            methods: list[Method] = [Peer(model, task), Engine(model, task), ours]
            records: list[dict[str, Any]] = []
            benchmark(
                model,
                task,
                methods,
                batches,
                repeats=REPEATS if task.do_sample else 1,
                warmup=1 if task.do_sample else 0,
                write=records.append,
                note=lambda what, share: talk.progress(f"measuring, {share:.0%}: prompt {what}"),
            )
            described = [each.describe() for each in methods]
            header = {"methods": described, "baseline": "plain", "prompts": {"tasks": True}}
            numbers = headlines(Run("demo", header, records, ()))
            rows[task] = {each["method"]: each for each in numbers if each["task"] == ALL}
    talk.progress("")
    same = {
        law: {name: sum(rows[task][each][name] for each in of) for name in COMPARED}
        for law, task, of in (("coupled", sampled, ["self"]), ("greedy", greedy, ["plain", "self"]))
    }
    names = {"generate": "transformers generate", "plain": "plain, this engine"}
    speed = {name: rows[sampled][name]["tokens_per_second"] for name in (*names, "self")}
    assert shown.stats is not None
    why = terminal.counts(shown.stats, opened.names)
    cost = shown.costs.draft if shown.costs is not None and skip is not None else None
    tokens = shown.sequences[0, batches[0].input_ids.shape[1] :].tolist()
    document = {
        "model": loaded.name,
        "passed": not any(each["faults"] for each in same.values()),
        "seed": seed,
        "temperature": TEMPERATURE,
        "threads": threads,
        "passes": passes,
        "prompt": prompts[0].text,
        "text": decode_text(tokenizer, tokens),
        "token_ids": tokens,
        **same,
        "tokens_per_second": speed,
        "speedup": speed["self"] / speed["plain"],
        "draft": opened.plan.summary,
        "draft_cost": cost,
        **why,
    }
    print(terminal.title("The same text?"))
    words = [f"texts equal: {same_text(each)}" for each in same.values()]
    laws = ("sampled = plain", "greedy = transformers")
    print(terminal.two_columns(list(zip(laws, words, strict=True))))
    print(terminal.title(f"How fast? ({len(prompts)} prompts of different kinds, interleaved)"))
    lines = [(names.get(n, "self-speculative"), f"{s:.1f} tokens/s") for n, s in speed.items()]
    lines.append(("speedup over plain", f"{document['speedup']:.2f}x"))
    lines.append(("over generate", f"{speed['self'] / speed['generate']:.2f}x"))
    print(terminal.two_columns(lines))
    print(terminal.title("Why? (for the text above)"))
    lines = [("drafts", opened.plan.summary)]
    if why["num_drafts"]:
        lines.append(("drafts by source", terminal.by_source(why)))
        lines.append(("acceptance rate", f"{why['acceptance_rate']:.2f} of drafted tokens"))
        lines.append(("tokens per verify", f"{why['mean_acceptance_length']:.2f}"))
    else:
        lines.append(("drafting", "turned itself off: it would not have paid here"))
    if cost is not None:
        lines.append(("draft step, c", f"{cost:.3f} target steps"))
        lines.append(("gain of its drafts", f"at most 1/c = {1 / cost:.1f}x"))
    print(terminal.two_columns(lines))
    print(terminal.title("What next?"))
    for command in ("generate {} --prompt TEXT", "check {}", "benchmark {} --output FILE"):
        print(f"layerskip {command.format(loaded.name)}")
    if as_json:
        print(terminal.to_json(document))
    if not document["passed"]:
        raise typer.Exit(1)
