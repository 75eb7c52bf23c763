"""The source that looks drafts up: the tokens that followed the same words before.

The match is the longest suffix of a row's history that occurred before, in it or in other texts. It
is found with suffix automata (Blumer et al. 1985), in microseconds per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

from layerskip.decoding.sources.base import Batch, Proposal, RowsState, Source, State

_END = -1  # marks the end of every other text; not a token
_ANCESTORS = 64  # states updated per token at most; only loops have more


class Automaton:
    """The suffix automaton of a sequence that grows token by token, amortised O(1) each.

    A state stands for all substrings that end at the same places. Its link leads to the state of
    their longest suffix that also ends at other places.

    Attributes:
        follower: the place after the latest (in loops a late) earlier occurrence of the text's end.
        following, link, length, end: for every state its transitions, its link, the length of its
            longest substring, and its last end (-1: only at the end of a text).
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match = self.follower = 0
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [-1]
        self._last = 0

    def append(self, token: int, *, last: bool = False) -> None:
        """Append a token; `last` marks the end of a text, which nothing follows."""
        following, link, length, end = self.following, self.link, self.length, self.end
        place = -1 if last else len(self.tokens)
        new, state = len(link), self._last
        self.tokens.append(token)
        following.append({})
        link.append(0)
        length.append(length[state] + 1)
        end.append(place)
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            old = following[state][token]
            if length[old] == length[state] + 1:
                link[new] = old
            else:  # its shorter substrings also end here, so they get their own state
                short = new + 1
                following.append(following[old].copy())
                link.append(link[old])
                length.append(length[state] + 1)
                end.append(end[old])
                while state >= 0 and following[state].get(token) == old:
                    following[state][token] = short
                    state = link[state]
                link[old] = link[new] = short
        self._last, state = new, link[new]
        self.match, self.follower = length[state], end[state] + 1
        for _ in range(_ANCESTORS if place >= 0 else 0):
            if state <= 0:
                break
            end[state] = place
            state = link[state]

    def add(self, text: Sequence[int]) -> None:
        """Append a whole text."""
        for number, token in enumerate(text, 1):
            self.append(token, last=number == len(text))
        self.append(_END)


NOTHING = Proposal.of([], match=0)


class Cursor:
    """The longest suffix of a text that occurs in an automaton; both may grow meanwhile.

    It does not see that a longer one occurs in what the automaton is given later.

    Attributes:
        match: its number of tokens.
    """

    def __init__(self, others: Automaton) -> None:
        self._others = others
        self._state = self.match = 0

    def extend(self, tokens: Iterable[int]) -> None:
        others = self._others
        for token in tokens:
            self._settle()
            while self._state > 0 and token not in others.following[self._state]:
                self._state = others.link[self._state]
                self.match = others.length[self._state]
            if token in others.following[self._state]:
                self._state = others.following[self._state][token]
                self.match += 1

    def find(self, longest: int) -> Proposal:
        """What followed the suffix there, or a shorter one that something follows."""
        self._settle()
        others, state, match = self._others, self._state, self.match
        while others.end[state] < 0 < state:  # nothing follows this match
            state = others.link[state]
            match = others.length[state]
        if not state:
            return NOTHING
        first = others.end[state] + 1
        tokens = others.tokens[first : first + longest]
        if _END in tokens:
            del tokens[tokens.index(_END) :]
        return Proposal.of(tokens, match)

    def _settle(self) -> None:
        """Move on to the state that the suffix has got for itself since, if any."""
        others = self._others
        while self._state > 0 and self.match <= others.length[others.link[self._state]]:
            self._state = others.link[self._state]


class Lookup(Source):
    """Looks drafts up in each row's own history, and in other texts if given.

    Args:
        texts: token ids of other texts, indexed once for all rows and decodings. The longer match
            wins; the row's own wins a tie. The index takes about half a kilobyte per token.

    Raises:
        TypeError: a text is not a sequence of integers.
        ValueError: a token id is negative, or, when decoding begins, outside the vocabulary.
    """

    def __init__(self, texts: Iterable[Sequence[int]] = ()) -> None:
        self.others = Automaton()
        for text in texts:
            try:
                tokens = [index(token) for token in text]
            except TypeError:
                raise TypeError(
                    f"each text to look drafts up in must be a list of token ids, got {text!r}; "
                    "encode texts with the model's tokenizer"
                ) from None
            if min(tokens, default=0) < 0:
                raise ValueError(f"texts to look drafts up in hold token ids, got {min(tokens)}")
            self.others.add(tokens)
        self._largest = max(self.others.tokens, default=_END)

    key = name = "lookup"

    @property
    def words(self) -> str:
        also = " and in the texts given" if self.others.tokens else ""
        return f"looked up in the text so far{also}"

    def open(self, batch: Batch) -> State:
        if self._largest >= batch.model.vocabulary:
            raise ValueError(
                f"texts to look drafts up in must hold token ids of the model's vocabulary, 0.."
                f"{batch.model.vocabulary - 1}, got {self._largest}; encode them with its tokenizer"
            )
        model, seats = batch.model, batch.seats  # capturing the batch would form a cycle

        def start(row: int) -> LookupRow:
            # The encoder's input comes first, as part of the row's history.
            before = model.read[row].tolist() if row < len(model.read) else []
            return self.row([*before, *seats[row].prompt.tolist()])

        return RowsState(batch, start)

    def row(self, prompt: Sequence[int]) -> LookupRow:
        """The history of a row that begins with this prompt."""
        row = LookupRow(self)
        row.extend(prompt)
        return row


class LookupRow:
    """A row's history, and the match of its end in the other texts."""

    def __init__(self, lookup: Lookup) -> None:
        self._history, self._others = Automaton(), Cursor(lookup.others)

    def extend(self, tokens: Iterable[int]) -> None:
        tokens = [*tokens]
        for token in tokens:
            self._history.append(token)
        self._others.extend(tokens)

    def find(self, longest: int) -> Proposal:
        """Return a draft of at most `longest` tokens.

        In the history a draft continues into itself, as a loop would. Other texts end it.
        """
        history, found = self._history, self._others.find(longest)
        if (found.match or 0) > history.match:
            return found
        if not history.match:
            return NOTHING
        period = len(history.tokens) - history.follower
        tokens = [history.tokens[history.follower + i % period] for i in range(longest)]
        return Proposal.of(tokens, history.match)
