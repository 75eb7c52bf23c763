"""The chat command: a conversation in a terminal, or one message per line of standard input."""

from __future__ import annotations

import json
import os
import signal
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cli import flags
from layerskip.cli.inputs import read_pictures
from layerskip.cli.opening import open_decoding, open_model
from layerskip.cli.terminal import Talk, TextStream, reading, shown, two_columns, write_out
from layerskip.config.skips import COLDEST
from layerskip.files.writing import write_text
from layerskip.texts.pictures import parts_of, with_pictures
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import Detokenizer, decode_text, plural

if TYPE_CHECKING:
    from layerskip.api.generation import GenerationOutput
    from layerskip.api.loading import Loaded
    from layerskip.api.session import Session
    from layerskip.decoding.rounds import Round

COMMANDS = {
    "/seed N": "seed of the next answer; later ones use N + 1, N + 2, ...; alone: random seeds",
    "/temperature T": "sample at this temperature; 0: take the most likely tokens",
    "/system TEXT": "change the system message (alone: none) and start a new conversation",
    "/draft": "show which tokens of the last answer were drafted, and the gain",
    "/retry": "answer the last message again",
    "/image FILE": "show this picture with the next message",
    "/save FILE": "write the conversation to a file that layerskip run and generate can read",
    "/reset": "forget the conversation and return to the first seed",
    "/forget": "forget the earlier answers of which drafts are made, also those in a folder",
    "/help": "show these commands",
    "/quit": "quit, like Ctrl-D; Ctrl-C only ends an answer",
}
_SHOWN = {  # by source: the colour of its tokens, and a description
    "forced": ("yellow", "the only allowed token"),
    "lookup": ("green", "looked up in the text"),
    "earlier": ("yellow", "looked up in earlier answers"),
    "sublayers": ("cyan", "drafted by the model itself"),
    "assistant": ("magenta", "drafted by the second model"),
    "mtp": ("cyan", "drafted by the checkpoint's own head"),
    "eagle3": ("magenta", "drafted by the EAGLE-3 head"),
    "dflash": ("magenta", "drafted by the DFlash drafter"),
}


def _shown(source: str) -> tuple[str, str]:
    """Colour and description of a source. Several sets of sublayers have numbered names."""
    return _SHOWN.get(source.partition(" ")[0], ("blue", f"drafted by {source}"))


def chat(
    *,
    image: flags.Images = None,
    writing: flags.Writing,
    decoding: flags.Decoding,
    max_new_tokens: flags.MaxNewTokens = 1024,
    seed: flags.DrawnSeed = None,
    loading: flags.Loading,
    quiet: flags.Quiet = False,
) -> None:
    """Talk with a model in the terminal; /help lists the commands.

    If standard input is not a terminal, each line is a message, and answers are plain text.

    Example: layerskip chat HuggingFaceTB/SmolLM2-135M-Instruct
    """
    pictures = read_pictures(image)
    talk = Talk(quiet)
    writing = writing.checked(talk, seed)
    loaded = open_model(loading, talk)
    _ = loaded.processor if pictures else None  # raises for a model without vision
    if not loaded.tokenizer.chat_template:
        raise ValueError(
            f"{loaded.name} has no chat template: it was not made for conversations; choose one "
            "that was, such as HuggingFaceTB/SmolLM2-135M-Instruct, or use layerskip generate"
        )
    with open_decoding(decoding, writing, loading, loaded, talk, remember="memory") as opened:
        settings = opened.settings | opened.law
        opened.model.backend.long_lived = True
        from layerskip.api.session import Session

        session = Session(loaded.model, **settings | writing.arguments(loaded.tokenizer))
        form = partial(writing.processors, loaded)
        conversation = Conversation(
            loaded, session, talk, form, max_new_tokens, writing.system, seed, writing.do_sample
        )
        conversation.pictures += pictures
        typed = sys.stdin.isatty()
        if typed:
            talk.say("/help shows the commands; Ctrl-C ends an answer, Ctrl-D the conversation")
        with _keys_kept() if typed else nullcontext():
            for line in typed_lines() if typed else (line.rstrip("\n") for line in sys.stdin):
                if line.startswith("/"):
                    if not _command(conversation, line, opened.names):
                        break
                elif line.strip():
                    conversation.say(line)


