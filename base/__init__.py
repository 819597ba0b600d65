"""What stands below the model and knows nothing of it.

errors, files     UserError; JSON files, text that is written atomically
command           exit codes, signals, the argument parser
interrupt         Ctrl-C while a command is imported
schema            TOML files that extend one another; pydantic schemas and their errors in words
loss              cross-entropy over a large vocabulary, in chunks
"""
