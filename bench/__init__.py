"""Speed and memory against peers in the same run: `python -m bench.steps` measures training steps."""
