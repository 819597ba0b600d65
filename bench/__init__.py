"""Speed and memory against peers in the same run: `python -m bench.steps` measures training steps.

gpu-study.sh is not a benchmark: it trains and evaluates the study of results/gpu.
"""
