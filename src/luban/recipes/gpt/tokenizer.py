"""Text to tokens and back: bytes, or byte pairs learnt from the text."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

Pair = tuple[int, int]

# Merges stay inside a word: a name or number with the space before it, a line start with its indentation, signs.
_WORDS = re.compile(
    rb" ?[A-Za-z_]{1,24}| ?[0-9]{1,8}|\n[ ]{0,24}|[ ]{1,24}|[\x80-\xff]{1,24}|[^A-Za-z0-9_ \n\x80-\xff]{1,8}"
)


@dataclass(frozen=True)
class Tokenizer:
    """Token i < 256 is the byte i; token 256 + k stands for the pair merges[k]. No merges: plain bytes."""

    merges: tuple[Pair, ...] = ()
    _known: dict[bytes, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return 256 + len(self.merges)

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text, uint16, shape (n,)."""
        if not self.merges:
            return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
        words = _WORDS.findall(text)
        ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        for word in set(words).difference(self._known):
            self._known[word] = _merge_word(word, ranks)
        return np.fromiter(chain.from_iterable(map(self._known.__getitem__, words)), dtype=np.uint16)

    def decode(self, tokens: Any) -> str:
        """The text of some tokens; bytes that are not UTF-8 become replacement characters."""
        pieces = [bytes([i]) for i in range(256)]
        for a, b in self.merges:
            pieces.append(pieces[a] + pieces[b])
        return b"".join(pieces[int(t)] for t in tokens).decode(errors="replace")


def learn(text: bytes, size: int) -> Tokenizer:
    """A byte-pair tokenizer of at most `size` tokens: the most frequent pair is merged again and again.

    Only words that differ are looked at, and only those that hold the merged pair are counted anew.
    """
    counted = Counter(_WORDS.findall(text))
    words = [list(w) for w in counted]
    weights = list(counted.values())
    pairs: Counter[Pair] = Counter()
    where: dict[Pair, set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        _count(word, weights[i], i, pairs, where)
    queue = [(-n, pair) for pair, n in pairs.items()]
    heapq.heapify(queue)
    merges: list[Pair] = []
    while queue and len(merges) < size - 256:
        n, pair = heapq.heappop(queue)
        if -n != pairs[pair]:  # counted anew since; its newer entry is in the queue too
            continue
        if -n < 2:
            break
        merges.append(pair)
        for changed in _apply(pair, 255 + len(merges), words, weights, pairs, where):
            if pairs[changed] > 0:
                heapq.heappush(queue, (-pairs[changed], changed))
    return Tokenizer(tuple(merges))


def _count(word: list[int], weight: int, i: int, pairs: Counter[Pair], where: dict[Pair, set[int]]) -> None:
    for pair in zip(word, word[1:], strict=False):
        pairs[pair] += weight
        where[pair].add(i)


def _apply(
    pair: Pair,
    token: int,
    words: list[list[int]],
    weights: list[int],
    pairs: Counter[Pair],
    where: dict[Pair, set[int]],
) -> set[Pair]:
    """Merges a pair in every word that holds it; returns the pairs whose counts changed."""
    changed: set[Pair] = set()
    for i in where.pop(pair):
        word, weight = words[i], weights[i]
        old = list(zip(word, word[1:], strict=False))
        for p in old:
            pairs[p] -= weight
        words[i] = _replace(word, pair, token)
        _count(words[i], weight, i, pairs, where)
        changed.update(old, zip(words[i], words[i][1:], strict=False))
    where.pop(pair, None)
    del pairs[pair]
    changed.discard(pair)
    return changed


def _replace(word: list[int], pair: Pair, token: int) -> list[int]:
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(token)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def _merge_word(word: bytes, ranks: dict[Pair, int]) -> tuple[int, ...]:
    tokens = list(word)
    while len(tokens) > 1:
        rank, pair = min((ranks.get(p, len(ranks)), p) for p in zip(tokens, tokens[1:], strict=False))
        if rank == len(ranks):
            break
        tokens = _replace(tokens, pair, 256 + rank)
    return tuple(tokens)
