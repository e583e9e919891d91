"""Conversations on the way to batches: files and layouts, tokens and what of them is learned, packing, streams."""
