"""The demo command: plain and self-speculative decoding side by side, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from layerskip.cli.drafting import Sources, choose
from layerskip.cli.options import (
    AsJson,
    Draft,
    Loading,
    MaxNewTokens,
    Quiet,
    Seed,
    by_source,
    counts,
    open_model,
    open_passes,
    shipped_prompts,
    to_json,
    write_out,
)
from layerskip.cli.terminal import (
    Talk,
    TextStream,
    decode_text,
    differences,
    title,
    two_columns,
    verdict,
    wrap,
)

if TYPE_CHECKING:
    from layerskip.bench.demo import SideBySide
    from layerskip.cli.drafting import Drafts


_DEMO_CHECK_TOKENS = 48  # of each prompt: so that the demo stays short


def demo(
    *,
    draft: Draft,
    sources: Sources,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    loading: Loading,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Decode plainly and self-speculatively: the same tokens, the speedup, and why."""
    given, text = draft.given(), sources.text()
    talk = Talk(quiet)
    loaded = open_model(loading, talk)
    second = sources.second(loading, loaded, talk)

    from layerskip.bench.checks import compare
    from layerskip.bench.demo import REPEATS, TEMPERATURE, side_by_side
    from layerskip.bench.methods import Task
    from layerskip.checkpoints import encode

    prompts = shipped_prompts(2)
    inputs = [encode(loaded.tokenizer, each).to(loaded.model.device) for each in prompts]
    timed = inputs[::2]  # one of each kind
    with open_passes(loaded, loading, talk) as opened:
        passes, threads = opened.describe(), opened.threads
        other = None if second is None else second.opened(loading.execution)
        drafts = choose(given, sources, text, loaded, opened, talk, other)
        if not drafts:
            raise ValueError(f"there are no drafts to show: {drafts.words}; name a skip config")
        talk.say(f"drafts: {drafts.words}")
        print(title("Prompt, held out from training"))
        print(prompts[0].text)
        print(title(f"Continued by sampling, temperature {TEMPERATURE}, seed {seed}"), flush=True)
        found = side_by_side(
            loaded.model,
            timed,
            drafts.skip,
            lookup=drafts.lookup,
            assistant=drafts.assistant,
            max_new_tokens=max_new_tokens,
            seed=seed,
            execution=loading.execution,
            streamer=TextStream(loaded.tokenizer, write_out),
            note=talk.progress,
        )
        length, execution = min(max_new_tokens, _DEMO_CHECK_TOKENS), loading.execution
        talk.progress("checking greedy text against transformers")
        beside: dict[str, Any] = {"lookup": drafts.lookup, "assistant": drafts.assistant}
        greedily = Task(length, execution=execution)
        greedy = compare(loaded.model, inputs, drafts.skip, greedily, **beside)
        talk.progress("checking sampled text against plain decoding")
        sampled = Task(length, True, TEMPERATURE, seed=seed, execution=execution)
        coupled = compare(loaded.model, inputs, drafts.skip, sampled, **beside)
    talk.progress("")
    comparisons = [found.comparison, coupled, greedy]
    passed = not any(comparison.faults for comparison in comparisons)
    identical = not found.comparison.differences
    print(title("The same text?"))
    counted = f"{len(timed)} prompts gives the same {sum(map(len, found.tokens))} tokens"
    print(f"plain decoding of {counted}: {'yes' if identical else 'no'}")
    rows = [("sampled = plain", verdict(coupled)), ("greedy = transformers", verdict(greedy))]
    print(two_columns(rows))
    ids = [each.id for each in prompts]
    for comparison, names in zip(comparisons, (ids[::2], ids, ids), strict=True):
        for line in differences(comparison, names, loaded.tokenizer):
            print(wrap(line))
    why = _why(found, drafts)
    print(title(f"How fast? ({len(timed)} prompts of different kinds, interleaved)"))
    if threads is not None:
        print(f"best of {REPEATS} on {threads} CPU thread{'s' if threads > 1 else ''}")
    speed = found.tokens_per_second
    print(
        two_columns(
            [
                ("transformers generate", f"{speed['transformers']:.1f} tokens/s"),
                ("plain, this engine", f"{speed['plain']:.1f} tokens/s"),
                ("self-speculative", f"{speed['self']:.1f} tokens/s"),
                ("speedup over plain", f"{why['speedup']:.2f}x"),
                ("over generate", f"{speed['self'] / speed['transformers']:.2f}x"),
            ]
        )
    )
    print(title("Why?"))
    print(_why_table(why))
    if as_json:
        document = {
            "model": loaded.name,
            "passed": passed,
            "identical": identical,
            "seed": seed,
            "temperature": TEMPERATURE,
            "threads": threads,
            "passes": passes,
            "repeats": REPEATS,
            "prompt": prompts[0].text,
            "text": decode_text(loaded.tokenizer, found.tokens[0]),
            "token_ids": found.tokens[0],
            "new_tokens": len(found.tokens[0]),
            "seconds": found.seconds,
            "tokens_per_second": speed,
            **why,
            "greedy": greedy.to_dict(),
            "coupled": coupled.to_dict(),
        }
        print(to_json(document))
    if not passed:
        raise typer.Exit(1)


def _why(found: SideBySide, drafts: Drafts) -> dict[str, Any]:
    """The numbers behind the speedup, JSON values."""
    stats, costs = found.stats, found.costs
    drafted = round(stats.num_draft_tokens / stats.num_drafts) if stats.num_drafts else 0
    own = None if costs is None or drafts.skip is None else costs.draft
    return {
        "draft": drafts.words,
        "speedup": found.speedup,
        **counts(stats, drafts.names),
        "draft_cost": own,
        "verify_tokens": drafted + 1,
        "verify_cost": None if costs is None else costs.verify_cost(drafted + 1),
        "bound": None if own is None or drafts.lookup else 1 / own,
        "predicted_speedup": found.predicted_speedup,
    }


def _why_table(why: dict[str, Any]) -> str:
    rows = [("drafts", why["draft"])]
    if not why["num_drafts"]:
        rows.append(("drafting", "turned itself off: it would not have paid here"))
    else:
        rows += [
            *([("drafts by source", by_source(why))] if len(why["sources"]) > 1 else []),
            ("acceptance rate", f"{why['acceptance_rate']:.2f} of drafted tokens"),
            ("mean acceptance length", f"{why['mean_acceptance_length']:.2f} tokens per verify"),
        ]
    own = why["draft_cost"]
    if own is not None:
        rows.append(("draft step, c", f"{own:.3f} target steps"))
    if why["verify_cost"] is not None:
        verify = f"verify pass, v({why['verify_tokens']})"
        rows.append((verify, f"{why['verify_cost']:.2f} target steps"))
    if own is not None:  # looked-up drafts cost nothing, so that nothing bounds them
        bound = "no draft beats 1/c" if why["bound"] else "no draft of its own beats 1/c"
        rows.append((bound, f"{1 / own:.1f}x"))
    if why["predicted_speedup"] is not None:
        rows.append(("speedup these predict", f"{why['predicted_speedup']:.2f}x"))
    rows.append(("speedup measured", f"{why['speedup']:.2f}x"))
    return two_columns(rows)
