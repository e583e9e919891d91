"""SPEED (arXiv 2310.12072): speculation inside a decoder whose groups of layers share their weights."""
