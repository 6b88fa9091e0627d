"""Prompts of a wanted length, made of common words that are one token each in usual vocabularies.

A block's words come from its hash id alone: two trace rows with equal leading ids have equal leading text, so that a
prefix cache finds what the traced service's would have found. The length in tokens is right to within a few per cent;
the server's own count is what the report uses.
"""

from __future__ import annotations

import random

from kvrelay_loadtest.trace import HASH_BLOCK, TraceRow

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many off before must well back through years much where your way down "
    "should because long each just state those people too world still see work men get here life both being under "
    "never day same another know while last might us great old year come since against go came right used take "
    "three states himself few house use during without again place around however home small found thought went say "
    "part once general high upon school every does got united left number course war until always away something "
    "fact water though less public put think almost hand enough far took head yet government system set told "
    "nothing night end why called find going look asked later point knew next week city give group "
)
WORDS = _COMMON.split()


def words(seed: str, count: int) -> str:
    """`count` words, each with a space before it. The first of a longer text with the same seed are the same."""
    return "".join(f" {word}" for word in random.Random(seed).choices(WORDS, k=count))


def prompt_of(row: TraceRow, number: int, length_scale: float = 1.0, seed: int = 0) -> str:
    """The prompt of a trace row that `length_scale` has already shortened; `number` tells rows without ids apart."""
    if not row.hash_ids:
        return words(f"{seed}/row/{number}", row.num_input)
    block = max(1, round(HASH_BLOCK * length_scale))
    parts, left = [], row.num_input
    for hash_id in row.hash_ids:
        parts.append(words(f"{seed}/block/{hash_id}", min(block, left)))
        left -= min(block, left)
        if left == 0:
            break
    return "".join(parts) + (words(f"{seed}/rest/{number}", left) if left else "")
