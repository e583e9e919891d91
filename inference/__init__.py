"""How drafts become tokens: the target, its cache, trees of drafted tokens and the rules that accept them."""
