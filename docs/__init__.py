"""The documentation, and the scripts that generate a part of it: `python -m docs.gallery`.

data, longer-contexts, probes, hugging-face, comparing, fair-comparisons, benchmark, new-encoding, python,
speed, scaling      one subject each
encodings    the field guide; its tables, formulas and pictures are generated
gallery      draws the pictures and writes the field guide (`make gallery`)
properties   properties of the encodings, measured
study        writes the tables of the studies from the folders of results/: `python -m docs.study`
rows         writes the record table of the benchmark and checks its rows: `python -m docs.rows`
"""
