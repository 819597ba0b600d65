"""What every run needs.

errors       UserError: a mistake that ends a command with one line and exit code 2
command      what every command shares: exit codes, signals, the argument parser
files        small files, read with a limit and written whole or not at all
toml         TOML files that extend one another, and overrides
schema       pydantic schemas in words: what a field accepts, what is wrong with a value
help         the pages of train.py --help
run          the folder of a run: config.toml, corpus.json, summary.json
folder       the folder of a run in training: locked, found again if renamed
lock         one process at a time
progress     a training run in memory: the metrics of its steps, its log lines and checkpoints
checkpoint   checkpoints: saved atomically, verified when read
log          progress on the screen, in metrics.jsonl and on W&B
signals      Ctrl-C, SIGTERM and others wait until the training is saved
screen       standard output that may get lost
device       what the machine allows: device, dtype, compiling, asynchronous copies, freed memory
parallel     several processes in one run: DDP, FSDP2
optimizer    AdamW and Muon
loss         cross-entropy over a large vocabulary, in chunks
gradients    functions whose backward pass keeps less memory than autograd's
flex         FlexAttention on CUDA
"""
