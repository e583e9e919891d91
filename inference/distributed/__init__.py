"""Distributed speculative inference (DSI, Timor et al., arXiv 2405.14105): target servers verify while rank 0 drafts.
docs/distributed.md tells it at length.

Rank 0 drafts and decides. It has the committed text and a chain of drafts after it. Every other rank is a target
server, a whole copy of the target with a cache of its own. A position is *covered* when a server was asked for the
target's next token after it. A *task* covers the positions from the first uncovered one to the end of the chain. It
goes to a free server when the next position to decide is not covered, or when `lookahead` drafts wait to be covered.

The *answer* is one token per covered position, drawn at the server with the noise of that position. Rank 0 walks along
the answers from the last committed token. One that equals the draft commits it. Any other is committed too, as the
target's own token, and ends the round: later drafts are dropped, the version is raised, and answers of older versions
are ignored. An answer is used only when every token before it is certain, so the order of answers does not matter.

A round ends when an answer arrives, so its server is free, and the next round's first task goes out at once. So a
token takes no longer than in plain decoding, but for a draft, a message and wider passes.

Worked example, two servers, lookahead 2, the text ends with a, and the target would write b c x:

    rank 1: after a?       rank 0 drafts b, c      rank 2: after b, after c?     rank 0 drafts d, e
    rank 1 answers b       b equals the draft and is committed; rank 1: after d, after e?     rank 0 drafts f, g
    rank 2 answers c x     c is committed; x is not d, so x is committed, d e f g are dropped, version + 1
    rank 2: after x?       rank 0 drafts after x; rank 1's answer, when it comes, is of the old version
"""
