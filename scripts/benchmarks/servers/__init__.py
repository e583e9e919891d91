"""Distributed speculative inference simulated, emulated, run and drawn."""
