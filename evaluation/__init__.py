"""Measuring trained models: protocols, probes, context extension, comparing, sweeping.

windows      the text to evaluate on, and which of its tokens each protocol scores
protocols    the protocols of eval.py: forward passes over these windows, and the records they yield
probes       repeat, copy, passkey: does the model use distant context?
extension    methods that extend the context of a trained model (--extend)
results      the files that eval.py writes, and merging a second evaluation into them
show         the table that eval.py prints
comparison   reading runs and comparing them: labels, seeds, paired differences, intervals
report       the report of compare.py, in Markdown and HTML, and the palette of all pictures
pictures     the pictures of eval.py and compare.py
sweeping     many runs: train, evaluate, resume
"""
