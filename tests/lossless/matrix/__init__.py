"""The lossless matrix: `python -m tests.lossless.matrix` decodes in every combination and writes docs/lossless.md."""
