"""Measuring trained models: protocols, probes, context extension, comparing, sweeping.

windows      the text to evaluate on, and which of its tokens each protocol scores
protocols    the protocols of eval.py: forward passes over these windows, and the records they yield
progress     how far an evaluation is
probes       repeat, copy, retrieval: does the model use distant context?
extension    methods that extend the context of a trained model (--extend)
results      the files that eval.py writes, and merging a second evaluation into them
show         the table that eval.py prints
measures     what compare.py shows for each protocol, computed from sums
runs         reading what train.py and eval.py wrote of runs, and refusing those that cannot be compared
comparison   comparing them: labels, tables, paired differences
intervals    intervals over seeds and text, and Holm's correction
report       the report of compare.py, in Markdown and HTML, and the palette of all pictures
pictures     the pictures of eval.py and compare.py
sweeping     many runs: train, evaluate, resume
advice       which method to use for a longer context (--advise)
trials       the values that sweep.py tries for each config, and the choice among them
"""
