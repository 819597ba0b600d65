"""What stands above the model: what every run needs.

help, dry_run     the pages of train.py --help; what a run would be refused for, and its cost
run, log          a run's folder and what happens between its steps; its lines
checkpoint        saved atomically, verified when read
device            what the machine allows: device, dtype, memory, compiling
parallel          several processes in one run: DDP, FSDP2
optimizer         AdamW and Muon
"""
