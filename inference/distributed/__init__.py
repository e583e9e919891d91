"""Distributed speculative inference (DSI, Timor et al., arXiv 2405.14105): target servers verify while rank 0 drafts.

Rank 0 drafts and decides. Every other rank is a target server, a whole copy of the target with a cache of its own. The
text is that of plain decoding, greedy and sampled, in whatever order the answers arrive.

**The chain.** Rank 0 has the committed text and a chain of drafts after it. It drafts on without waiting. A position
is *covered* when a server was asked for the target's next token after it. A *task* covers the positions from the first
uncovered one to the end of the chain. It goes to a free server when

- the next position to decide is not covered: the target's own next token is always being computed, or
- `lookahead` drafts wait to be covered.

**The answer** is one token per covered position: the target's own next token, drawn at the server from its processed
scores with the noise of that position. So a message is a few token ids; features are added for drafters that read them.

**The walk.** Rank 0 keeps the answers of the present version and walks from the last committed token. An answer that
equals the draft commits it. Any other answer is committed too, as the target's own token, and ends the round: all later
drafts are dropped, the version is raised, and answers of older versions are ignored. So order does not matter: an
answer is used only when every token before it is certain, and its server saw exactly these tokens.

**No slow-down.** A round ends when an answer arrives, so its server is free. The next round's first task, the newest
token alone, goes out at once, as plain decoding would begin its next pass. Rank 0 looks for answers between two
drafts. So the time of a token exceeds plain decoding's by a draft and a message at most, apart from wider passes.

**Caches.** A task names the length to which the server cuts its cache, and holds all tokens after that length: those
that the server missed, and then the covered ones. Rank 0 knows what each server holds, and asks the free server that
missed least.

**Drafters** are used through `Drafter.extend` and `expand`, as a tree that is a chain. A new round extends the drafter
with what was committed. So does the end of its reach: then the drafts that still wait are expanded again. Features come
with the answers, so they are late: in between, the drafter goes on with its own states.

Worked example, two servers, lookahead 2, the text ends with a, and the target would write b c x:

    rank 1: after a?       rank 0 drafts b, c      rank 2: after b, after c?     rank 0 drafts d, e
    rank 1 answers b       b equals the draft and is committed; rank 1: after d, after e?     rank 0 drafts f, g
    rank 2 answers c x     c is committed; x is not d, so x is committed, d e f g are dropped, version + 1
    rank 2: after x?       rank 0 drafts after x; rank 1's answer, when it comes, is of the old version

**Messages** are packed integers over gloo (`wire`), also where the models are on GPUs: the decision is taken on the
host, where the token ids must be anyway. Each has the protocol's version and its length, and nothing in it is code:
logits processors are sent as the names of known classes with their attributes (`processor_json`). A thread
per server waits for its answers, so that nothing polls a socket. A server that dies, or does not answer in time, ends
the run with its rank in the error.
"""
