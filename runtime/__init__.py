"""What every run needs.

errors, files     UserError; JSON files, text that is written atomically
command, help     exit codes, signals, the argument parser; the pages of train.py --help
schema            TOML files that extend one another; pydantic schemas and their errors in words
run, log          a run's folder and what happens between its steps; its lines
checkpoint        saved atomically, verified when read
device            what the machine allows: device, dtype, memory, compiling
parallel          several processes in one run: DDP, FSDP2
optimizer, loss   AdamW and Muon; cross-entropy over a large vocabulary, in chunks
flex              FlexAttention on CUDA
"""
