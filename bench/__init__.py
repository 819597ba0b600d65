"""Measurements of speed and memory against peers in the same run: `python -m bench.steps` and others.

steps       a training step of nanorope, of its peers and of each encoding, by length and by size
speedrun    the time to the loss of a plain config
"""
