"""What a run stands on. Nothing here knows an encoding or a protocol.

errors       UserError: a mistake that ends a command with one line and exit code 2
command      what every command shares: exit codes, signals, the argument parser
files        small files, read with a limit and written whole or not at all
checkpoint   checkpoints: saved atomically, verified when read
log          progress on the screen, in metrics.jsonl and on W&B
optimizer    AdamW and Muon
parallel     several processes in one run: DDP, FSDP2
loss         cross-entropy over a large vocabulary, in chunks
flex         FlexAttention on CUDA
"""
