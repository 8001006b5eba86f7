"""Speculative decoding by real target passes: loop, verification, metrics, report."""
