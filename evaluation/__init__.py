"""Measuring trained models: protocols, probes, context extension, comparing, sweeping.

protocols    the protocols of eval.py, and the records that they make
windows      which tokens are scored, after how many
probes       repeat, copy, passkey: is far context used?
extension    methods that extend the context of a trained model (--extend)
show         the table and the picture of eval.py
comparison   reading runs and comparing them: seeds, pairs, intervals
report       tables and pictures of compare.py: Markdown, HTML, CSV
sweeping     many runs: train, evaluate, resume
"""
