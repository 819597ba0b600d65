"""Measuring trained models: protocols, probes, context extension, comparing, sweeping.

protocols    the protocols of eval.py, a class each: the targets, what is measured, how it is shown
scoring      the text, its windows, and the forward passes that protocols share
trigram      a Kneser-Ney trigram, which a model must beat
extension    methods that extend the context of a trained model (--extend)
results      the table of all that was measured, its sums and files, and how reports show a protocol
show         what eval.py prints, and --extend all
runs         reading what train.py and eval.py wrote of runs, and refusing those that cannot be compared
comparison   comparing them: curves, tables, differences
intervals    intervals over seeds and text, and Holm's correction
estimates    tables of them: what is shown of each curve, the gate, what may be claimed
figures      the figures of eval.py, compare.py and the pages
report       the page of compare.py
sweeping     many runs: train, evaluate, resume
trials       the values that sweep.py tries for each config, and the choice among them
"""
