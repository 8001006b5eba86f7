"""Drafter architectures behind one contract (see `base`)."""
