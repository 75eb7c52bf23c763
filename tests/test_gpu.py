"""What a CUDA device must give: the library's tokens, laws, cache and captured graphs.

Every test takes its device, and the CPU runs the same bodies under `-m slow`, so that they hold
somewhere already. `make test-gpu` runs them where there is a GPU. Float64 compares exactly, lower
precisions up to near-ties (ties.py).
"""

import warnings
from itertools import pairwise, product

import pytest
import torch
from engines import SKIPS, check_caches, decoder, request
from guesses import Guesses
from kinds import CONFIGS, skip_of
from models import FAMILIES, WINDOW, Erratic, lively_model, near, ragged
from sampling import LEVEL, p_value, sample_texts
from ties import partings

from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.backends import captured
from layerskip.config.registry import CONTROLLERS
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.noise import ACCEPT, DRAFT, TARGET, gumbel_noise, stream_key
from layerskip.model.opened_models import Sublayers

NEW_TOKENS = 20
LENGTHS = (WINDOW + 5, 3, WINDOW + 2)
SEEDS = (11, 12, 13)
TEMPERATURE = 0.8
# near-ties, as a share of the largest logit: passes of other lengths take other kernels
RESOLUTION = {torch.float32: 1e-4, torch.bfloat16: 8 * 2**-8, torch.float16: 8 * 2**-11}

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CPU = pytest.param("cpu", marks=pytest.mark.slow)


def ways(*families):
    """Parametrises (family, device, execution); on a CPU captured passes run again."""
    cases = []
    for family, execution in product(families, ("modules", "fused", "captured")):
        cases.append(pytest.param(family, "cuda", execution, marks=pytest.mark.gpu))
        cases.append(pytest.param(family, "cpu", execution, marks=pytest.mark.slow))
    return pytest.mark.parametrize(("family", "device", "execution"), cases)


@pytest.fixture(autouse=True)
def checks():
    """No test leaves the device's own check of waits switched on, or reduced precision."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        assert not torch.backends.cuda.matmul.allow_tf32


def library(model, ids, mask):
    """The library's own greedy texts, (B, W + n); each row alone, see test_parity.py."""
    new = [
        model.generate(i[m.bool()][None], max_new_tokens=NEW_TOKENS, do_sample=False)
        for i, m in zip(ids, mask, strict=True)
    ]
    return torch.cat([ids, torch.cat([text[:, -NEW_TOKENS:] for text in new])], dim=1)


def ours(model, ids, mask, *, sample=False, **settings):
    defaults = {"skip": SKIPS["scattered"], "controller": "fixed", "max_draft_length": 4}
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        custom_generate=LayerSkipDecoding(**(defaults | settings)),
        do_sample=sample,
        **({"temperature": TEMPERATURE, "top_k": 0} if sample else {}),
        return_dict_in_generate=True,
    )


def placed(family, device, **changes):
    """A model and ragged prompts on a device."""
    ids, mask = ragged(LENGTHS, seed=3)
    return lively_model(family, **changes).to(device), ids.to(device), mask.to(device)


# ---- Tokens. ----


@ways(*FAMILIES)
def test_greedy_tokens_are_the_librarys(family, device, execution):
    model, ids, mask = placed(family, device)
    want = library(model, ids, mask)
    trees = {"skip": None, "sources": [Guesses(want[:, ids.shape[1] :].tolist())]}
    low = {"skip": SkipConfig.low_precision(8)}
    for settings in ({"skip": SKIPS["early exit"]}, {"controller": Erratic()}, trees, low):
        got = ours(model, ids, mask, execution=execution, **settings)
        assert got.sequences.device.type == device
        assert got.sequences.tolist() == want.tolist()
        assert got.stats.num_draft_tokens > 0


