"""Benchmarks: ``python -m bench cpu`` and ``python -m bench gpu`` from the repository's root."""
