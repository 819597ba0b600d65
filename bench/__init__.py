"""Measurements of speed and memory against peers in the same run: `python -m bench.training` and others."""