@pytest.mark.parametrize("dtype", RESOLUTION, ids=str)
@ways("llama", "gemma2", "gemma3", "qwen3")
def test_lower_precisions_agree_but_for_near_ties(family, device, execution, dtype):
    model, ids, mask = placed(family, device, dtype=dtype)
    got = ours(model, ids, mask, execution=execution)
    sampled = ours(model, ids, mask, sample=True, seeds=SEEDS, execution=execution)
    plain = ours(model, ids, mask, sample=True, seeds=SEEDS, enabled=False, execution="modules")
    keys = [stream_key(seed) for seed in SEEDS]
    gaps = partings(model, mask, got.sequences, library(model, ids, mask))
    gaps += partings(
        model, mask, sampled.sequences, plain.sequences, keys=keys, temperature=TEMPERATURE
    )
    with torch.no_grad():
        largest = model(ids[:1]).logits.abs().max().item()
    assert max(gaps, default=0) <= RESOLUTION[dtype] * largest / TEMPERATURE
    assert len(gaps) <= (0 if dtype == torch.float32 else 3)  # of 6 texts
    assert got.stats.num_draft_tokens > got.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("controller", [*CONTROLLERS, "erratic"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_controller(controller, device):
    model, ids, mask = placed("llama", device)
    got = ours(model, ids, mask, controller=Erratic() if controller == "erratic" else controller)
    assert got.sequences.tolist() == library(model, ids, mask).tolist()


@pytest.mark.parametrize("kind", [*CONFIGS, "assistant"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_trained_drafts_and_second_models(kind, device, tmp_path):
    """Their weights come from files, and from another place than the model's."""
    model, ids, mask = placed("gemma3", "cpu")
    drafts = {"skip": None, "assistant": near(model, 0.4).to(device)}
    if kind != "assistant":
        drafts = {"skip": skip_of(kind, model, tmp_path)}
    model, ids, mask = model.to(device), ids.to(device), mask.to(device)
    plain = ours(model, ids, mask, sample=True, seeds=SEEDS, enabled=False)
    for execution in ("modules", "fused"):
        drafts["execution"] = execution
        got = ours(model, ids, mask, **drafts)
        assert got.sequences.tolist() == library(model, ids, mask).tolist()
        assert got.stats.num_accepted_tokens > 0
        sampled = ours(model, ids, mask, sample=True, seeds=SEEDS, **drafts)
        assert sampled.sequences.tolist() == plain.sequences.tolist()


def decoded(opened, ids, cuts, bits):
    """Logits after the tokens from the first cut on, decoded in passes from cut to cut."""
    blocks = [*opened.blocks, opened.head]
    if bits is not None:
        blocks = opened.weights.blocks(SkipConfig.low_precision(bits))
    cache, rotary = opened.new_cache(len(ids), 400), opened.rotary(400, 400)
    logits = []
    for first, end in pairwise([0, *cuts]):
        cache.place([first] * len(ids), end - first)
        step = opened.feed(ids[:, first:end], cache, rotary)
        logits.append(opened.backend.run(*step, blocks))
        cache.prefilled = True
    return torch.cat(logits[1:], 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_kernels_compute_what_fused_blocks_do(family, dtype, error, bits):
    """In several parts of an attention; a token has the same bits alone and among others."""
    model = lively_model(family, dtype=dtype).cuda()
    ids = torch.randint(3, 90, (2, 316), generator=torch.Generator().manual_seed(0)).cuda()
    own, library = Sublayers(model, "captured"), Sublayers(model, "fused")
    assert all(block.few is not None for block in own.blocks[::2])
    with torch.inference_mode():
        got, want = (decoded(opened, ids, (300, 316), bits) for opened in (own, library))
        alone = decoded(own, ids, range(300, 317), bits)
    assert (got - want).norm() < error * want.norm()
    assert torch.equal(alone, got)


# ---- Noise and laws ----


@pytest.mark.parametrize("purpose", [TARGET, DRAFT, ACCEPT])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_noise_is_that_of_the_cpu(purpose, device):
    """The same uniforms; logarithms are the device's own, to the last bits."""
    keys, places = [stream_key(seed) for seed in SEEDS], [0, 7, 300]
    got = gumbel_noise(keys, places, 4099, purpose=purpose, device=device)
    assert got.device.type == device
    want = gumbel_noise(keys, places, 4099, purpose=purpose)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


@ways("llama", "gemma2", "qwen3")
def test_coupled_texts_are_those_of_plain_decoding(family, device, execution):
    model, ids, mask = placed(family, device)
    plain = ours(model, ids, mask, sample=True, seeds=SEEDS, enabled=False)
    got = ours(model, ids, mask, sample=True, seeds=SEEDS, execution=execution)
    assert got.sequences.tolist() == plain.sequences.tolist()
    assert 0 < got.stats.num_accepted_tokens < got.stats.num_draft_tokens
    host, there = model.cpu(), (ids.cpu(), mask.cpu())
    assert (
        got.sequences.tolist()
        == ours(host, *there, sample=True, seeds=SEEDS, enabled=False).sequences.tolist()
    )


@ways("llama")
def test_rejection_texts_of_rows_are_those_of_rows_alone(family, device, execution):
    model, ids, mask = placed(family, device)
    how = {"sample": True, "acceptance": "rejection", "execution": execution}
    got = ours(model, ids, mask, seeds=SEEDS, **how)
    assert 0 < got.stats.num_accepted_tokens < got.stats.num_draft_tokens
    for row, seed in enumerate(SEEDS):
        real = mask[row].bool()
        alone = ours(model, ids[row : row + 1, real], mask[row : row + 1, real], seed=seed, **how)
        new = alone.sequences[0, -NEW_TOKENS:]
        assert new.tolist() == got.sequences[row, -NEW_TOKENS:].tolist()


@pytest.mark.parametrize("rejection", [False, True], ids=["coupled", "rejection"])
@pytest.mark.parametrize("execution", ["fused", "captured"])
@pytest.mark.parametrize("device", [CUDA])  # the CPU's: test_every_kind.py
def test_texts_follow_the_targets_law(device, execution, rejection):
    counts, ((drafted, accepted),) = sample_texts(
        "top-p",
        acceptance="rejection" if rejection else "coupled",
        execution=execution,
        device=device,
    )
    assert 0.1 * drafted < accepted < 0.9 * drafted
    assert p_value(counts, "top-p") > LEVEL


# ---- The cache, captured graphs, waiting. ----


@pytest.mark.parametrize("skip", ["early exit", "scattered"])
@ways("llama", "gemma2")
def test_cache_after_every_round_equals_a_fresh_prefill(family, skip, device, execution):
    check_caches(family, skip, execution, device)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_shape_replays_what_was_captured_for_it(device):
    """Draft lengths, prompts and ends in any order, then all again: nothing is captured anew."""
    model, ids, mask = placed("llama", device, num_hidden_layers=2)
    skip = SkipConfig.early_exit(1)
    want = {rows: library(model, ids[:rows], mask[:rows]).tolist() for rows in (1, 3)}

    def run():
        for longest in (1, 4, 2, 8, 3, 5, 7):
            for rows in (3, 1):
                how = {"skip": skip, "lookup": False, "execution": "captured"}
                how["max_draft_length"] = longest
                got = ours(model, ids[:rows], mask[:rows], **how)
                assert got.sequences.tolist() == want[rows]
                assert got.stats.num_accepted_tokens > 0

    run()
    run()  # what the first run sees once is captured
    before = captured.capture_seconds()
    with torch.no_grad():  # graphs read the weights where they lie
        for weight in model.parameters():
            weight.mul_(1.05)
    want = {rows: library(model, ids[:rows], mask[:rows]).tolist() for rows in (1, 3)}
    run()
    assert captured.capture_seconds() == before
    assert before > 0 or device == "cpu"


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize(
    ("device", "execution"),
    [
        ("cpu", "fused"),
        pytest.param("cuda", "fused", marks=pytest.mark.gpu),
        pytest.param("cuda", "captured", marks=pytest.mark.gpu),
    ],
)
def test_the_host_waits_once_a_round(device, execution, rejection):
    """Counted by the device; on the CPU nothing waits, and test_engine.py counts reads."""
    model = lively_model("llama").to(device)
    asked = request(sample=True, acceptance="rejection" if rejection else "coupled")
    run = decoder(model, asked, controller=Fixed(4), execution=execution)
    rounds = 0
    with torch.no_grad(), warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        for each in run.rounds():
            rounds += 1
            if rounds == 4:  # captured by now
                waits.clear()
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
            if each.finished[0]:
                break
    assert rounds > 4
    assert not waits  # but for the event after which the host reads the tokens
