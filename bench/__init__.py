"""Measurements of speed and memory against peers in the same run: `python -m bench.training` and others.

training        a training step of nanorope and of its peers
each_encoding   a training step of each encoding relative to RoPE's
attention       attention alone: FlexAttention against what is used without it
growth          how time and memory of a step grow with T and with parameters
evaluation      a forward pass over a long context
loss            the chunked loss
prepare         preparing a corpus, against nanoGPT's way
speedrun        the time to the loss of a plain config
smollm2         a pretrained model out of a Python package, as a Hugging Face folder
soak            faults, again and again: `make soak`
measuring       what the others share: steps, fresh processes, peak memory, tables
"""