@contextmanager
def _keys_kept() -> Iterator[None]:
    """Keep what is typed during an answer, unseen, for the next message; also after Ctrl-C.

    While a message is typed, prompt_toolkit sets another mode of the terminal.
    """
    before = termios.tcgetattr(sys.stdin)
    read, written, control, local, *rest = before
    read &= ~termios.ICRNL  # Enter stays what it is, also after Alt
    local = local & ~termios.ECHO & ~termios.ICANON | termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, [read, written, control, local, *rest])
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def typed_lines() -> Iterator[str]:
    """Yield typed messages, with a history. Alt-Enter or pasting gives several lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    names = [command.split()[0] for command in COMMANDS]
    typing: PromptSession[str] = PromptSession(
        completer=WordCompleter(names, sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        reserve_space_for_menu=3,
    )
    while True:
        try:
            yield typing.prompt("> ")
        except KeyboardInterrupt:
            continue  # drop the typed text, as a shell does
        except EOFError:
            return


@dataclass
class Conversation:
    """The messages so far, and the settings of the next answer.

    Attributes:
        form: gives the logits processors after a prompt.
        system: the system message, or None.
        seed: seed of the first answer; later answers count up from it. None: random seeds.
        answers: number of answers since the seed was set or the conversation was forgotten.
        temperature: None stands for the model's setting.
        last: the result of the last answer.
        pictures: shown with the next message.
    """

    loaded: Loaded
    session: Session
    talk: Talk
    form: Callable[[Sequence[int]], list[Any]]
    max_new_tokens: int
    system: str | None
    seed: int | None
    do_sample: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    temperature: float | None = None
    last: GenerationOutput | None = None
    answers: int = 0
    pictures: list[Any] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all messages."""
        self.messages.clear()
        self.last, self.answers = None, 0

    def retry(self) -> None:
        """Answer the last message again. The old answer stays if the new one fails."""
        if not self.messages:
            self.talk.say("there is no message yet")
            return
        *self.messages, message, answer = self.messages
        before = len(self.messages)
        self._say(message)
        if len(self.messages) == before:
            self.messages += [message, answer]

    def save(self, path: Path) -> None:
        """Write the conversation so far to a file."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [
            {**each, "content": parts_of(each)[-1]["text"]} for each in system + self.messages
        ]
        try:
            write_text(path, json.dumps({"messages": messages}) + "\n")
        except OSError as error:
            self.talk.say(f"cannot write {path}: {error.strerror}")
            return
        self.talk.say(
            f"{plural(len(self.messages), 'message')} written to {path}, without pictures"
        )

    def show(self, path: Path) -> None:
        """Show a picture with the next message."""
        try:
            _ = self.loaded.processor  # raises for a model without vision
            self.pictures += read_pictures([path])
            self.talk.say(f"the next message shows {plural(len(self.pictures), 'picture')}")
        except ValueError as error:
            self.talk.say(str(error))

    def say(self, text: str) -> None:
        """Send a message to the model, and write its answer as it comes.

        After Ctrl-C, the text written so far is the answer. A message that cannot be answered is
        dropped with a warning.
        """
        pictures, self.pictures = self.pictures, []
        self._say(with_pictures({"role": "user", "content": text}, pictures))

    def _say(self, message: dict[str, Any]) -> None:
        try:
            output, ended = self._answer([*self.messages, message])
        except KeyboardInterrupt:  # before the first token, or pressed twice
            self.talk.say("(stopped; your message is dropped)")
            return
        except ValueError as error:
            warnings.warn(f"{error}; /reset forgets the conversation", stacklevel=2)
            return
        assert output.rounds is not None
        tokens = [token for each in output.rounds for token in each.tokens[0]]
        answer = decode_text(self.loaded.tokenizer, tokens)
        self.messages += [message, {"role": "assistant", "content": answer}]
        self.last = output
        if ended:
            self.talk.say("(stopped)")

    def _answer(self, messages: Sequence[dict[str, Any]]) -> tuple[GenerationOutput, bool]:
        """Write the answer; returns it, and whether the user stopped it."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = Prompt(id="1", messages=(*before, *messages))
        inputs = self.loaded.inputs(prompt)
        config = self.loaded.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
        ids = inputs["input_ids"][0].tolist()
        room = max(1, min(self.max_new_tokens, limit - len(ids)))
        show = reading(self.talk)
        with _interrupts() as interrupted:

            def progress(done: int, whole: int) -> None:
                if interrupted():
                    raise KeyboardInterrupt
                show(done, whole)

            output = self.session.generate(
                inputs,
                streamer=TextStream(self.loaded.tokenizer, write_out),
                stopping_criteria=[lambda *_: interrupted()],  # end the answer after this token
                seed=self._next_seed(),
                progress=progress,
                clock=time.perf_counter,
                max_new_tokens=room,
                do_sample=self.do_sample,
                logits_processor=self.form(ids),
                **({} if self.temperature is None else {"temperature": self.temperature}),
            )
            return output, interrupted()

    def _next_seed(self) -> int | None:
        if not self.do_sample:
            return None
        number, self.answers = self.answers, self.answers + 1
        return int.from_bytes(os.urandom(4)) if self.seed is None else self.seed + number


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed. Only a second press raises."""
    pressed: list[int] = []

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------------------------------------
# Commands


def _command(conversation: Conversation, line: str, names: Sequence[str]) -> bool:
    """Run a line that begins with a slash. Returns False to end the conversation."""
    name, _, rest = line.partition(" ")
    rest, talk = rest.strip(), conversation.talk
    if name == "/quit":
        return False
    if name == "/seed":
        if rest and not rest.isdecimal():
            talk.say(f"a seed must be a whole number, got {rest}; for example /seed 7")
            return True
        conversation.seed, conversation.answers = int(rest) if rest else None, 0
        words = f"of the next answer is {rest}" if rest else "is random for each answer"
        idle = "" if conversation.do_sample else ", but answers are greedy without /temperature"
        talk.say(f"the seed {words}{idle}")
    elif name == "/temperature":
        try:
            value = float(rest)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            talk.say(f"a temperature must be 0 or above, got {rest!r}; example: /temperature 0.7")
            return True
        value = value if value >= COLDEST else 0.0
        conversation.do_sample, conversation.temperature = value > 0, value or None
        words = f"sampled at temperature {value:g}" if value else "the most likely tokens"
        talk.say(f"answers are now {words}")
    elif name == "/system":
        conversation.system = rest or None
        conversation.reset()
        talk.say("a new conversation, " + ("with that system message" if rest else "without one"))
    elif name == "/draft":
        _draft(conversation, names)
    elif name == "/retry":
        conversation.retry()
    elif name in ("/image", "/save") and not rest:
        example = "cat.png" if name == "/image" else "chat.jsonl"
        talk.say(f"give a file name, for example {name} {example}")
    elif name == "/image":
        conversation.show(Path(rest))
    elif name == "/save":
        conversation.save(Path(rest))
    elif name == "/reset":
        conversation.reset()
        talk.say("the conversation is forgotten")
    elif name == "/forget":
        conversation.session.forget()
        talk.say("earlier answers are forgotten")
    elif name == "/help":
        write_out(two_columns(list(COMMANDS.items())) + "\n")
    else:
        talk.say(f"there is no command {name}; see /help (a message may begin with a space)")
    return True


def _draft(conversation: Conversation, names: Sequence[str]) -> None:
    """Show the last answer with drafted tokens marked, and what drafting gained."""
    from rich.console import Console
    from rich.text import Text

    output = conversation.last
    if output is None:
        conversation.talk.say("there is no answer yet")
        return
    assert output.rounds is not None
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    coloured = console.color_system is not None and not console.no_color
    answer = Text()
    for piece, source in pieces(output.rounds, conversation.loaded.tokenizer, names):
        if source is None:
            answer.append(shown(piece))
        else:
            colour, _ = _shown(source)
            answer.append(shown(piece if coloured else f"[{piece}]"), colour)
    console.print(answer)
    legend = Text("\n")
    for colour, meaning in dict.fromkeys(map(_shown, names)):
        legend.append(meaning, colour).append("; ")
    if not names:
        legend.append("there are no draft sources")
    else:
        legend.append("" if coloured else "[drafted], ").append("the rest comes from the model")
    console.print(legend)
    console.print(Text(_gain(output)))


def pieces(
    rounds: Sequence[Round], tokenizer: Any, names: Sequence[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield pieces of an answer's text, each with the source that drafted it, if any."""
    decoder = Detokenizer(tokenizer)  # holds a character back until all its bytes are there
    for each in rounds:
        emitted, accepted, source = each.tokens[0], each.accepted[0], each.source_of(0)
        for part, drafter in ((emitted[:accepted], source), (emitted[accepted:], None)):
            if text := decoder.put(part):
                yield text, None if drafter is None else names[drafter]
    if text := decoder.end():
        yield text, None


def _gain(output: GenerationOutput) -> str:
    """Describe what drafts gained, and the speed of the answer."""
    stats, rounds = output.stats, output.rounds
    assert stats is not None
    assert rounds is not None
    times = [each.times for each in rounds if each.times is not None]
    words = (
        f"{plural(stats.num_new_tokens, 'token')} in {plural(1 + stats.num_rounds, 'pass')} of the "
        "model; drafted "
        f"{stats.num_draft_tokens}, accepted {stats.num_accepted_tokens}"
    )
    if stats.num_rounds:
        seconds = times[-1][-1] - times[0][-1]
        words += (
            f"; {stats.tokens_per_round:.2f} tokens per pass (1 without drafts), "
            f"{(stats.num_new_tokens - 1) / seconds:.1f} tokens/s after the first"
        )
    if stats.num_known_tokens:
        words += f"; {plural(stats.num_known_tokens, 'token')} cached from earlier turns"
    return words + (f"; seed {stats.seeds[0]}" if stats.seeds else "")
